"""F6, F21: the real command in new processes, killed with everything that it started; and not killed at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from faults.evidence import differences, facts_of
from faults.judges import Tally
from faults.subjects import SUBJECTS
from trainrun.parallel.rank_place import SAVE_SECONDS

what = "kill -9 of the whole process group, and of the command alone: real commands in new processes"
what_starts = "the same words in new processes, also with other numbers of workers: the same bits"
ORPHAN_SECONDS = SAVE_SECONDS + 10.0  # a rank whose driver died may save first


def run(folder: Path, rng: random.Random, size: float, tally: Tally) -> None:
    for name in ("workers", "ddp")[: 1 if size < 0.5 else 2]:
        whole = folder / f"cold-{name}"
        seconds = _command(whole, name, [*SUBJECTS[name].words, f"output_dir={whole / 'run'}"])[1]
        expected = facts_of(whole / "run")
        for number in range(max(1, round(5 * size))):
            _one(tally, folder / f"cold-{name}-{number}", name, rng, seconds, expected)


def starts(folder: Path, rng: random.Random, size: float, tally: Tally) -> None:
    """A case is a run, compared with the first of its subject; nothing befalls it."""
    times = max(2, round(5 * size))
    again = {name: [name] * times for name in ("fp32", "bf16", "fp16", "ddp")}
    compiled = {"compiled": ["compiled"] * 2} if size >= 1 else {}
    for name, runs in {**again, **compiled, "workers": [0, 1, 3]}.items():
        problems: list[str] = []
        facts: list[object] = []
        for number, workers in enumerate(runs):
            place = folder / f"start-{name}-{number}"
            words = [*SUBJECTS[name].words, f"output_dir={place / 'run'}"]
            if name == "workers":
                words = [word for word in words if not word.startswith("data.num_workers=")]
                words.append(f"data.num_workers={workers}")
            code, _ = _command(place, name, words)
            if code:
                problems.append(f"ends with {code}: {(place / 'output').read_text()[-1000:]}")
                break
            facts.append(facts_of(place / "run"))
            problems += list(differences(facts[0], facts[-1]))[:5]
        tally.cases += len(facts)
        tally.lost += len(facts) < len(runs)
        tally.different += len(facts) == len(runs) and bool(problems)
        if problems:
            tally.failed.append((name, "; ".join(problems)))


def _one(tally: Tally, place: Path, name: str, rng: random.Random, seconds: float, expected: object) -> None:
    same = words = [*SUBJECTS[name].words, f"output_dir={place / 'run'}"]
    problems = []
    for _ in range(2):
        alone = rng.random() < 0.5
        code, _ = _command(place, name, words, kill_after=rng.uniform(0.4, 0.95) * seconds, alone=alone)
        tally.faults += code == -signal.SIGKILL
        left = left_behind(place)
        if left:
            problems.append(f"left behind {ORPHAN_SECONDS:g} s after the kill: {left}")
        if (place / "run" / "checkpoints").exists():
            words = rng.choice([same, ["resume", str(place / "run")]])
    code, _ = _command(place, name, words)
    if code:
        problems.append(f"ends with {code}: {(place / 'output').read_text()[-1000:]}")
        tally.lost += 1
    elif found := list(differences(expected, facts_of(place / "run"))):
        problems += found[:5]
        tally.different += 1
    tally.cases += 1
    if problems:
        tally.failed.append((name, "; ".join(problems)))


def _command(
    place: Path, name: str, words: list[str], kill_after: float | None = None, alone: bool = False
) -> tuple[int, float]:
    """alone: the process that the user started is killed, the others must find out."""
    place.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "tests")])
    began = time.monotonic()
    with (place / "output").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainrun", *words], cwd=place, stdout=output, stderr=output,
            start_new_session=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    try:
        process.wait(kill_after if kill_after is not None else 120.0)
    except subprocess.TimeoutExpired:
        (os.kill if alone else os.killpg)(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, time.monotonic() - began


def left_behind(place: Path) -> list[int]:
    """Processes that still run there; ranks of a killed launcher get the time to save."""
    until = time.monotonic() + ORPHAN_SECONDS
    while (left := _running(place)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _running(place: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cwd", "status"]):
        if process.info["cwd"] == str(place) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found
