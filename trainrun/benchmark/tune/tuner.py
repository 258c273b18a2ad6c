"""Search for the fastest settings of a training on this machine: `diagnose` names causes, and their remedies are
tried.

What: the remedies of the most expensive cause take turns with the best settings so far. The fastest one is kept, and
    the run is diagnosed again, until no remedy is clearly faster. In the end the best settings are compared with the
    user's own in new processes, a number of times that is fixed in advance. Only that ratio is claimed, because the
    fastest of several candidates was also lucky. When: a training that is long enough. When not: a run of seconds.
    Source: `comparison.paired`. Gain: see `scripts/bench_autotune.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from trainrun.benchmark.budget import TURN_SECONDS, Budget
from trainrun.benchmark.diagnose.diagnosis import Diagnosis, Examination
from trainrun.benchmark.diagnose.verdict import CAUSES, certain_causes, reach_verdict
from trainrun.benchmark.measured_run import MeasuredRun
from trainrun.benchmark.remedies import (
    EFFECTS,
    EXACT,
    Remedy,
    find_remedies,
    model_remedies,
    select_new_settings,
)
from trainrun.benchmark.run_overrides import (
    LOADER_KEYS,
    compose_config,
    override_key,
    replace_overrides,
    start_choice_overrides,
)
from trainrun.benchmark.worker_process import WorkerFailed
from trainrun.comparison.paired import (
    PROCESS_SPREAD,
    Ratio,
    StoppingRules,
    compare_in_turns,
    compute_process_ratio,
)
from trainrun.errors import ConfigError
from trainrun.output import format_count

CONFIRM_PART: Final = 0.4  # of the budget at least: for fresh processes that confirm the best
CONFIRM_ROOM: Final = 1.2  # times the seconds that the fewest pairs of fresh processes need
DIAGNOSIS_PART: Final = 1 / 6  # of the budget that one diagnosis takes
LEAST_DIAGNOSIS: Final = 6.0  # seconds
LEAST_PROCESSES: Final = 3  # pairs of processes of a claim; Student's interval of two is far too wide
USUAL_PROCESSES: Final = 4  # pairs for which the budget may be exceeded: their interval is a third narrower
FEWEST_ROUNDS, MOST_ROUNDS = 3, 24
OVERRUN: Final = 0.2  # of the budget
SURE: Final = 0.99  # the confidence of the claim
MOST_PROCESSES: Final = 12  # pairs of processes of the claim
PROCESS_TURNS: Final = 3  # of each process of a pair: their median is what the pair says
LEAST_LIMIT: Final = 5.0  # seconds for a start and for a reply
PAIR_LIMIT: Final = 3.0  # times the seconds of a usual pair: for a start and for a reply of a fresh process
TURN_COST: Final = 2.0  # times the seconds of a turn, with its first steps and what stands around it
NO_TIME: Final = "no time left (--budget)"
NO_TIME_TO_CONFIRM: Final = "no time to confirm it, because it starts slowly (--budget)"
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Trial:
    """A remedy that took turns with the best settings before it.

    cause: the cause that it helps against. promised: the speed without that cause, by `diagnose`. ratio: the speed
        with the remedy; None if it could not be measured. reason: why it is not used; "" if it is.
    """

    cause: str
    promised: float | None
    remedy: Remedy
    ratio: Ratio | None = None
    peak_bytes: int = 0
    reason: str = NO_TIME

    @property
    def is_used(self) -> bool:
        return not self.reason

    @property
    def is_faster(self) -> bool:
        """Return whether it is certainly faster, by more than two equal processes may differ."""
        ratio = self.ratio
        return ratio is not None and ratio.low > 1.0 and ratio.value > 1.0 + PROCESS_SPREAD


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    overrides: the user's own. speed: items per second with them. diagnoses: of them, and of the best settings after
        each change, as far as there was time.
    claim: the speed of the best settings relative to them in new processes. problem: why there is no claim.
    """

    overrides: tuple[str, ...]
    unit: str
    speed: float
    diagnoses: tuple[str, ...]
    trials: tuple[Trial, ...]
    claim: Ratio | None
    problem: str
    seconds: float

    @property
    def best_settings(self) -> tuple[str, ...]:
        """Return the overrides that are claimed to be faster."""
        return tuple(used_settings(self.trials)) if self.is_claimed else ()

    @property
    def is_claimed(self) -> bool:
        return self.claim is not None and self.claim.low > 1.0

    @property
    def last_diagnosis(self) -> str:
        """Return the diagnosis of the best settings; "" if they are the user's own, or if there was no time for it."""
        changes = sum(trial.is_used for trial in self.trials)
        return self.diagnoses[changes] if 0 < changes < len(self.diagnoses) else ""

    @property
    def verdict(self) -> str:
        late = sum(trial.reason == NO_TIME for trial in self.trials)
        rest = f"; not tried for lack of time: {format_count(late, 'setting')} (--budget)" if late else ""
        if not any(trial.is_used for trial in self.trials):
            measured = sum(trial.ratio is not None for trial in self.trials)
            faster = [trial for trial in self.trials if trial.is_faster]
            if faster:
                return f"your settings are the fastest of those that --allow admits{rest}"
            if measured:
                return f"{format_count(measured, 'setting')} tried, none clearly faster than yours{rest}"
            if self.trials:
                return f"no setting could be measured{rest}"
            return "nothing to try: no cause is certain, or no setting removes it"
        if self.claim is None:
            return f"nothing is claimed: {self.problem}"
        if not self.is_claimed:
            return f"no clear difference in fresh processes: {self.claim}{rest}"
        interval = f"{self.claim.low:.2f} to {self.claim.high:.2f}, 99 % sure"
        return f"{self.claim.value:.2f}x the speed of your settings ({interval}){rest}"


def used_settings(trials: Sequence[Trial]) -> list[str]:
    """Return the overrides of all remedies that are used. A later override replaces an earlier one of the same key."""
    overrides: list[str] = []
    for trial in trials:
        if trial.is_used:
            overrides = replace_overrides(overrides, trial.remedy.overrides)
    return overrides


class Tuner:
    """One search for faster settings.

    pool: starts runs. overrides: the settings of the run, with the names of the config. allowed: the largest effect
        that a remedy may have.
    problem: why no speed is claimed. base: the run with the best settings so far.
    """

    def __init__(
        self, pool: Any, overrides: Sequence[str], budget: Budget, progress: Progress, allowed: str = EXACT
    ) -> None:
        self.overrides, self.budget, self.speed = list(overrides), budget, 0.0
        self.trials: list[Trial] = []
        self._pool, self._say, self._allowed = pool, progress, allowed
        self._turn_seconds = min(TURN_SECONDS, max(0.05, budget.seconds / 400))
        self._tried: set[tuple[str, ...]] = set()
        self.problem = ""
        self.base: MeasuredRun
        self._own: MeasuredRun
        self._start_seconds = 0.0

    def run(self) -> Tuning:
        """Try the remedies that `diagnose` names until none helps. Raise the errors that a run with these settings
        would raise.
        """
        self.start_base()
        texts: list[str] = []
        goes_on = True
        while goes_on and (self._diagnosis_seconds() >= LEAST_DIAGNOSIS or not texts):
            diagnosis = self._diagnose()
            texts.append(reach_verdict(diagnosis).text)
            goes_on = self._improve(diagnosis)
        unit = self.base.info.unit
        self.base.close()
        claim = (
            self.confirm(used_settings(self.trials)) if any(trial.is_used for trial in self.trials) else None
        )
        return Tuning(tuple(self.overrides), unit, self.speed, tuple(texts), tuple(self.trials), claim,
                      self.problem, self.budget.elapsed_seconds)  # fmt: skip

    def start_base(self) -> None:
        """Start the run of the user's own settings."""
        self._say("your own settings", self.budget.remaining_seconds())
        began = self.budget.clock()
        self.base = self._own = self._start(self.overrides, self.budget.remaining_seconds())
        self.base.find_pace()
        self._start_seconds = self.budget.clock() - began
        self.base.measure_item_seconds()
        self.speed = self.base.items_per_second

    def _start(self, overrides: Sequence[str], seconds: float) -> MeasuredRun:
        """Start a run in a worker. seconds: the limit for the start, and for each reply of the worker."""
        config, limit = compose_config(overrides), max(LEAST_LIMIT, seconds)
        usual = self._own.worker.start_seconds if self._start_seconds else limit
        worker = self._pool.start(config, limit)
        worker.limit = limit  # a compiler may take all the time that is left
        return MeasuredRun(worker, config, self._turn_seconds, usual)

    def _diagnosis_seconds(self) -> float:
        left = self._compute_trials_deadline() - self.budget.clock()
        return min(DIAGNOSIS_PART * self.budget.seconds, left / 2)  # the other half is for its remedies

    def _diagnose(self) -> Diagnosis:
        """Diagnose the best settings so far."""
        budget = Budget(max(1.0, self._diagnosis_seconds()), self.budget.clock)
        worker, overrides = self.base.worker, self._best_settings()
        return Examination(self._pool, worker, overrides, budget, 1.0, self._say).diagnosis()

    def _compute_trials_deadline(self) -> float:
        """Return the clock time at which trials end. The rest of the budget is for the comparison in new processes."""
        needed = self._estimate_claim_seconds(self.base)
        return self.budget.deadline() - max(CONFIRM_PART * self.budget.seconds, needed)

    def _compute_cause_deadline(self, gains: Sequence[float]) -> float:
        """Return the clock time until which remedies of the first of several causes are tried.

        gains: the promised gain of each cause, above 1. The time that is left is divided in proportion to their
            logarithms.
        """
        now = self.budget.clock()
        logs = [math.log(gain) for gain in gains]
        return now + logs[0] / sum(logs) * max(0.0, self._compute_trials_deadline() - now)

    def _best_settings(self) -> list[str]:
        return replace_overrides(self.overrides, used_settings(self.trials))

    def _improve(self, diagnosis: Diagnosis) -> bool:
        """Try the remedies of one cause after the other until one is kept. Return whether one was kept."""
        causes = [(what_if, find_remedies(what_if, diagnosis)) for what_if in certain_causes(diagnosis)]
        causes = [(what_if, remedies) for what_if, remedies in causes if remedies]
        gains = [what_if.gain.value for what_if, _ in causes]
        for number, (what_if, remedies) in enumerate(causes):
            ends = self._compute_cause_deadline(gains[number:])
            for compiles in (False, True):  # compiling may take all the time
                some = [remedy for remedy in remedies if remedy.compiles is compiles]
                if self._keep_fastest(CAUSES[what_if.name], gains[number], some, ends):
                    return True
        steps, info = self.base.info.total_steps, diagnosis.info
        run_seconds = None if steps is None else steps * diagnosis.step_seconds
        for cause, faster_models in model_remedies(info, run_seconds).items():
            useful = [remedy for remedy in faster_models if self.is_allowed(remedy)]
            untried = select_new_settings(useful, self.add_start_choices(()))
            if self._keep_fastest(cause, None, untried, self._compute_trials_deadline()):
                return True
        return False

    def _keep_fastest(
        self, cause: str, promised: float | None, remedies: Sequence[Remedy], ends: float
    ) -> bool:
        """Try the remedies of a cause and keep the fastest. Return whether one was kept. ends: the end by
        `time.monotonic()`.
        """
        untried = [remedy for remedy in remedies if remedy.overrides not in self._tried]
        self._tried |= {remedy.overrides for remedy in untried}
        trials, runs = self.try_in_turns(cause, promised, untried, ends)
        faster = [trial for trial in trials if trial.is_faster and self.is_allowed(trial.remedy)]
        slow = [
            trial
            for trial in faster
            if self._estimate_claim_seconds(runs[trial.remedy.overrides]) > self.budget.remaining_seconds()
        ]
        candidates = [trial for trial in faster if trial not in slow] or faster
        best = max(candidates, key=lambda trial: trial.ratio.value if trial.ratio else 0.0, default=None)
        trials = [
            replace(trial, reason=NO_TIME_TO_CONFIRM) if trial in slow and trial is not best else trial
            for trial in trials
        ]
        for trial in trials:
            self.trials.append(
                replace(trial, reason="" if trial is best else self._reason_against(trial, best))
            )
        for overrides, run in runs.items():
            if best is None or overrides != best.remedy.overrides:
                run.close()
        if best is not None:
            self.base.close()
            self.base = runs[best.remedy.overrides]
        return best is not None

    def is_allowed(self, remedy: Remedy) -> bool:
        return EFFECTS.index(remedy.effect) <= EFFECTS.index(self._allowed)

    def _reason_against(self, trial: Trial, best: Trial | None) -> str:
        if trial.reason:
            return trial.reason
        if trial.is_faster and not self.is_allowed(trial.remedy):
            return f"--allow {trial.remedy.effect}"
        if best is not None and trial.ratio is not None and trial.ratio.value > 1.0 + PROCESS_SPREAD:
            return f"slower than {best.remedy}"
        return "no clear gain"

    def add_start_choices(self, overrides: Sequence[str]) -> list[str]:
        """Return the best settings, these overrides, and the choices that the base made at its start.

        So the runs differ only in these overrides. Other data may need other readers, so the run chooses the readers
        itself.
        """
        best = self._best_settings()
        choices = start_choice_overrides(compose_config(best), self.base.info)
        if any(override_key(override).startswith("data.") for override in overrides):
            choices = [override for override in choices if override_key(override) not in LOADER_KEYS]
        return replace_overrides(replace_overrides(best, choices), overrides)

    def try_in_turns(
        self, cause: str, promised: float | None, remedies: Sequence[Remedy], ends: float
    ) -> tuple[list[Trial], dict[tuple[str, ...], MeasuredRun]]:
        """Compare remedies with the best settings so far. Return the trials, and the runs that are still alive."""
        trials: dict[tuple[str, ...], Trial] = {}
        runs: dict[tuple[str, ...], MeasuredRun] = {}
        for remedy in sorted(
            remedies, key=lambda remedy: bool(remedy.start_cost)
        ):  # they may take all the time
            trial = Trial(cause, promised, remedy)
            if ends - self.budget.clock() > self._start_seconds + self._estimate_rounds_seconds(
                len(runs) + 1
            ):
                left = ends - self.budget.clock() - self._estimate_rounds_seconds(len(runs) + 1)
                run, reason = self._start_remedy(remedy, left)
                trial = replace(trial, reason=reason)
                if run is not None:
                    runs[remedy.overrides] = run
            trials[remedy.overrides] = trial
        turns = {" ".join(overrides): run.measure_item_seconds for overrides, run in runs.items()}
        rules = StoppingRules(PROCESS_SPREAD, ends, FEWEST_ROUNDS, FEWEST_ROUNDS, most_pairs=MOST_ROUNDS)
        comparison = compare_in_turns(self.base.measure_item_seconds, turns, rules, self.budget.clock)
        for overrides, run in runs.items():
            name, measured = " ".join(overrides), trials[overrides]
            if run.error or not comparison.pairs[name]:
                trials[overrides] = replace(measured, reason=run.error or self.base.error or NO_TIME)
            else:
                ratio = comparison.ratio(name)
                if measured.remedy.shortens_samples:
                    ratio = ratio.multiply(self.base.work_per_step / run.work_per_step)
                trials[overrides] = replace(measured, ratio=ratio, peak_bytes=run.peak_bytes)
        return [trials[remedy.overrides] for remedy in remedies], runs

    def _start_remedy(self, remedy: Remedy, seconds: float) -> tuple[MeasuredRun | None, str]:
        """Start a run with a remedy. Return the run; or None and why it cannot start, or did not start within
        `seconds`.
        """
        self._say(f"trying {remedy}", self.budget.remaining_seconds())
        run = None
        try:
            run = self._start(
                self.add_start_choices(remedy.overrides), min(seconds, self.budget.remaining_seconds())
            )
            run.find_pace()
            return run, ""
        except ConfigError as error:
            reason = error.faults[0]
        except WorkerFailed as error:
            reason = str(error).strip().splitlines()[-1]
        if run is not None:
            run.close()
        return None, reason

    def _estimate_rounds_seconds(self, runs: int) -> float:
        return TURN_COST * FEWEST_ROUNDS * (runs + 1) * self._turn_seconds

    def confirm(self, settings: Sequence[str]) -> Ratio | None:
        """Compare settings with the user's own, in as many pairs of new processes as there is time for.

        Return None if that fails. The number of pairs is fixed before the second pair, because stopping at a good
        result would bias it.
        """
        groups: list[list[tuple[float, float]]] = []
        wanted, clock = self._affordable_pairs(self._estimate_pair_seconds(self.base)), self.budget.clock
        while len(groups) < wanted and wanted >= LEAST_PROCESSES:
            self._say(f"fresh processes, pair {len(groups) + 1}", self.budget.remaining_seconds())
            began = clock()
            try:
                groups.append(self._measure_fresh_pair(settings, own_first=len(groups) % 2 == 0))
            except WorkerFailed as error:
                self.problem = str(error).strip().splitlines()[-1]
                return None
            if len(groups) == 1:
                wanted = 1 + self._affordable_pairs(clock() - began, num_done=1)
        if len(groups) < LEAST_PROCESSES:
            needed = self.budget.elapsed_seconds + self._estimate_claim_seconds(self.base)
            self.problem = (
                f"no time for {LEAST_PROCESSES} pairs of fresh processes; try --budget {needed:.0f}"
            )
            return None
        return compute_process_ratio(groups, SURE)

    def _estimate_pair_seconds(self, run: MeasuredRun) -> float:
        """Estimate the seconds of a pair of new processes, one with the settings of `run`, from earlier starts."""
        extra: float = run.worker.start_seconds - self._own.worker.start_seconds
        return 2 * self._start_seconds + max(0.0, extra)

    def _estimate_claim_seconds(self, run: MeasuredRun) -> float:
        """Return the seconds of the fewest pairs of new processes that a claim for the settings of `run` needs."""
        return CONFIRM_ROOM * LEAST_PROCESSES * self._estimate_pair_seconds(run)

    def _affordable_pairs(self, seconds: float, num_done: int = 0) -> int:
        """Return how many further pairs of `seconds` each there is time for.

        For the usual number of pairs the budget may be exceeded a little, because a search without a claim is
        useless.
        """
        left, usual = max(self.budget.remaining_seconds(), 0.0), USUAL_PROCESSES - num_done
        num_pairs = int(left / max(seconds, 1e-9))
        if num_pairs < usual:
            num_pairs = min(usual, int((left + OVERRUN * self.budget.seconds) / seconds))
        return min(MOST_PROCESSES - num_done, num_pairs)

    def _measure_fresh_pair(self, changes: Sequence[str], own_first: bool) -> list[tuple[float, float]]:
        """Return the speeds of both settings in turns, each in a new process. Raises WorkerFailed.

        A started pair is finished even if it takes longer than the budget.
        """
        settings = [self.overrides, replace_overrides(self.overrides, changes)]
        runs = []
        for overrides in settings if own_first else settings[::-1]:
            runs.append(self._start(overrides, PAIR_LIMIT * self._estimate_pair_seconds(self.base)))
            runs[-1].find_pace()
        own_run, best = runs if own_first else runs[::-1]
        rules = StoppingRules(
            0.0, least_rounds=PROCESS_TURNS, first_rounds=PROCESS_TURNS, most_pairs=PROCESS_TURNS
        )
        pairs = compare_in_turns(
            own_run.measure_item_seconds, {"best": best.measure_item_seconds}, rules, self.budget.clock
        ).pairs["best"]
        for run in runs:
            run.close()
        if error := own_run.error or best.error:
            raise WorkerFailed(error)
        return pairs
