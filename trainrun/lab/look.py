"""A first look at a run: what it chooses for itself, and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

from trainrun.errors import TrainingError
from trainrun.lab.choices import config_of, measured_choices
from trainrun.lab.contender import Contender, Stand
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


def measure_for(budget: float) -> Measure:
    return Measure(FEWEST_GATE, min(LONGEST_TURN, max(SHORTEST_TURN, TURN_SHARE * budget)))


def look(words: Sequence[str], stand: Stand, measure: Measure, cores: int,
         budget: float) -> tuple[Facts, list[str]]:  # fmt: skip
    """The facts, and the run's own choices as words; sets how many steps are compared.

    Raises what a run of these words would raise.
    """
    config = config_of(words)
    scout = stand.start(config, budget)
    try:
        scout.pace(measure.turn_seconds)
        turn = scout.turn()
        step = turn.seconds / turn.steps
        batches = min(MOST_LOADS, max(FEWEST_LOADS, int(measure.turn_seconds / step)))
        loaded = scout.load(batches)
        ready = scout.facts
    finally:
        scout.close()
    measure.gate_steps = min(MOST_GATE, max(FEWEST_GATE, int(GATE_SHARE * budget / step)))
    run_seconds = seconds_of_run(ready.total_steps, step, parse_seconds(config.trainer.max_time))
    facts = Facts(
        config, ready, cores, step, loaded.seconds / batches, turn.peak_bytes, ready.memory_bytes, run_seconds
    )
    return facts, measured_choices(config, ready)


class Twins(NamedTuple):
    """base: a run of the user's own words, which goes on. noise: of two such runs. speed: items a second."""

    base: Contender
    noise: Ratio
    speed: float


def measured_twins(words: Sequence[str], stand: Stand, starter: Starter, budget: float,
                   left: Callable[[], float]) -> Twins:  # fmt: skip
    """Two runs of the same words: what they differ by is what cannot be told apart here.

    Raises TrainingError where they are not the same training.
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
