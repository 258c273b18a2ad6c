"""The fastest way to the same training: option after option, and only what is measured again in the end is claimed.

What: the settings of each option run in turns against the best so far. In the end the best
meets the user's own settings again in fresh processes, as often as was decided before; the winner among many was also
lucky, so only that ratio is told. When: a training long enough to pay for the search. When not: a run of seconds.
Source: `timing.paired`. Gain: of this search itself, see `scripts/bench_autotune.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from trainrun.autotune.timed_step import run_seconds
from trainrun.benchmark.budget import Budget
from trainrun.benchmark.run_overrides import config_of, key_of, own_choices, replaced
from trainrun.benchmark.search.acceptance import EXACT, GATES, NUMERIC, SHOWN, Acceptance, accept, loosest
from trainrun.benchmark.search.candidates import (
    BEATEN,
    FIRST_ROUNDS,
    KEPT,
    NEEDLESS,
    NOISE,
    REJECTED,
    SLOWER,
    UNCONFIRMED,
    UNPAID,
    UNTRIED,
    Candidate,
    Start,
    Starter,
    Trial,
)
from trainrun.benchmark.search.options import (
    COMPILE_SECONDS,
    DATA,
    OPTIONS,
    OTHER,
    SearchFacts,
    SearchOption,
    TriedSetting,
)
from trainrun.benchmark.worker_messages import Load, Turn
from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError, TrainingError
from trainrun.output import counted
from trainrun.timing.paired import LEAST_REPLICATES, Comparison, Ratio, Rules, compare, ratio_of_processes

SEARCH_UNTIL: Final = 0.6  # of the budget: the rest is for processes that confirm the best
NOISE_FRACTION: Final = 0.06  # of the budget
LEAST_NOISE, MOST_NOISE = 6, 20  # pairs
CALM: Final = 0.01  # a machine whose noise is within it needs no more pairs
SMALLEST: Final = 0.02  # an effect below it is not worth a word in a preset
MEMORY_FRACTION: Final = 0.9  # of the device that a setting may fill
SURE: Final = 0.99  # the confidence of the claim
MOST_PROCESSES: Final = 12  # pairs of processes of the claim
PROCESS_TURNS: Final = 3  # of each process of a pair: their median is what the pair says
NO_TIME: Final = "no time left for it"
START_ROOM: Final = 1.2  # times the seconds that a candidate needs to start
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class SearchPart:
    """A part of the best settings. found: its speed over that of the best before it."""

    overrides: tuple[str, ...]
    option: str
    gate: str
    found: Ratio | None


@dataclass(frozen=True)
class Results:
    """claim: the speed of the best over the user's own settings, in fresh processes, if there is one. noise: two runs
    of the same settings. speed: items a second of the user's settings. loss, cosine: how far the best is from them."""

    overrides: tuple[str, ...]
    unit: str
    speed: float
    noise: Ratio
    trials: tuple[Trial, ...]
    parts: tuple[SearchPart, ...]
    claim: Ratio | None
    claimed: bool
    verdict: str
    seconds: float
    loss: float | None = None
    cosine: float | None = None
    num_first_steps: int = 0
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> tuple[str, ...]:
        """The overrides that are claimed to be faster."""
        return tuple(one for part in self.parts for one in part.overrides) if self.claimed else ()


class Search:
    """One search. start: `WorkerPool.start`. overrides: of a run, by the config's own names. gate: what may differ."""

    def __init__(self, start: Start, overrides: Sequence[str], budget: Budget, cores: int, progress: Progress,
                 gate: str = EXACT, turns: float = 1.0) -> None:  # fmt: skip
        if gate not in GATES:
            raise ConfigError(f"--allow {gate}: must be one of {EXACT}, {NUMERIC}")
        self._start, self.overrides, self.budget, self._cores = start, list(overrides), budget, cores
        self._say, self._gate = progress, gate
        self.starter = Starter(start, budget, turns * min(0.3, max(0.05, budget.seconds / 400)))
        self.trials: list[Trial] = []
        self.parts: list[SearchPart] = []
        self._notes: list[str] = []
        self._known: list[RunConfig] = []  # need not be tried
        self._gain, self._extra_start = 1.0, 0.0
        self.facts: SearchFacts
        self.base: Candidate
        self.noise: Ratio
        self._best: Candidate | None = None

    def run(self, options: Sequence[SearchOption] = OPTIONS) -> Results:
        """Raises what a run of these settings would raise."""
        self.measure_base()
        return self.search(options)

    def progress(self, about: str) -> None:
        self._say(about, max(0.0, self.budget.left()))

    def measure_base(self) -> None:
        """Look at the run of the user's own settings, and at the noise between two of them.

        Raises TrainingError if the two are not the same training.
        """
        self._look()
        self.progress("noise: your own settings against themselves")
        starter, clock = self.starter, self.budget.clock
        self.base, starter.reference = starter.base(self.overrides)
        twin, steps = starter.base(self.overrides)
        usual = accept(starter.reference, steps, NUMERIC)
        if usual.reason:
            raise TrainingError(
                f"two runs of these settings differ by more than rounding ({usual.reason}), so nothing can be compared "
                "with them; is there a random number that seed= does not reach?"
            )
        starter.usual = Acceptance("", usual.loss, usual.cosine)
        if usual.loss:
            self._notes.append(f"two runs of your settings differ already, by {usual.loss:.1g} of the loss")
        began = clock()
        rules = Rules(
            CALM, began + NOISE_FRACTION * self.budget.seconds, least_rounds=LEAST_NOISE, first_rounds=LEAST_NOISE,
            most_pairs=MOST_NOISE,
        )  # fmt: skip
        found = compare(self.base.item_seconds, {"twin": twin.item_seconds}, rules, clock)
        if found.failed or not found.pairs["twin"]:
            raise TrainingError(
                f"a run of these settings failed after its start: {twin.error or self.base.error}"
            )
        self.noise, self.speed = found.ratio("twin"), found.speed("")
        starter.turn_cost = (clock() - began) / (2 * len(found.pairs["twin"]))
        twin.close()

    def _look(self) -> None:
        """Find how long a step takes, and what the run chooses for itself, which is then held fixed."""
        self.progress("your own settings")
        config, budget, starter = config_of(self.overrides), self.budget, self.starter
        scout = Candidate(self._start(config, budget.seconds), budget.seconds)
        try:
            scout.find_pace(starter.turn_seconds)
            turn = scout.turn()
            step = turn.seconds / turn.steps
            batches = min(50, max(2, int(starter.turn_seconds / step)))
            load: Turn = scout.worker.ask(Load(batches))
        finally:
            scout.close()
        info = scout.info
        starter.num_steps = min(20, max(3, int(budget.seconds / 120 / step)))
        self.overrides = replaced(self.overrides, own_choices(config, info))
        self._known = [config_of(self.overrides)]
        seconds = math.inf if info.total_steps is None else info.total_steps * step
        seconds = run_seconds(config, seconds)
        self.facts = SearchFacts(self._known[0], info, self._cores, step, load.seconds / batches, seconds)

    def search(self, options: Sequence[SearchOption]) -> Results:
        """Try every option on top of those before it, and claim what the best gains."""
        for number, option in enumerate(options):
            waiting = [one for one in options[number:] if one is option or not one.skip(self.facts)]
            self._try(option, option.weight / sum(one.weight for one in waiting))
        claim, trial = None, Trial("best", ())
        if self.parts:
            if self._best is not None:
                self._best.close()
            self.progress("the best against your own settings, in fresh processes")
            claim, trial = self._confirm()
        verdict = verdict_of(claim, trial, self.trials)
        return Results(
            tuple(self.overrides), self.facts.info.unit, self.speed, self.noise, tuple(self.trials), tuple(self.parts),
            claim, claim is not None and claim.low > 1 and claim.value >= 1 + SMALLEST, verdict, self.budget.spent,
            trial.loss, trial.cosine, self.starter.num_steps, tuple(self._notes),
        )  # fmt: skip

    def _try(self, option: SearchOption, fraction: float) -> None:
        """Compare all settings of an option with the best so far, and keep the fastest if it is faster."""
        if reason := option.skip(self.facts):
            self.trials.append(Trial(option.name, (), state=NEEDLESS, reason=reason))
            return
        settings, starter, clock = (
            self._different(option.settings(self.facts)),
            self.starter,
            self.budget.clock,
        )
        left = self.budget.left(SEARCH_UNTIL)
        one = START_ROOM * starter.start_seconds + starter.rounds_seconds(1)
        ends = clock() + min(left, max(fraction * left, one))
        running: dict[str, tuple[Candidate, Trial]] = {}
        for setting in settings:
            candidate, trial = self.start_setting(option.name, setting, ends, len(running))
            if candidate is None:
                self._remember(trial)
            else:
                running[trial.title] = candidate, trial
        if not running:
            return
        self.progress(f"{option.name}: {len(running)} in turns")
        turns = {title: candidate.item_seconds for title, (candidate, _) in running.items()}
        found = compare(self._running_best().item_seconds, turns, Rules(SMALLEST, ends, FIRST_ROUNDS), clock)
        trials = [self._judged(found, candidate, trial) for candidate, trial in running.values()]
        kept = [trial for trial in trials if trial.state == KEPT]
        best = max(kept, key=lambda trial: trial.ratio.value if trial.ratio else 0.0, default=None)
        for trial in trials:
            if trial.state == KEPT and best is not None and trial is not best:
                trial = replace(trial, state=BEATEN, reason=f"by {best.title}")
            if trial is not best:
                self._remember(trial)
                running[trial.title][0].close()
        if best is not None:
            self._remember(best)
            self._keep(best, running[best.title][0])

    def _loosest(self, *gates: str) -> str:
        """What the best, with a setting of these gates, may differ by."""
        return SHOWN if self._gate == SHOWN else loosest(*gates, *[part.gate for part in self.parts])

    def _different(self, settings: Sequence[TriedSetting]) -> list[TriedSetting]:
        """Return those that give a new config, each once; an impossible one is kept, to be refused with its reason."""
        seen, found = list(self._known), []
        for setting in settings:
            try:
                config = config_of(self._with(setting.overrides))
            except ConfigError:
                found.append(setting)
                continue
            if config not in seen:
                seen.append(config)
                found.append(setting)
        return found

    def _with(self, overrides: Sequence[str]) -> list[str]:
        return replaced(self.overrides, replaced(self._found(), overrides))

    def _found(self) -> list[str]:
        return [one for part in self.parts for one in part.overrides]

    def _remember(self, trial: Trial) -> None:
        self.trials.append(trial)
        if trial.state != UNTRIED:
            with suppress(ConfigError):
                self._known.append(config_of(self._with(trial.overrides)))

    def start_setting(
        self, option: str, setting: TriedSetting, ends: float, running: int
    ) -> tuple[Candidate | None, Trial]:
        """running: candidates that run already and need their turns too."""
        trial, starter = Trial(option, *setting), self.starter
        compiles = any("compile" in one for one in setting.overrides)
        patient = starts_slowly(setting.overrides)
        if setting.gate == NUMERIC and self._gate == EXACT:
            return None, replace(trial, state=REJECTED, reason="rounds more: --allow numeric")
        left = ends - self.budget.clock() - starter.rounds_seconds(running + 1)
        if left < START_ROOM * starter.start_seconds + COMPILE_SECONDS * compiles:
            return None, replace(trial, reason=NO_TIME)
        self.progress(f"{option}: {trial.title}")
        gate = None if setting.gate == OTHER else self._loosest(setting.gate)
        return starter.candidate(self._with(setting.overrides), trial, left, gate, patient)

    def _judged(self, found: Comparison, candidate: Candidate, trial: Trial) -> Trial:
        """Keep what is faster by more than SMALLEST, as far as its pairs can say."""
        pairs = found.pairs[trial.title]
        if candidate.error:
            return replace(trial, state=REJECTED, reason=candidate.error)
        if len(pairs) < FIRST_ROUNDS:
            return replace(trial, state=UNTRIED, reason=f"time for {len(pairs)} turns only")
        ratio, memory = found.ratio(trial.title), self.facts.info.memory_bytes
        trial = replace(trial, ratio=ratio, peak_bytes=candidate.peak_bytes)
        if memory and candidate.peak_bytes > MEMORY_FRACTION * memory:
            reason = f"fills more than {100 * MEMORY_FRACTION:.0f} % of the memory"
            return replace(trial, state=REJECTED, reason=reason)
        if ratio.high < 1 or not (ratio.low > 1 and ratio.value > 1 + SMALLEST):
            return replace(trial, state=SLOWER if ratio.high < 1 else NOISE)
        extra = max(0.0, trial.start_seconds - self.starter.start_seconds)
        run = self.facts.run_seconds / self._gain
        finite = starts_slowly(trial.overrides) and math.isfinite(run)
        if finite and extra + run / ratio.value > run / (1 + SMALLEST):
            needed = extra / (1 - 1 / ratio.value)
            reason = f"{extra:.0f} s more to start: paid back after {needed:.0f} s, the run takes {run:.0f} s"
            return replace(trial, state=UNPAID, reason=reason)
        needed = self._confirmation_seconds(self._extra_start + extra)
        if self.budget.left() < needed:
            reason = f"{LEAST_REPLICATES} pairs of fresh processes would take {needed:.0f} s: more --budget"
            return replace(trial, state=UNCONFIRMED, reason=reason)
        return replace(trial, state=KEPT)

    def _confirmation_seconds(self, extra: float) -> float:
        """Seconds of the fewest fresh processes. extra: that the best takes longer to start than your settings."""
        turns = 2 * PROCESS_TURNS * self.starter.turn_cost
        return LEAST_REPLICATES * (2 * self.starter.start_seconds + extra + turns)

    def _keep(self, trial: Trial, candidate: Candidate) -> None:
        """Make a setting a part of the best; parts before it lose the keys that it sets."""
        keys = {key_of(one) for one in trial.overrides}
        parts = [
            replace(part, overrides=tuple(one for one in part.overrides if key_of(one) not in keys))
            for part in self.parts
        ]
        new = SearchPart(trial.overrides, trial.option, trial.gate, trial.ratio)
        self.parts = [*(part for part in parts if part.overrides), new]
        self._gain *= trial.ratio.value if trial.ratio is not None else 1.0
        self._extra_start += max(0.0, trial.start_seconds - self.starter.start_seconds)
        if self._best is not None:
            self._best.close()
        self._best = candidate
        facts = replace(self.facts, config=config_of(self._with(())), info=candidate.info)
        if any(key.startswith("data.") for key in keys):  # whether loading still matters
            steps = max(2, min(50, int(self.starter.turn_seconds / facts.step_seconds)))
            load: Turn = candidate.worker.ask(Load(steps))
            step = facts.step_seconds / (trial.ratio.value if trial.ratio is not None else 1.0)
            facts = replace(facts, step_seconds=step, load_seconds=load.seconds / steps)
        self.facts = facts

    def _running_best(self) -> Candidate:
        return self.base if self._best is None else self._best

    def _confirm(self) -> tuple[Ratio | None, Trial]:
        """Compare the best with the user's own settings in as many pairs of new processes as there is time for.

        The number of pairs is decided before the second: looking at them in between would find what it looks for.
        """
        gate = self._loosest()
        trial = Trial("best", tuple(self._found()), gate)
        groups: list[list[tuple[float, float]]] = []
        wanted = 1
        while len(groups) < wanted:
            began = self.budget.clock()
            pairs, trial = self._fresh_pairs(trial, base_first=len(groups) % 2 == 0)
            if not pairs:
                return None, trial
            groups.append(pairs)
            if len(groups) == 1:
                wanted = self._affordable_processes(self.budget.clock() - began)
        if len(groups) < LEAST_REPLICATES:
            needed = f"{LEAST_REPLICATES} are needed: more --budget"
            reason = f"only {counted(len(groups), 'pair')} of fresh processes fitted into the time, {needed}"
            return None, replace(trial, reason=reason)
        return ratio_of_processes(groups, SURE), trial

    def _affordable_processes(self, seconds: float) -> int:
        """Return how many pairs of processes there are to be in all. seconds: that the first pair took.

        Too few for an interval are not worth a second pair.
        """
        more = int(max(0.0, self.budget.left()) / max(seconds, 1e-9))
        processes = min(MOST_PROCESSES, 1 + more)
        return processes if processes >= LEAST_REPLICATES else 1

    def _fresh_pairs(self, trial: Trial, base_first: bool) -> tuple[list[tuple[float, float]], Trial]:
        """Start both settings in new processes and return their turns, or none; the trial then says why."""
        starter, clock = self.starter, self.budget.clock
        base = starter.base(self.overrides)[0] if base_first else None
        left = max(5.0, self.budget.left())
        trial = replace(trial, reason="")
        candidate, trial = starter.candidate(self._with(()), trial, left, trial.gate, patient=True)
        if candidate is None:
            if base is not None:
                base.close()
            return [], trial
        base = base or starter.base(self.overrides)[0]
        rules = Rules(0.0, least_rounds=1, first_rounds=PROCESS_TURNS, most_pairs=PROCESS_TURNS,
                      deadline=self.budget.deadline())  # fmt: skip
        comparison = compare(base.item_seconds, {"best": candidate.item_seconds}, rules, clock)
        for side in (base, candidate):
            side.close()
        trial = replace(trial, peak_bytes=candidate.peak_bytes)
        if base.error or candidate.error:
            return [], replace(trial, reason=base.error or candidate.error)
        return comparison.pairs["best"], trial


def starts_slowly(overrides: Sequence[str]) -> bool:
    """Whether a setting does work before the first step, for which it must be waited, and which must pay."""
    return any(key_of(one).startswith(("trainer.compile", "data.cache")) for one in overrides)


def verdict_of(claim: Ratio | None, best: Trial, trials: Sequence[Trial]) -> str:
    """Say in a sentence what was found. best: without overrides if nothing on the way was clearly faster."""
    untried = sum(trial.state in (UNTRIED, UNCONFIRMED) for trial in trials)
    measured = sum(trial.ratio is not None for trial in trials)
    rest = f"; not tried, for want of time: {counted(untried, 'setting')} (--budget)" if untried else ""
    if not best.overrides:
        late = [trial for trial in trials if trial.option == DATA and trial.state in (UNTRIED, UNCONFIRMED)]
        if late:
            return (
                f"little is known: loading takes part of a step, and {late[0].title} is {late[0].state}{rest}"
            )
        if not measured:
            return f"nothing is known: no other setting was measured{rest}"
        clearly = f"of {counted(measured, 'setting')} that could be measured none is clearly faster{rest}"
        if untried >= measured:  # the best can be told only of most of what there is
            return f"little is known: {clearly}"
        return f"your configuration is the best that was found: {clearly}"
    if claim is None:
        return f"nothing is claimed: the best was not confirmed ({best.reason})"
    yours = "your configuration is"
    if claim.high < 1:
        return f"{yours} the best: what seemed faster is slower in fresh processes, {claim}{rest}"
    if claim.low <= 1:
        return f"{yours} as good as the best that was found: no clear difference, {claim}{rest}"
    if claim.value < 1 + SMALLEST:
        return f"{yours} as good as the best that was found: {claim}{rest}"
    bounds = f"{claim.low:.2f} to {claim.high:.2f}, 99 % sure"
    return f"{claim.value:.2f}x the speed of your own settings ({bounds})"
