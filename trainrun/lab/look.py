"""A first look at a run: what it chooses for itself, and how long a step takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

from trainrun.errors import ConfigError, TrainingError
from trainrun.lab.choices import config_of, measured_choices
from trainrun.lab.contender import SLOW_STEP_SECONDS, Contender, Stand, least_steps
from trainrun.lab.contest import FIRST_ROUNDS
from trainrun.lab.duel import Duel, take_pair
from trainrun.lab.facts import Facts, seconds_of_run
from trainrun.lab.gate import NUMERIC, Verdict, judge
from trainrun.lab.starter import Measure, Starter
from trainrun.lab.statistics import EARLY, Ratio, settled
from trainrun.words.checks import parse_seconds

TURN_SHARE: Final = 1 / 400  # of the budget, for one turn
SHORTEST_TURN, LONGEST_TURN = 0.05, 0.3  # longer ones meet the drift of the machine
GATE_SHARE: Final = 1 / 120  # for the first steps that are compared
FEWEST_GATE, MOST_GATE = 3, 20
NOISE_SHARE: Final = 0.06  # of the budget
MOST_NOISE_PAIRS, LEAST_NOISE_PAIRS = 20, 6
CALM: Final = 0.01  # a machine that noise of this size shows needs no more pairs
FEWEST_LOADS, MOST_LOADS = 2, 50
FIRST_STEPS: Final = 3  # of a contender that finds its pace
FIRST_SHARE: Final = 0.6  # of a budget that is for first looks: the rest is for what they find
MANY: Final = 5  # times the least budget


def measure_for(budget: float) -> Measure:
    return Measure(FEWEST_GATE, min(LONGEST_TURN, max(SHORTEST_TURN, TURN_SHARE * budget)))


def look(words: Sequence[str], stand: Stand, measure: Measure, cores: int,
         budget: float) -> tuple[Facts, list[str]]:  # fmt: skip
    """The facts, and the run's own choices as words; sets how many steps are compared.

    Raises what a run of these words would raise, and ConfigError if no comparison fits into the budget.
    """
    config, began = config_of(words), stand.clock()
    scout = stand.start(config, budget)
    try:
        scout.pace(measure.turn_seconds)
        turn = scout.turn()
        step = turn.seconds / turn.steps
        batches = min(MOST_LOADS, max(FEWEST_LOADS, int(measure.turn_seconds / step)))
        loaded = scout.load(batches)
        ready, starting = scout.facts, scout.start_seconds
    finally:
        scout.close()
    needed = seconds_to_compare(starting, step, least_steps(ready), measure)
    refuse_too_short(budget, stand.clock() - began + needed, step)
    measure.gate_steps = min(MOST_GATE, max(FEWEST_GATE, int(GATE_SHARE * budget / step)))
    run_seconds = seconds_of_run(ready.total_steps, step, parse_seconds(config.trainer.max_time))
    facts = Facts(
        config, ready, cores, step, loaded.seconds / batches, turn.peak_bytes, ready.memory_bytes, run_seconds
    )
    return facts, measured_choices(config, ready)


def seconds_to_compare(starting: float, step: float, steps: int, measure: Measure) -> float:
    """Return the time to compare two runs of the same words with one changed setting, in the fewest useful turns.

    steps: those of a turn, without the one that comes before them.
    """
    turn = max(measure.turn_seconds, (steps + 1) * step)
    begun = starting + (measure.gate_steps + FIRST_STEPS) * step
    return 3 * begun + 2 * turn + FIRST_ROUNDS * 3 * turn


def refuse_too_short(budget: float, needed: float, step: float) -> None:
    """Only where steps are long: with short ones a search ends in time, whatever it has found."""
    if step > SLOW_STEP_SECONDS and needed > FIRST_SHARE * budget:
        least = math.ceil(needed / FIRST_SHARE / 10) * 10
        raise ConfigError(
            f"--budget {budget:g}: a step of this run takes {step:.2g} s, and one setting beside your own words about "
            f"{needed:.0f} s: --budget {least} at least, {MANY * least} for most settings"
        )


class Twins(NamedTuple):
    """base: a run of the user's own words, which goes on. noise: of two such runs. speed: items a second."""

    base: Contender
    noise: Ratio
    speed: float


def measured_twins(words: Sequence[str], stand: Stand, starter: Starter, budget: float,
                   left: Callable[[], float]) -> Twins:  # fmt: skip
    """Two runs of the same words: what they differ by is what cannot be told apart here.

    Raises TrainingError if they are not the same training.
    """
    measure = starter.measure
    base, measure.reference = starter.base(words, budget)
    twin, path = starter.base(words, budget)
    usual = judge(measure.reference, path, NUMERIC)
    if usual.fault:
        twin.close()
        raise TrainingError(
            f"two runs of these words differ by more than rounding ({usual.fault}), so nothing can be compared "
            "with them; is there a random number that seed= does not reach?"
        )
    measure.usual = Verdict("", usual.loss, usual.cosine)
    duel, began = Duel(), stand.clock()
    until = began + NOISE_SHARE * budget
    while len(duel.pairs) < LEAST_NOISE_PAIRS or stand.clock() < until:
        take_pair(duel, base.turn, twin.turn)
        calm = len(duel.pairs) >= LEAST_NOISE_PAIRS and settled(duel.ratio(EARLY), CALM)
        if calm or len(duel.pairs) == MOST_NOISE_PAIRS or left() < 0:
            break
    measure.turn_cost = (stand.clock() - began) / (2 * len(duel.pairs))
    twin.close()
    return Twins(base, duel.ratio(), median(speed for pair in duel.pairs for speed in pair))
