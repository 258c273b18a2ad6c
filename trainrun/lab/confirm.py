"""What is claimed in the end: every part alone and missing, and the whole in fresh processes.

Whoever wins among many was also lucky. So nothing that was measured on the way counts: the champion meets the
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
from trainrun.lab.evidence import Rung, Trial
from trainrun.lab.gate import loosest
from trainrun.lab.knobs import NUMBERS
from trainrun.lab.starter import Starter
from trainrun.lab.statistics import EARLY, Ratio, settled

SURE: Final = 0.99  # how sure a claim is
MOST_PAIRS, LEAST_PAIRS = 24, 10
FEWEST_ROUNDS, MOST_ROUNDS = 5, 12
FRESH: Final = 2  # pairs of processes: a process may be a little slower than its twin for all of its life


class Confirmed(NamedTuple):
    """ratio: None where there was no time for it; `trial` says what the gate found, or why there is none."""

    ratio: Ratio | None
    trial: Trial


def confirmed(starter: Starter, stand: Stand, base: Sequence[str], words: Sequence[str], mathematics: str,
              left: Callable[[], float]) -> Confirmed:  # fmt: skip
    """left: seconds. Raises what the user's own words raise."""
    duel = Duel()
    trial = Trial("champion", tuple(words), mathematics)
    began = stand.clock()
    for number in range(FRESH):
        first, _ = starter.base(base, max(5.0, left()))
        one = starter.candidate(exchanged(base, words), trial, max(5.0, left()), True, mathematics)
        if one.contender is None:
            first.close()
            return Confirmed(None, one.trial)
        trial = one.trial
        starting = (stand.clock() - began) / (number + 1)
        _pairs(duel, first, one.contender, stand, starting if number < FRESH - 1 else 0.0, left)
        first.close()
        one.contender.close()
        if left() < 2 * starting:
            break
    if len(duel.pairs) < LEAST_PAIRS:
        told = f"only {len(duel.pairs)} fresh pairs fitted into the time, {LEAST_PAIRS} are needed: give more --budget"
        return Confirmed(None, replace(trial, reason=told))
    return Confirmed(duel.ratio(SURE), replace(trial, peak_bytes=duel.peak_bytes))


def _pairs(duel: Duel, first: Contender, second: Contender, stand: Stand, keep: float,
           left: Callable[[], float]) -> None:  # fmt: skip
    """As many as were to be taken from the start: looking at them in between would find what it looks for.

    keep: seconds for the next pair of processes.
    """
    began, had = stand.clock(), len(duel.pairs)
    take_pair(duel, first.turn, second.turn)
    cost = stand.clock() - began
    number = MOST_PAIRS // FRESH if keep else MOST_PAIRS - had
    share = (left() - keep) / (2 if keep else 1)
    for _ in range(min(number, int(share / cost)) - 1):
        if left() < cost:
            break
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


def verdict_of(claim: Ratio | None, trial: Trial, any_found: bool, smallest: float) -> str:
    if not any_found:
        return "your configuration is the best that was found: nothing tried is clearly faster"
    if claim is None:
        return f"nothing is claimed: the champion was not confirmed ({trial.reason})"
    if claim.low <= 1:
        return f"your configuration is already within noise of the best that was found: {claim}, which holds 1.00"
    if claim.value < 1 + smallest:
        return f"your configuration is already as good as the best that was found: {claim}"
    return f"{claim.value:.2f}x the speed of your own words ({claim.low:.2f} to {claim.high:.2f}, 99 % sure)"
