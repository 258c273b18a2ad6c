"""F11, F13, F25, F27: the corpora in full, each in a forked process with a home and a folder of its own."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from faults import corpus_damage, corpus_folder, corpus_hostile, corpus_inputs
from faults.corpus_case import Case
from faults.forks import run_forked
from faults.judges import Tally

TIMEOUT = 1200.0
Make = Callable[[int, int], list[Case]]  # how many, and with which seed
CORPORA: dict[str, tuple[str, Make, Callable[[Path], None], Callable[[Case, Path], str], int]] = {
    "F11": ("checkpoints with wrong bytes, files swapped, missing and old", corpus_damage.cases,
            corpus_damage.with_base, corpus_damage.check, 1000),
    "F13": ("files and folders of a stranger that want to run something", lambda count, seed: corpus_hostile.cases(),
            corpus_hostile.with_base, corpus_hostile.check, 0),
    "F25": ("bad words, configs, data and checkpoints", lambda count, seed: corpus_inputs.cases(),
            corpus_inputs.with_base, corpus_inputs.check, 0),
    "F27": ("every file of a run folder with other content, or something else in its place", corpus_folder.cases,
            corpus_folder.with_base, corpus_folder.check, 1000),
}  # fmt: skip


def run(name: str, folder: Path, rng: random.Random, size: float, tally: Tally) -> None:
    """A case that is judged badly is lost: what should have stopped it did not. None counts as a fault of a run."""
    _, make, prepare, check, most = CORPORA[name]
    place = folder / name
    (place / "home").mkdir(parents=True)
    cases = make(max(1, round(size * most)), rng.randrange(10**6))
    if most == 0 and size < 1:
        cases = rng.sample(cases, max(1, round(size * len(cases))))

    def work() -> int:
        os.environ["HOME"] = str(place / "home")
        os.chdir(place)
        prepare(place)
        found = []
        for number, case in enumerate(cases):
            (place / "reached").write_text(f"{number} {case.name}")
            if fault := check(case, place):
                found.append((case.name, fault))
                (place / "found.json").write_text(json.dumps(found))
        return 0

    ending = run_forked(work, place / "output", TIMEOUT)
    if (place / "found.json").exists():
        tally.failed = [(case, fault) for case, fault in json.loads((place / "found.json").read_text())]
    if ending.code:
        if not (place / "reached").exists():
            raise RuntimeError(f"{name}: {(place / 'output').read_text()[-3000:]}")
        number, case = (place / "reached").read_text().split(" ", 1)
        why = f"took the process with it ({ending.code}): {(place / 'output').read_text()[-1000:]}"
        tally.failed.append(
            (case, f"{why}; {len(cases) - int(number) - 1} cases behind it were not looked at")
        )
    tally.cases = len(cases)
    tally.lost = len(tally.failed)
