"""The fastest way to the same training: knob after knob, and at the end only what is measured again is claimed.

What: each knob's settings run in turns against the best of the knobs before; the champion then meets the user's own
words again, in fresh processes, and only that ratio is told. When: a training long enough to pay for the search.
When not: a run of seconds. Source: successive halving; Duet Benchmarking (see `statistics`). Gain: of this search
itself, see `scripts/bench_tune.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from trainrun.config import RunConfig
from trainrun.errors import ConfigError
from trainrun.lab.choices import config_of, exchanged, key_of
from trainrun.lab.confirm import ablated, apart, confirmed, needless, seconds_for, verdict_of
from trainrun.lab.contender import Contender, Stand
from trainrun.lab.contest import Limits, contest
from trainrun.lab.duel import Duel
from trainrun.lab.evidence import (
    KEPT,
    NEEDLESS,
    NOISE,
    REJECTED,
    UNTRIED,
    Outcome,
    Rung,
    Trial,
    ratio_row,
    trial_from,
)
from trainrun.lab.facts import Facts
from trainrun.lab.gate import EXACT, MATHEMATICS, NUMERIC, loosest
from trainrun.lab.journal import END, Journal
from trainrun.lab.knobs import (
    COMPILE,
    COMPILE_SECONDS,
    Knob,
    Value,
    Wish,
    different,
    share_of,
)
from trainrun.lab.look import look, measure_for, measured_twins
from trainrun.lab.starter import START_ROOM, Started, Starter, rounds_cost, slice_of
from trainrun.lab.statistics import Ratio
from trainrun.lab.weighing import beaten, paid, resolved, value_of, weighed

SEARCH_SHARE, ABLATION_SHARE = 0.68, 0.82  # of the budget, until when
VISITS: Final = 2
MOST_SPENT: Final = 0.6  # of the budget by a search that was killed: the end is measured in any case
SMALLEST: Final = 0.02  # an effect below it is not worth a word in a preset
Progress = Callable[[str, float], None]


class Tuner:
    """One search. words: those of a run, by the names that the config has."""

    def __init__(
        self, words: Sequence[str], stand: Stand, wish: Wish, journal: Journal, progress: Progress
    ) -> None:
        self._words, self._stand, self._wish = list(words), stand, wish
        self._journal, self._say = journal, progress
        self._began = stand.clock()
        self._starter = Starter(stand, measure_for(wish.budget))
        self._spent = 0.0  # by an earlier life
        self._trials: list[Trial] = []
        self._rungs: list[Rung] = []
        self._notes: list[str] = []
        self._known: list[RunConfig] = []  # that need not be tried
        self._gain = 1.0
        self._facts: Facts
        self._base: Contender
        self._noise: Ratio
        self._speed = 0.0
        self._champion: Contender | None = None

    def run(self) -> Outcome:
        """Raises what a run of these words would raise."""
        if self._wish.mathematics not in MATHEMATICS:
            raise ConfigError(f"--allow {self._wish.mathematics}: must be one of {', '.join(MATHEMATICS)}")
        self._look()
        self._measure_noise()
        self._search()
        return self._finished()

    def _left(self, share: float = 1.0) -> float:
        return share * self._wish.budget - self._spent - (self._stand.clock() - self._began)

    def _progress(self, about: str) -> None:
        self._say(about, max(0.0, self._left()))

    def _look(self) -> None:
        """What the run is like, and what it chooses for itself when it starts."""
        self._progress("your own words")
        self._facts, pins = look(
            self._words, self._stand, self._starter.measure, self._wish.cores, self._wish.budget
        )
        earlier = self._journal.earlier("look")
        if earlier is None:
            self._note("look", pins=pins)
        else:
            pins = earlier["pins"]
            self._spent = min(self._journal.seconds, MOST_SPENT * self._wish.budget)
        self._words = exchanged(self._words, pins)
        self._facts = replace(self._facts, config=config_of(self._words))
        self._known = [self._facts.config]

    def _note(self, kind: str, **row: object) -> None:
        self._journal.write(kind, seconds=self._spent + self._stand.clock() - self._began, **row)

    def _measure_noise(self) -> None:
        self._progress("noise: your own words against themselves")
        budget = self._wish.budget
        twins = measured_twins(
            self._words, self._stand, self._starter, budget, lambda: self._left(SEARCH_SHARE)
        )
        self._base, self._noise, self._speed = twins.base, twins.noise, twins.speed
        if loss := self._starter.measure.usual.loss:
            self._notes.append(f"two runs of your words differ already, by {loss:.1g} of the loss")
        self._note("noise", ratio=ratio_row(self._noise))

    def _search(self) -> None:
        """Every knob once; what there was no time for again, while there is some left."""
        knobs = list(self._wish.knobs)
        for visit in range(VISITS):
            for number, knob in enumerate(knobs):
                self._stage(knob, share_of(knob, knobs[number:], self._facts), visit)
            late = {trial.knob for trial in self._trials if trial.state == UNTRIED}
            knobs = [knob for knob in knobs if knob.name in late]
            if visit < VISITS - 1:
                self._trials = [trial for trial in self._trials if trial.state != UNTRIED]

    def _stage(self, knob: Knob, share: float, visit: int) -> None:
        if earlier := self._journal.earlier("stage", knob=knob.name, visit=visit):
            told = [trial_from(row) for row in earlier["trials"]]
            self._trials += told
            self._remember(told)
            if earlier["chosen"]:
                self._take(next(t for t in self._trials[::-1] if list(t.words) == earlier["chosen"]), None)
            return
        trials, chosen = self._tried(knob, share)
        self._trials += trials
        rows, words = [trial.row() for trial in trials], list(chosen.words) if chosen else []
        self._note("stage", knob=knob.name, visit=visit, trials=rows, chosen=words)

    def _tried(self, knob: Knob, share: float) -> tuple[list[Trial], Trial | None]:
        """Everything that was tried, and the setting that is the champion's from here on."""
        if reason := knob.applies(self._facts):
            return [Trial(knob.name, (), state=NEEDLESS, reason=reason)], None
        values = different(knob.values(self._facts), self._known, self._with)
        ends = self._stand.clock() + slice_of(
            self._left(SEARCH_SHARE), share, len(values), self._starter.measure
        )
        all_started: list[Started] = []
        for value in values:
            number = sum(one.contender is not None for one in all_started)
            all_started.append(self._start(knob, value, ends, number))
        lost = [one.trial for one in all_started if one.contender is None]
        running = {one.trial.title: one.contender for one in all_started if one.contender is not None}
        if not running:
            self._remember(lost)
            return lost, None
        self._progress(f"{knob.name}: {len(running)} in turns")
        last = self._stand.clock() + self._left(SEARCH_SHARE)
        limits = Limits(self._stand.clock, ends, SMALLEST, resolved(self._noise), last)
        takes = {title: contender.turn for title, contender in running.items()}
        found = contest(self._running_champion().turn, takes, limits)
        trials = [
            self._weighed(one, found[one.trial.title]) for one in all_started if one.contender is not None
        ]
        self._remember([*lost, *trials])
        best = max((trial for trial in trials if trial.state == KEPT), key=value_of, default=None)
        for title, contender in running.items():
            if best is None or title != best.title:
                contender.close()
        if best is None:
            return lost + trials, None
        self._take(best, running[best.title])
        return [*lost, *beaten(trials, best), best], best

    def _remember(self, trials: Sequence[Trial]) -> None:
        """What was tried on top of the present champion is not tried again."""
        for trial in trials:
            with contextlib.suppress(ConfigError):  # what no config can be was refused for it
                if trial.state != UNTRIED:
                    self._known.append(config_of(self._with(trial.words)))

    def _with(self, words: Sequence[str]) -> list[str]:
        return exchanged(self._words, exchanged(self._found_words(), words))

    def _start(self, knob: Knob, value: Value, ends: float, number: int) -> Started:
        """number: of those that run already, and all of which need their turns."""
        trial = Trial(knob.name, value.words, value.mathematics)
        measure = self._starter.measure
        left = ends - self._stand.clock() - rounds_cost(number + 1, measure)
        if value.mathematics == NUMERIC and self._wish.mathematics == EXACT:
            return Started(None, replace(trial, state=REJECTED, reason="rounds more: --allow numeric"), 0.0)
        if left < START_ROOM * measure.seconds + (COMPILE_SECONDS if knob.name == COMPILE else 0.0):
            return Started(None, replace(trial, reason="no time left for it"), 0.0)
        self._progress(f"{knob.name}: {trial.title}")
        gate = loosest(value.mathematics, *[rung.mathematics for rung in self._rungs])
        return self._starter.candidate(self._with(value.words), trial, left, knob.name == COMPILE, gate)

    def _weighed(self, one: Started, duel: Duel) -> Trial:
        trial = weighed(one.trial, duel, self._facts.memory_bytes, SMALLEST)
        if trial.knob != COMPILE or trial.state != KEPT:
            return trial
        extra = max(0.0, one.seconds - self._starter.measure.seconds)
        return paid(replace(trial, extra_seconds=extra), self._facts.run_seconds / self._gain, SMALLEST)

    def _take(self, trial: Trial, winner: Contender | None) -> None:
        """It is the champion from here on."""
        taken = {key_of(word) for word in trial.words}
        kept = []
        for rung in self._rungs:
            words = tuple(word for word in rung.words if key_of(word) not in taken)
            kept += [replace(rung, words=words)] if words else []
        self._rungs = [*kept, Rung(trial.words, trial.knob, trial.mathematics, trial.ratio)]
        self._gain *= trial.ratio.value if trial.ratio is not None else 1.0
        if self._champion is not None:
            self._champion.close()
        self._champion = winner
        self._facts = replace(
            self._facts, config=config_of(self._with(())), peak_bytes=trial.peak_bytes or self._facts.peak_bytes,
            ready=self._facts.ready if winner is None else winner.facts,
        )  # fmt: skip

    def _running_champion(self) -> Contender:
        """A run of the user's own words, or of what was found so far, perhaps by an earlier life."""
        words = self._found_words()
        if not words:
            return self._base
        if self._champion is None:
            self._champion, _ = self._starter.base(exchanged(self._words, words), self._wish.budget)
        return self._champion

    def _found_words(self) -> list[str]:
        return [word for rung in self._rungs for word in rung.words]

    def _finished(self) -> Outcome:
        """What stays of the champion, and what is claimed."""
        claim, claimed = None, False
        trial = Trial("champion", ())
        if self._rungs:
            self._prune()
            if self._champion is not None:
                self._champion.close()
            self._progress("the champion against your own words, in fresh processes")
            mathematics = loosest(*[rung.mathematics for rung in self._rungs])
            words = self._found_words()
            claim, trial = confirmed(self._starter, self._stand, self._words, words, mathematics, self._left)
            claimed = claim is not None and claim.low > 1 and claim.value >= 1 + SMALLEST
        verdict = verdict_of(claim, trial, self._trials, SMALLEST)
        spent = self._spent + self._stand.clock() - self._began
        outcome = Outcome(
            base=tuple(self._words), unit=self._facts.ready.unit, speed=self._speed, noise=self._noise,
            trials=tuple(self._trials), rungs=tuple(self._rungs), claim=claim, claimed=claimed, verdict=verdict,
            seconds=spent, loss=trial.loss, cosine=trial.cosine, gate_steps=self._starter.measure.gate_steps,
            notes=tuple(self._notes),
        )  # fmt: skip
        self._note(END, claim=ratio_row(claim), claimed=claimed)
        return outcome

    def _prune(self) -> None:
        """Take out what is not missed, one after the other."""
        self._rungs = apart(self._rungs)
        time_left = min(self._left(ABLATION_SHARE), self._left() - seconds_for(self._starter.measure))
        ends = self._stand.clock() + max(0.0, time_left)
        limits = Limits(self._stand.clock, ends, SMALLEST, resolved(self._noise))
        while len(self._rungs) > 1 and not limits.over:
            self._progress("every part alone, and all without it")
            champion = self._running_champion()
            self._rungs = ablated(self._starter, self._words, self._rungs, champion, self._base, limits,
                                  lambda: ends - self._stand.clock())  # fmt: skip
            out = needless(self._rungs, SMALLEST)
            if out is None:
                return
            self._rungs = [rung for rung in self._rungs if rung is not out]
            self._trials = [
                replace(trial, state=NOISE, reason="in the end nothing is lost without it")
                if trial.state == KEPT and set(trial.words) == set(out.words) else trial
                for trial in self._trials
            ]  # fmt: skip
            self._notes.append(f"{' '.join(out.words)}: left out, nothing is lost without it")
            champion.close()
            self._champion = None
