"""Breaks runs on purpose, goes on with them, and compares every bit with a run that nothing befell.

    python scripts/faults.py [F1 F3 ...]        the suites named, all of them if none is
    python scripts/faults.py --full             every suite in full size
    python scripts/faults.py F15 --full --part 2/4      the second quarter of its cases
    python scripts/faults.py --soak 2000        that many mixed faults
    python scripts/faults.py --case "fp32 kill@mark=40 enospc@file=17"      one case again, its files kept
    python scripts/faults.py --controls         defects planted in the runner, each must be found; some with --size=0

One process imports torch, and forks a child for every life of a run, which calls the real entry point; ranks are
forked as well. Prints for each suite, and for all together: cases, faults that struck, runs lost, runs with other bits,
runs that showed a traceback, seconds, and what plays a failed case again. A suite that breaks down itself is a fault of
its own, and the others are played all the same. What is random follows from `--seed`. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT / "tests"), str(ROOT)]  # in place of this folder

from faults import cold, controls, corpora, links, power, shared_sweep  # noqa: E402
from faults.judges import Tally, judge  # noqa: E402
from faults.plan import parse_case  # noqa: E402
from faults.referee import Referee  # noqa: E402
from faults.small_disk import can_mount  # noqa: E402
from faults.suites import SUITES, Make, soak  # noqa: E402

PORTION = 100  # faults of a soak between two lines of progress
OWN = {  # not made of cases that are played
    "F6": (cold.what, cold.run), "F10": (power.what, power.run), "F21": (cold.what_starts, cold.starts),
    "F28": (shared_sweep.what, shared_sweep.run), "F29": (links.what, links.run),
    **{name: (corpora.CORPORA[name][0], partial(corpora.run, name)) for name in corpora.CORPORA},
}  # fmt: skip
ELSEWHERE = """\
Not here: what the tests show without a fault from outside: F20 (no memory,
tests/training/recovery/test_retry.py, tests/runs/test_out_of_memory.py), F22 (a resume elsewhere,
tests/assemble/test_resumption.py), F23 (two processes in one folder, tests/runs/test_lock.py)."""


def main() -> int:
    words = arguments()
    folder = Path(tempfile.mkdtemp(prefix="trainrun-faults-", dir=words.folder))
    referee = Referee(folder, keep=words.case is not None)
    print(f"seed {words.seed}, {words.judges} judges, {folder}\n{'' if words.controls else HEAD}", flush=True)
    tallies: list[Tally] = []
    try:
        if words.controls:
            return controls.run(referee, words.judges, whole=words.size > 0)
        for tally, work in plan(referee, words, folder):
            tallies.append(tally)
            run_suite(tally, work)
            show(tally)  # with what failed, at once
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        if words.case is None and not any(tally.failed for tally in tallies):
            shutil.rmtree(folder, ignore_errors=True)
    show_table(tallies, words.seed)
    return 1 if not tallies or any(tally.failed for tally in tallies) else 0


Work = Callable[[Tally], None]


def run_suite(tally: Tally, work: Work) -> None:
    """One that breaks down is a fault, and no end of those that follow."""
    began = time.monotonic()
    try:
        work(tally)
    except Exception as error:
        traceback.print_exc()
        tally.other += 1
        tally.failed.append((tally.name, f"the suite itself: {type(error).__name__}: {error}"))
    finally:
        tally.seconds = time.monotonic() - began


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
    if words.folder is not None and not Path(words.folder).is_dir():
        parser.error(f"--folder={words.folder}: no such folder; make it first")
    return words


def names() -> list[str]:
    return sorted([*SUITES, *OWN], key=lambda name: int(name[1:]))


def part(text: str) -> tuple[int, int]:
    """`2/4` -> the second of four."""
    number, _, count = text.partition("/")
    if not 1 <= int(number) <= int(count):
        raise ValueError
    return int(number), int(count)


def plan(referee: Referee, words: argparse.Namespace, folder: Path) -> Iterator[tuple[Tally, Work]]:
    """What is to be done, one after the other."""
    if words.case is not None:
        cases = [parse_case(words.case)]
        yield Tally("case", "as typed", played=True), lambda tally: judge(referee, cases, 1, tally.add)
        return
    if words.soak:
        yield Tally("F26", "mixed faults", played=True), partial(soaked, referee, words)
        return
    size = 1.0 if words.full else words.size
    for name in names():
        if words.suites and name not in words.suites:
            continue
        rng = random.Random(f"{words.seed} {name}")
        if name == "F29" and not links.can_connect_machines():
            print("F29  left out: this process may make no network namespaces")
        elif name in OWN:
            told, run = OWN[name]
            yield Tally(name, told), partial(run, folder, rng, size)
        elif name == "F9" and not can_mount(folder):
            print("F9   left out: this process may mount nothing")
        else:
            told, make = SUITES[name]
            yield Tally(name, told, played=True), partial(played, referee, words, make, rng, size)


def played(
    referee: Referee, words: argparse.Namespace, make: Make, rng: random.Random, size: float, tally: Tally
) -> None:
    first, every = words.part
    judge(referee, make(referee.reference, rng, size)[first - 1 :: every], words.judges, tally.add)


def soaked(referee: Referee, words: argparse.Namespace, tally: Tally) -> None:
    """In portions, because a fault drawn for late in a run may find it at its end."""
    rng = random.Random(f"{words.seed} soak")
    told = 0
    while tally.faults < words.soak:
        faults = min(words.soak - tally.faults, PORTION)
        judge(referee, soak(referee.reference, rng, faults), words.judges, tally.add)
        show_failed(tally, told)
        told = len(tally.failed)
        print(f"{tally.faults} faults, {told} failed", flush=True)


HEAD = "suite  cases faults  lost different tracebacks other  seconds"


def line(name: str, tallies: list[Tally]) -> str:
    cases, faults, lost, different, tracebacks, other, seconds = (
        sum(getattr(tally, what) for tally in tallies)
        for what in ("cases", "faults", "lost", "different", "tracebacks", "other", "seconds")
    )
    return f"{name:5} {cases:6} {faults:6} {lost:5} {different:9} {tracebacks:10} {other:5} {seconds:8.0f}"


def show(tally: Tally) -> None:
    print(f"{line(tally.name, [tally])}  {tally.what}", flush=True)
    show_failed(tally, 0)


def show_failed(tally: Tally, first: int) -> None:
    for case, why in tally.failed[first:]:
        again = f'python scripts/faults.py --case "{case}"' if tally.played else f"{tally.name} {case}"
        print(f"  failed: {again}\n    {why}", flush=True)


def show_table(tallies: list[Tally], seed: int) -> None:
    print(f"\n{HEAD}")
    for tally in tallies:
        print(f"{line(tally.name, [tally])}  {tally.what}")
    print(f"{line('all', tallies)}  seed {seed}")


if __name__ == "__main__":
    sys.exit(main())
