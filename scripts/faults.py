"""Breaks runs on purpose, goes on with them, and compares every bit with a run that nothing befell.

    python scripts/faults.py [F1 F3 ...]        the suites named, all of them if none is
    python scripts/faults.py --full             every suite in full size (minutes)
    python scripts/faults.py F15 --full --part 2/4      the second quarter of its cases
    python scripts/faults.py --soak 2000        that many mixed faults
    python scripts/faults.py --case "fp32 kill@mark=40 enospc@file=17"      one case again, its files kept
    python scripts/faults.py --controls         defects planted in the runner; each must be found

One process imports torch, and forks a child for every life of a run, which calls the real entry point; ranks are
forked as well. Prints for each suite: cases, faults that struck, runs lost, runs with other bits, runs that showed a
traceback, and the command that plays a failed case again. What is random follows from `--seed`. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT / "tests"), str(ROOT)]  # in place of this folder

from faults import cold, controls, corpora, power  # noqa: E402
from faults.judges import Tally, judge  # noqa: E402
from faults.plan import Case, parse_case  # noqa: E402
from faults.referee import Referee  # noqa: E402
from faults.small_disk import can_mount  # noqa: E402
from faults.suites import SUITES, soak  # noqa: E402

PORTION = 100  # faults of a soak between two lines of progress
OWN = {  # not made of cases that are played
    "F6": cold.run, "F10": power.run, "F21": cold.starts,
    **{name: partial(corpora.run, name) for name in corpora.CORPORA},
}  # fmt: skip
ELSEWHERE = """\
Not here: F5 (sharded models), which trainrun has not; what the tests show without a fault from outside: F20 (no memory,
tests/test_retry.py, tests/runs/test_out_of_memory.py), F22 (a resume elsewhere, tests/test_resumption.py), F23 (two
processes in one folder, tests/test_runlock.py)."""


def main() -> int:
    words = arguments()
    folder = Path(tempfile.mkdtemp(prefix="trainrun-faults-", dir=words.folder))
    referee = Referee(folder, keep=words.case is not None)
    print(f"seed {words.seed}, {words.judges} judges, {folder}", flush=True)
    began, tallies = time.monotonic(), []
    try:
        if words.case is not None:
            tallies.append(play(referee, [parse_case(words.case)], "case", "as typed", words.judges))
        elif words.controls:
            return controls.run(referee, words.judges, around=words.size > 0)
        elif words.soak:
            tallies.append(soaked(referee, words))
        else:
            tallies += suites(referee, words, folder)
    finally:
        if words.case is None and not any(tally.failed for tally in tallies):
            shutil.rmtree(folder, ignore_errors=True)
    show(tallies, time.monotonic() - began)
    return 1 if any(tally.failed for tally in tallies) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ELSEWHERE, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(names()))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--size", type=float, default=0.1, help="share of the full size")
    parser.add_argument(
        "--part", type=part, default=(1, 1), metavar="N/M", help="of the cases of a suite that plays cases"
    )
    parser.add_argument("--soak", type=int, default=0, metavar="FAULTS")
    parser.add_argument("--case", metavar="WORDS")
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judges", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=None, help="where the runs are made")
    words = parser.parse_args()
    if unknown := set(words.suites) - {*SUITES, *OWN}:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    return words


def names() -> list[str]:
    return sorted([*SUITES, *OWN], key=lambda name: int(name[1:]))


def part(text: str) -> tuple[int, int]:
    """`2/4` -> the second of four."""
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError
    return int(number), int(count)


def suites(referee: Referee, words: argparse.Namespace, folder: Path) -> list[Tally]:
    size = 1.0 if words.full else words.size
    tallies = []
    for name in names():
        if words.suites and name not in words.suites:
            continue
        rng = random.Random(f"{words.seed} {name}")
        if name in OWN:
            tally = OWN[name](folder, rng, size)
        elif name == "F9" and not can_mount(folder):
            print("F9   left out: this process may mount nothing")
            continue
        else:
            what, make = SUITES[name]
            first, every = words.part
            cases = make(referee.reference, rng, size)[first - 1 :: every]
            tally = play(referee, cases, name, what, words.judges)
        tallies.append(tally)
        show([tally])  # with what failed, at once
    return tallies


def soaked(referee: Referee, words: argparse.Namespace) -> Tally:
    """In portions, because a fault drawn for late in a run may find it at its end."""
    rng, tally = random.Random(f"{words.seed} soak"), Tally("F26", "mixed faults")
    told = 0
    while tally.faults < words.soak:
        for case in portion(referee, rng, min(words.soak - tally.faults, PORTION), words.judges):
            tally.add(case)
        for case, why in tally.failed[told:]:
            print(f'  failed: python scripts/faults.py --case "{case}"\n    {why}', flush=True)
        told = len(tally.failed)
        print(f"{tally.faults} faults, {len(tally.failed)} failed, {tally.seconds:.0f} s of runs", flush=True)
    return tally


def portion(referee: Referee, rng: random.Random, faults: int, judges: int) -> list:
    outcomes: list = []
    judge(referee, soak(referee.reference, rng, faults), judges, outcomes.append)
    return outcomes


def play(referee: Referee, cases: list[Case], name: str, what: str, judges: int) -> Tally:
    tally = Tally(name, what)
    judge(referee, cases, judges, tally.add)
    return tally


def show(tallies: list[Tally], seconds: float | None = None) -> None:
    for tally in tallies:
        print(
            f"{tally.name:4} {tally.cases:5} cases {tally.faults:5} faults {tally.lost:3} lost {tally.different:3} "
            f"different {tally.tracebacks:3} tracebacks {tally.other:3} other  {tally.seconds:6.1f} s  {tally.what}",
            flush=True,
        )
        for case, why in tally.failed:
            print(f'  failed: python scripts/faults.py --case "{case}"\n    {why}', flush=True)
    if seconds is not None:
        faults, lost = sum(tally.faults for tally in tallies), sum(tally.lost for tally in tallies)
        different = sum(tally.different for tally in tallies)
        shown = sum(tally.tracebacks for tally in tallies)
        print(
            f"all: {faults} faults, {lost} runs lost, {different} different, {shown} tracebacks, {seconds:.0f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
