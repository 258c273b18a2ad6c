"""What is claimed in the end: every part alone and missing, and the whole in fresh processes.

The winner among many was also lucky. So nothing that was measured on the way counts: the champion meets the
user's own words again, in processes that neither was searched in, and as often as was decided before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from trainrun.lab.choices import exchanged
from trainrun.lab.contender import Contender, Stand
from trainrun.lab.contest import FIRST_ROUNDS, Limits, between
from trainrun.lab.duel import Duel, take_pair
from trainrun.lab.evidence import UNTRIED, Rung, Trial
from trainrun.lab.gate import loosest
from trainrun.lab.knobs import NUMBERS
from trainrun.lab.starter import Measure, Starter
from trainrun.lab.statistics import EARLY, Ratio, grouped_ratio, settled
from trainrun.monitor.readable import counted

SURE: Final = 0.99  # how sure a claim is
MOST_PAIRS, LEAST_PAIRS = 24, 12  # of fewer a single disturbed one would be an end of the interval
FEWEST_ROUNDS, MOST_ROUNDS = 5, 12
FRESH: Final = 3  # pairs of processes: a process may be a little slower than its twin for all of its life


class Confirmed(NamedTuple):
    """ratio: None if there was no time for it; `trial` says what the gate found, or why there is none."""

    ratio: Ratio | None
    trial: Trial


def confirmed(starter: Starter, stand: Stand, base: Sequence[str], words: Sequence[str], mathematics: str,
              left: Callable[[], float]) -> Confirmed:  # fmt: skip
    """left: seconds. Raises what the user's own words raise."""
    duels: list[Duel] = []
    trial = Trial("champion", tuple(words), mathematics)
    lives = 1
    while len(duels) < lives:
        began = stand.clock()
        first = starter.base(base, max(5.0, left()))[0] if len(duels) % 2 == 0 else None
        one = starter.candidate(exchanged(base, words), trial, max(5.0, left()), True, mathematics)
        if one.contender is None:
            if first is not None:
                first.close()
            return Confirmed(None, one.trial)
        if first is None:  # the order of the starts changes too
            first = starter.base(base, max(5.0, left()))[0]
        starting, trial = stand.clock() - began, one.trial
        duel, began = Duel(), stand.clock()
        take_pair(duel, first.turn, one.contender.turn)
        cost = stand.clock() - began
        lives = lives if duels else lives_for(left(), starting, cost)
        rest = lives - len(duels) - 1
        share = (left() - rest * starting) / (rest + 1)
        _pairs(duel, first, one.contender, min(-(-MOST_PAIRS // lives), int(share / cost) + 1), cost, left)
        duels.append(duel)
        first.close()
        one.contender.close()
    number = sum(len(duel.pairs) for duel in duels)
    if number < LEAST_PAIRS:
        told = f"only {number} fresh pairs fitted into the time, {LEAST_PAIRS} are needed: give more --budget"
        return Confirmed(None, replace(trial, reason=told))
    ratio = grouped_ratio([duel.pairs for duel in duels], SURE)
    return Confirmed(ratio, replace(trial, peak_bytes=max(duel.peak_bytes for duel in duels)))


def seconds_for(measure: Measure) -> float:
    """What a confirmation takes, at least, with some room."""
    return 1.2 * (2 * measure.seconds + 2 * LEAST_PAIRS * measure.turn_cost)


def lives_for(left: float, starting: float, cost: float) -> int:
    """Pairs of processes: as many as half of the time that the least pairs leave is enough to start."""
    spare = left - LEAST_PAIRS * cost
    return 1 + max(0, min(FRESH - 1, int(spare / (2 * starting))))


def _pairs(duel: Duel, first: Contender, second: Contender, number: int, cost: float,
           left: Callable[[], float]) -> None:  # fmt: skip
    """As many as were to be taken from the start: looking at them in between would find what it looks for."""
    while len(duel.pairs) < number and left() >= cost:
        take_pair(duel, first.turn, second.turn)


def ablated(starter: Starter, base: Sequence[str], rungs: Sequence[Rung], champion: Contender, original: Contender,
            limits: Limits, left: Callable[[], float]) -> list[Rung]:  # fmt: skip
    """Each rung alone against the user's words, and the champion against all but it."""
    alone: dict[str, Contender] = {}
    without: dict[str, Contender] = {}
    for rung in rungs:
        title = " ".join(rung.words)
        rest = [other for other in rungs if other is not rung]
        others = [word for other in rest for word in other.words]
        gates = rung.mathematics, loosest(*[other.mathematics for other in rest])
        for place, words, gate in ((alone, rung.words, gates[0]), (without, others, gates[1])):
            trial = Trial(rung.knob, tuple(words), rung.mathematics)
            if left() < 2 * starter.measure.seconds:
                continue
            one = starter.candidate(exchanged(base, words), trial, left(), gate=gate)
            if one.contender is not None:
                place[title] = one.contender
    firsts = _rounds(original, alone, limits)
    lasts = _rounds(champion, without, limits)
    for contender in (*alone.values(), *without.values()):
        contender.close()
    return [
        replace(rung, first_in=firsts.get(title), last_out=inverse(lasts.get(title)))
        for rung in rungs
        for title in [" ".join(rung.words)]
    ]


def _rounds(base: Contender, others: dict[str, Contender], limits: Limits) -> dict[str, Ratio]:
    """The same number of pairs for each, as far as the time goes."""
    duels = {name: Duel() for name in others}
    open_ = dict(others)
    for _ in range(MOST_ROUNDS):
        between(base.turn, {name: other.turn for name, other in open_.items()}, duels, limits)
        open_ = {name: other for name, other in open_.items() if not _clear(duels[name], limits)}
        if limits.over:
            break
    return {name: duel.ratio() for name, duel in duels.items() if len(duel.pairs) >= FIRST_ROUNDS}


def _clear(duel: Duel, limits: Limits) -> bool:
    return len(duel.pairs) >= FEWEST_ROUNDS and settled(duel.ratio(EARLY), limits.smallest)


def inverse(ratio: Ratio | None) -> Ratio | None:
    return None if ratio is None else Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.pairs)


def needless(rungs: Sequence[Rung], smallest: float) -> Rung | None:
    """The weakest of the rungs whose absence is not noticed, if there is one. smallest: what is noticed at all."""
    seen = [(rung.last_out, rung) for rung in rungs if rung.last_out is not None]
    dull = [(ratio.value, rung) for ratio, rung in seen if not (ratio.low > 1 and ratio.value > 1 + smallest)]
    return min(dull, key=lambda pair: pair[0])[1] if dull else None


def apart(rungs: Sequence[Rung]) -> list[Rung]:
    """Precision, layout and attention are tried together, and asked for one by one."""
    found = []
    for rung in rungs:
        single = rung.knob == NUMBERS
        found += [replace(rung, words=(word,)) for word in rung.words] if single else [rung]
    return found


def verdict_of(claim: Ratio | None, champion: Trial, trials: Sequence[Trial], smallest: float) -> str:
    """In a sentence. champion: without words where nothing on the way was clearly faster."""
    untried = sum(trial.state == UNTRIED for trial in trials)
    rest = f"; not tried, for want of time: {counted(untried, 'setting')} (--budget)" if untried else ""
    if not champion.words:
        return _nothing_found(sum(trial.ratio is not None for trial in trials), untried) + rest
    if claim is None:
        return f"nothing is claimed: the champion was not confirmed ({champion.reason})"
    if claim.high < 1:
        return (
            f"your configuration is the best: what seemed faster is slower in fresh processes, {claim}{rest}"
        )
    if claim.low <= 1:
        return (
            f"your configuration is within noise of the best that was found: {claim}, which holds 1.00{rest}"
        )
    if claim.value < 1 + smallest:
        return f"your configuration is as good as the best that was found: {claim}{rest}"
    return f"{claim.value:.2f}x the speed of your own words ({claim.low:.2f} to {claim.high:.2f}, 99 % sure)"


def _nothing_found(measured: int, untried: int) -> str:
    """The best of what there is can be told only of what was measured, and of most of it."""
    if not measured:
        return "nothing is known: no other setting was measured"
    if untried >= measured:
        return f"little is known: of {counted(measured, 'setting')} that could be measured none is clearly faster"
    return f"your configuration is the best that was found: of {counted(measured, 'setting')} none is clearly faster"
