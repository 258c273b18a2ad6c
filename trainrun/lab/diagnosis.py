"""What a training waits for: it runs with one thing after the other taken away, in turns with itself.

What: the real loop on the real parts. What a removal gains is the most that mending this thing can give; nothing
is read off a profile. When: before anything is tuned. Cost: 20 to 60 seconds. Source: the phases of DS-Analyzer
(Mohan and others, 2021, arXiv:2007.06775), for everything and not only for data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from trainrun.config import RunConfig
from trainrun.errors import TrainrunError
from trainrun.lab.bench import Bench, Subject
from trainrun.lab.choices import config_of, exchanged, measured_choices, plain_words
from trainrun.lab.duel import TURN_SECONDS, Side, steps_for, warm_for, without_warm
from trainrun.lab.findings import CLEAR, Diagnosis, WhatIf
from trainrun.lab.neighbours import Neighbours
from trainrun.lab.orders import SAVING, Divide, Limits, Measure, Profile, Turn
from trainrun.lab.padding import padding_gain
from trainrun.lab.rare import LAST_SECONDS, Rare
from trainrun.lab.removals import (
    ABOUTS,
    BARE,
    BUCKET,
    CACHED,
    FORWARD,
    LARGER,
    PHASES,
    READING,
    SILENT,
    booked_of,
    telling,
    title_of,
)
from trainrun.lab.rounds import BASE, Rounds, uncompiled, without
from trainrun.lab.shortage import LONG_STEP, affordable, times_larger
from trainrun.lab.statistics import Ratio
from trainrun.lab.time_left import LEAST_TURN, TimeLeft
from trainrun.ledger import COMPILE, DATA

LATE: Final = 1.0  # seconds; then even the first rounds end
TRACE_SECONDS, DIVIDE_SECONDS = 2.0, 1.0
WORTH_DIVIDING: Final = 1.05  # of the gain without loading
MOST_SIDES: Final = 10
FEWEST_ROUNDS, USUAL_ROUNDS, MOST_ROUNDS = 2, 4, 12  # a step may be too long for the usual ones
FEW_ROUNDS: Final = 3
SLOWER: Final = 0.9  # of the base: not worth more turns
MOSTLY_DATA: Final = 1.5
MOST_PACING: Final = 0.6  # of the time, where shape after shape is compiled
MOST_BESIDE: Final = 0.5  # of the time that is left, to start another run and find its pace
Progress = Callable[[str], None]


def diagnose(words: Sequence[str], deadline: float, progress: Progress, trace: bool = False) -> Diagnosis:
    """Ends about the deadline, by `time.monotonic()`. Raises what a run of these words would raise before its
    first step. trace: a few steps under torch's profiler as well."""
    config = config_of(plain_words(words))
    with Bench() as bench:
        progress("starting the run")
        began = time.monotonic()
        base = bench.start(config)
        neighbours = Neighbours()
        examined = Examination(bench, base, words, config, began)
        found = examined.diagnosis(deadline - LAST_SECONDS - TRACE_SECONDS * trace, progress)
        found = replace(found, others=neighbours.cores())
        if trace:
            progress("a few steps under torch's profiler")
            found = replace(found, profiled=base.ask(Profile()))
        if any(one.name == "data" and one.gain.value > WORTH_DIVIDING for one in found.what_ifs):
            progress("dividing the loading")
            found = replace(found, stages=base.ask(Divide(DIVIDE_SECONDS)))
        return found


class Examination:
    """One base run, and the others compared with it. began: when it was started, by `time.monotonic()`."""

    def __init__(
        self, bench: Bench, base: Subject, words: Sequence[str], config: RunConfig, began: float
    ) -> None:
        self._bench, self._base, self._words, self._config = bench, base, plain_words(words), config
        self._began, self._starting, self._time = began, 0.0, TimeLeft(began)
        self._steps, self._warm, self._seconds, self._times = 1, 1, TURN_SECONDS, 2
        self._untried: list[str] = []
        self._positions: dict[str, float] = {}
        self._rounds = Rounds(reads_otherwise=lambda name: CACHED in name or name in (*READING, LARGER))

    def diagnosis(self, deadline: float, progress: Progress) -> Diagnosis:
        progress("finding its pace")
        self._time = TimeLeft(deadline)
        self._seconds = min(
            TURN_SECONDS, max(LEAST_TURN, self._time.seconds / (2 * MOST_SIDES * USUAL_ROUNDS))
        )
        pace = self._paced()
        self._times = times_larger(self._config.data.batch_size, self._step_seconds, pace.peak_bytes,
                                   self._base.facts.memory_bytes)  # fmt: skip
        progress("measuring what the machine allows")
        limits: Limits = self._base.ask(Measure())
        load = self._base.load(max(2, min(self._steps, 50)) if self._warm else 1, self._warm)
        limits.items_per_second["data"] = load.speed
        limits.reasons["data"] = "loading with nobody to train"
        variants = {name: self._turns(self._base, name) for name in self._affordable(pace)}
        for name, side in variants.items():
            may_differ = self._steps > 1 or name == CACHED  # a step without loading may be far shorter
            if may_differ and not self._time.is_over(LATE):
                self._rounds.note_reading(name, side())  # to find its pace: the first steps are the slowest
        sides = variants | dict(self._beside(limits.padding, progress))  # each has found its pace
        return self._put_together(self._measured(sides, pace, progress), limits, load)

    def _paced(self) -> Turn:
        """A turn of the base, of about the right length."""
        paced: list[Turn] = []

        def taken(steps: int) -> Turn:
            paced.append(self._own_turn(steps, warm_for(steps), MOST_PACING))
            return uncompiled(paced[-1])

        self._steps = round(without_warm(steps_for(taken, self._seconds)))
        self._step_seconds = paced[-1].running_seconds / paced[-1].steps
        self._warm = warm_for(self._steps) if self._step_seconds < LONG_STEP else 0
        self._rare = Rare(self._base, self._config, few=not self._warm, time=self._time)
        self._time.reserve(self._rare.num_saves * self._step_seconds)  # a save needs a step to be saved
        self._starting = time.monotonic() - self._began  # with what was compiled
        for turn in paced[1:]:  # the first may open files
            self._rounds.note_reading(BASE, turn)
        return paced[-1]

    def _affordable(self, pace: Turn) -> list[str]:
        """Choose the removals that tell something about this run and fit into the time; note the others."""
        names = telling(self._config, self._base.facts, self._steps)
        small = {
            name
            for name, account in booked_of(self._base.facts).items()
            if pace.booked(account) < (1 - 1 / CLEAR) * pace.running_seconds
        }
        turn = (self._warm + self._steps) * self._step_seconds
        kept = affordable(names, small, turn, self._time.seconds, FEWEST_ROUNDS)
        left_out = [name for name in names if name not in kept and name not in small]
        self._untried += [title_of(name) for name in left_out]
        return kept

    def _turns(self, subject: Subject, variant: str) -> Callable[[], Turn]:
        multiple = self._config.checkpoint.every_n_train_steps if variant == SAVING else None

        def taken(steps: int) -> Turn:
            most = math.inf if multiple else self._time.of_a_turn()  # one that is cut may save nothing
            return subject.train(steps, min(self._warm, warm_for(steps)), variant, most)

        return Side(taken, self._steps, self._seconds, multiple or 1)

    def _beside(self, padding: float, progress: Progress) -> Iterator[tuple[str, Callable[[], Turn]]]:
        """Other words for the same run: a larger batch, and sequences of like length together."""
        wishes = {LARGER: [f"data.batch_size={self._times * self._config.data.batch_size}"]}
        if padding and self._config.data.padding in ("longest", "max"):
            wishes[BUCKET] = ["data.padding=bucket"]
        for name, words in wishes.items():
            turns = 2 * (self._warm + 1) * self._step_seconds * (self._times if name == LARGER else 1)
            if self._starting + turns > MOST_BESIDE * self._time.seconds:
                self._untried += words
                continue
            progress(f"starting it with {' '.join(words)}")
            try:
                subject = self._bench.start(self.with_words(words))
                side = self._turns(subject, SILENT if name == LARGER else "")
                side()
            except TrainrunError:  # too few samples, no memory, or no sequences: then it tells nothing
                continue
            if name == BUCKET:
                self._positions = subject.facts.positions
            yield name, side

    def with_words(self, words: Sequence[str]) -> RunConfig:
        """The run with other words, and with what the base chose for itself, so that nothing else differs."""
        own = measured_choices(self._config, self._base.facts)
        return config_of(exchanged(exchanged(self._words, own), words))

    def _measured(self, sides: dict[str, Callable[[], Turn]], pace: Turn, progress: Progress) -> Rounds:
        """Rounds until the time is over, and a few in any case; the last ones of what gained most, as far as there is
        time. What is clearly slower is not asked again. Where the pace took all the time, it is all that is known."""
        found = self._rounds
        if self._time.is_over(LATE):
            self._untried += [title_of(name) for name in sides]
            found.take(lambda: pace, {})
            return found
        for number in range(MOST_ROUNDS):
            asked = [name for name in sides if number < FEW_ROUNDS or self._still_tells(name, found)]
            if number and self._time.is_over(LATE):  # a round may not be whole
                self._untried += [title_of(name) for name in sides if name not in found.took]
                break
            left = self._time.seconds
            if number and found.seconds_of_a_round(asked) > left:
                named = [name for name in asked if name not in PHASES]
                asked = found.fitting(named, left, {LARGER: SILENT}, number < FEWEST_ROUNDS)
                if not asked:
                    break
            progress(f"round {number + 1}")
            own = partial(self._own_turn, self._steps, self._warm)
            found.take(own, {name: sides[name] for name in asked}, lambda: self._time.is_over(LATE))
        return found

    def _own_turn(self, steps: int, warm: int, share: float = 1.0) -> Turn:
        return self._time.note(self._base.train(steps, warm, most_seconds=self._time.of_a_turn(share)))

    def _still_tells(self, name: str, found: Rounds) -> bool:
        """Not: phases, of which a few rounds are enough, and what was slower each time."""
        return name in (SAVING, SILENT) or not (name in PHASES or found.always_below(name, SLOWER))

    def _put_together(self, rounds: Rounds, limits: Limits, load: Turn) -> Diagnosis:
        steps = sum(turn.steps for turn in rounds.own)
        loop_seconds = sum(turn.items for turn in rounds.own) / steps * rounds.seconds()
        ratio = rounds.apart if CACHED in booked_of(self._base.facts) else rounds.ratio
        ratios = {
            name: (rounds.ratio if name in READING or CACHED in name else ratio)(name)
            for name in rounds.others
        }
        if gain := padding_gain(
            rounds.own, rounds.turns.get(BUCKET, []), self._positions, self._config.data.padding, BUCKET
        ):
            ratios[BUCKET] = gain
        if CACHED in ratios and CACHED in booked_of(self._base.facts):
            ratios[CACHED] = rounds.ratio_unread(CACHED)
        small = dict(self._small(rounds))
        ratios |= small
        too_late = self._rare.is_too_late()
        self._untried += ["validation and checkpoints"] * too_late
        fixed = {} if too_late else dict(self._rare.fixed_costs(loop_seconds, ratios.get(SAVING)))
        fixed["compile"] = rounds.compiling(self._base.facts.total_steps)
        step_seconds = loop_seconds + sum(fixed.values())

        def freed(ratio: Ratio, part: float = loop_seconds) -> Ratio:
            """Return the gain of the whole run if the loop, or `part` of its seconds, gains by `ratio`."""
            others = step_seconds - part
            bounds = [
                step_seconds / max(others + part / value, 1e-9) if value else 0.0 for value in ratio[:3]
            ]
            return Ratio(bounds[0], bounds[1], bounds[2], ratio.pairs)

        booked = fixed | ({} if too_late else dict(self._rare.logging(self._steps, loop_seconds)))
        what_ifs = [
            WhatIf(name, freed(ratios[removal]), about)
            for name, removal, about in self._named(ratios, small)
            if name not in booked
        ]
        for name, seconds in booked.items():
            if seconds > 0:
                value = step_seconds / max(step_seconds - seconds, 1e-9)
                so_far = ", so far" if name == "compile" and rounds.own[-1].booked(COMPILE) else ""
                about = f"{1e3 * seconds:.3g} ms a step{so_far}"
                what_ifs.append(WhatIf(name, Ratio(value, value, value, 1), about))
        growing = 1.0
        if LARGER in ratios:
            gain = ratio(LARGER, to=SILENT if SILENT in rounds.others else BASE)
            part = loop_seconds / (max(ratios[SILENT].value, 1.0) if SILENT in ratios else 1.0)
            what_ifs.append(WhatIf("dispatch", freed(gain, part), f"a batch {self._times} times as large"))
            growing = min(max((self._times / gain.value - 1) / (self._times - 1), 0.0), 1.0)
        return Diagnosis(
            self._base.facts, 1 / rounds.seconds(), step_seconds, what_ifs, limits,
            self._phases(ratios, loop_seconds), load.cpu_seconds / load.seconds, self._fused(), growing,
            untried=tuple(dict.fromkeys(self._untried)), slowed=rounds.slowed(self._config.trainer.flush_denormal),
        )  # fmt: skip

    def _small(self, rounds: Rounds) -> Iterator[tuple[str, Ratio]]:
        """Removals of what takes too little of the untouched loop to be worth a word, by its ledger, which noise does
        not reach. Of what takes more the removal tells what else it slows: a core that has slept wakes slowly."""
        for name, account in booked_of(self._base.facts).items():
            ratio = (rounds.ratio_unread if account == DATA else rounds.ratio)(without(account))
            if ratio.value < CLEAR or name not in rounds.others:
                yield name, ratio

    def _named(self, ratios: dict[str, Ratio], small: dict[str, Ratio]) -> Iterator[tuple[str, str, str]]:
        for removal, (name, about) in ABOUTS.items():
            if removal in ratios:
                yield name, removal, "its time in the untouched loop" if removal in small else about
        counts = [name for name in ratios if name.startswith("threads=")]
        if counts:
            best = max(counts, key=lambda name: ratios[name].value)
            yield "threads", best, f"trainer.num_{best}"

    def _phases(self, ratios: dict[str, Ratio], loop_seconds: float) -> dict[str, float]:
        if FORWARD not in ratios or ratios["cached"].value > MOSTLY_DATA:  # differences of noise
            return {}
        forward, bare = (loop_seconds / ratios[name].value for name in (FORWARD, BARE))
        update = max(loop_seconds - loop_seconds / ratios["without_update"].value, 0.0)
        return {"forward": forward, "backward": max(bare - forward - update, 0.0), "update": update}

    def _fused(self) -> bool:
        optimizer: Any = self._config.optimizer or {}
        return optimizer.get("fused", True) is not False and optimizer.get("foreach") is not True
