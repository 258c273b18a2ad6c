"""F11, F12, F13, F25: the corpora in full, each in a forked process with a home and a folder of its own."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from faults import corpus_damage, corpus_fuzz, corpus_hostile, corpus_inputs
from faults.corpus_case import Case
from faults.forks import run_forked
from faults.judges import Tally

TIMEOUT = 1200.0
Make = Callable[[int], list[Case]]
CORPORA: dict[str, tuple[str, Make, Callable[[Path], None], Callable[[Case, Path], str], int]] = {
    "F11": ("checkpoints with wrong bytes, files swapped, missing and old", corpus_damage.cases,
            corpus_damage.with_base, corpus_damage.check, 1000),
    "F12": ("headers and states that are sealed and make no sense", corpus_fuzz.cases,
            corpus_fuzz.with_base, corpus_fuzz.check, 20_000),
    "F13": ("files and folders of a stranger that want to run something", lambda count: corpus_hostile.cases(),
            corpus_hostile.with_base, corpus_hostile.check, 0),
    "F25": ("bad words, configs, data and checkpoints", lambda count: corpus_inputs.cases(),
            corpus_inputs.with_base, corpus_inputs.check, 0),
}  # fmt: skip


def run(name: str, folder: Path, rng: random.Random, size: float) -> Tally:
    """A case that is judged badly is lost: what should have stopped it did not. None counts as a fault of a run."""
    told, make, prepare, check, most = CORPORA[name]
    tally, place, began = Tally(name, told), folder / name, time.monotonic()
    (place / "home").mkdir(parents=True)
    cases = make(max(1, round(size * most)))
    if most == 0 and size < 1:
        cases = rng.sample(cases, max(1, round(size * len(cases))))

    def work() -> int:
        os.environ["HOME"] = str(place / "home")
        os.chdir(place)
        prepare(place)
        found = [(case.name, fault) for case in cases if (fault := check(case, place))]
        (place / "found.json").write_text(json.dumps(found))
        return 0

    ending = run_forked(work, place / "output", TIMEOUT)
    if ending.code:
        raise RuntimeError(f"{name}: {(place / 'output').read_text()[-3000:]}")
    tally.failed = [(case, fault) for case, fault in json.loads((place / "found.json").read_text())]
    tally.cases = len(cases)
    tally.lost, tally.seconds = len(tally.failed), time.monotonic() - began
    return tally
