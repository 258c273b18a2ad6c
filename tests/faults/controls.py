"""Negative controls: with each planted defect, one of its cases must be judged badly."""

from __future__ import annotations

import random
from pathlib import Path

from faults import power
from faults.defects import DEFECTS, UNSYNCED
from faults.judges import Tally, judge
from faults.plan import Case, parse_case
from faults.referee import Outcome, Referee

# kills in the middle of a run, in the subject where the defect shows
WHERE = {
    "no-random-state": "sync kill@batch=26",
    "random-state-before-iter": "sync kill@batch=26",
    "no-position": "sync kill@batch=28",
    "no-optimizer-state": "sync kill@batch=26",
    "no-schedule": "sync kill@batch=26",
    "no-average": "sync kill@batch=26",
    "no-loss-scale": "fp16 kill@batch=26",
    "rows-not-cut": "sync kill@file=155",
    "rows-after-the-commit": "sync kill@batch=24",
    "deletion-before-the-commit": "sync kill@file=155",
    "acknowledged-too-early": "sync kill@batch=26",
    "other-buckets": "ddp3 kill@batch=16",
    "begun-anew": "sync kill@batch=26",  # whose second life is the same command
}
assert WHERE.keys() == DEFECTS.keys()
# of those with one rank: state, position, rows, the order of the commit, the command
SOME = ("no-optimizer-state", "no-position", "rows-not-cut", "acknowledged-too-early", "begun-anew")


def play(referee: Referee, judges: int, whole: bool) -> dict[str, Outcome]:
    """By defect. whole: every defect; a kill at one place may miss it, so a few others are tried too."""
    outcomes: dict[str, Outcome] = {}

    def note(outcome: Outcome) -> None:
        known = outcomes.get(outcome.case.defect)
        if known is None or known.good:
            outcomes[outcome.case.defect] = outcome

    names, more = (DEFECTS, (0, 3, 7)) if whole else (SOME, (0,))
    judge(referee, [case for name in names for case in _cases(name, more)], judges, note)
    return outcomes


def _cases(name: str, more: tuple[int, ...]) -> list[Case]:
    subject, fault = WHERE[name].split()
    place, _, value = fault.partition("=")
    return [parse_case(f"{subject} {place}={int(value) + one} defect={name}") for one in more]


def play_power(folder: Path, size: float, whole: bool) -> dict[str, int]:
    """How many states are judged badly, by defect."""
    lost = {}
    for name, plant in list(UNSYNCED.items())[: None if whole else 2]:
        tally = Tally(name, power.what)
        power.run(folder / name, random.Random(1), size, tally, plant)
        lost[name] = tally.lost
    return lost


def run(referee: Referee, judges: int, whole: bool) -> int:
    """Prints what each was found by; returns 1 if one was not."""
    missed = 0
    for name, outcome in sorted(play(referee, judges, whole).items()):
        missed += outcome.good
        print(f"{'MISSED' if outcome.good else 'found ':7} {name:30} {'; '.join(outcome.problems)[:100]}")
    for name, lost in play_power(referee.folder, 0.02, whole).items():
        missed += lost == 0
        print(
            f"{'MISSED' if lost == 0 else 'found ':7} {name:30} {lost} states from which the run cannot go on"
        )
    return 1 if missed else 0
