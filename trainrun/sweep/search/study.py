"""Keep the points of a sweep as trials of an Optuna study, which suggests points and prunes them.

`sweep.json` and the folders of the jobs are authoritative. The journal of the study is an index of them for Optuna. If
it is missing, incomplete or disagrees, it is rebuilt from the jobs, with the same trial numbers.

Point n depends only on the seed of the sweep, n and the reported results: each point has a sampler with a seed of its
own. Values are stored with a sign that makes smaller ones better.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from trainrun.errors import ConfigError
from trainrun.sweep.jobs import Sweep
from trainrun.sweep.options import SweepOptions
from trainrun.sweep.points import REPEATED
from trainrun.sweep.results import Job
from trainrun.sweep.search.pruning import Curves, build_pruner
from trainrun.sweep.search.study_file import StudyFile
from trainrun.sweep.space import Dimension, build_point, list_point_jobs, strip_override_marks

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

RUNNING = "RUNNING"
HAS_STATE: Final = ("qmc", "nsga2", "cmaes")  # samplers that note in the study which point they were at
WHERE_TO_GET = "pip install 'trainrun[optuna]'"


class SweepStudy:
    """The Optuna study of a sweep; trial n is point n of `sweep.trials`. Raise ConfigError without Optuna."""

    def __init__(self, sweep: Sweep, options: SweepOptions) -> None:
        self._sweep, self._options = sweep, options
        self._dimensions = sweep.dimensions()
        word = "sweep=optuna" if sweep.search else f"sweep.pruner={options.pruner}"
        check_packages(word, options.sampler if sweep.search else "")
        self._file = StudyFile(sweep, options.storage)
        self._study: Study
        self._storage: BaseStorage
        self._version: object = None  # of the file of the study, when it was opened
        self._curves = Curves(sweep, options)
        self._reported: dict[int, set[int]] = {}  # of each point: the units whose values this worker reported

    def open(self) -> None:
        """Read the study, or rebuild it from the jobs. Call it after the results of earlier calls have been read."""
        with self._sweep.lock_exclusively():
            opened = self._file.read()
            if opened is None or not self._agrees(opened[0]):
                opened = self._rebuild_study()
            self._study, self._storage = opened
            self._version = self._file.version()
            self._reported.clear()

    @contextmanager
    def _open_locked(self) -> Iterator[None]:
        """Lock the study inside the block, and read it again if another worker has changed it.

        A worker that was killed may have left half a line, a point that the sweep lacks, or a result that the study
        lacks.
        """
        with self._sweep.lock_exclusively():
            is_whole = self._file.version() == self._version and self._file.is_whole()
            if not is_whole or len(self._study.get_trials(deepcopy=False)) != len(self._sweep.trials):
                self.open()
            yield

    @property
    def has_all_points(self) -> bool:
        return self._sweep.num_points_left == 0

    def ask(self) -> list[int]:
        """Create the next point, and return the numbers of its jobs; none if there is no point left."""
        with self._open_locked():
            if self.has_all_points:
                return []
            self._tell_points(range(len(self._sweep.trials)))
            trial = self._ask(self._study, len(self._sweep.trials))
            point = self._point(trial)
            jobs = self._sweep.add_point(self._dimensions, list_point_jobs(self._dimensions, point))
            self._sweep.save()
            return jobs

    def tell(self, num: int) -> None:
        """Report the results of the points of a job that has ended, if all their jobs have."""
        with self._open_locked():
            self._tell_points(number for number, jobs in enumerate(self._sweep.trials) if num in jobs)

    def _tell_points(self, numbers: Iterable[int]) -> None:
        trials = self._study.get_trials(deepcopy=False)
        for number in numbers:
            if not trials[number].state.is_finished():
                state, values = self._outcome(number)
                if state != RUNNING:
                    tell(self._study, number, state, values)

    def choose_jobs_to_prune(self, num: int) -> list[int]:
        """Report the new validations of the points of a job. Return the jobs of points that must be pruned."""
        if self._sweep.jobs[num].revived:
            return []
        to_prune: list[int] = []
        for number, jobs in enumerate(self._sweep.trials):
            values = self._curves.read_point_values(jobs) if num in jobs else {}
            if values.keys() <= self._reported.setdefault(number, set()):
                continue
            self._reported[number] |= values.keys()
            with self._open_locked():
                if self._report(self._study, self._storage, number, values):
                    to_prune = jobs
        return to_prune

    def _report(self, study: Study, storage: BaseStorage, number: int, values: Mapping[int, float]) -> bool:
        """Report values of a trial, by units of the resource. Return whether it must be pruned."""
        study_id = storage.get_study_id_from_name(self._file.name)
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, number)
        pruner, is_worse = build_pruner(self._options.pruner), False
        for units, value in values.items():
            trial = study.get_trials(deepcopy=False)[number]
            if units in trial.intermediate_values or trial.state.is_finished():
                continue
            storage.set_trial_intermediate_value(trial_id, units, value)
            is_worse |= pruner.prune(study, study.get_trials(deepcopy=False)[number])
        return is_worse

    def _point(self, trial: Trial) -> tuple[str, ...]:
        return build_point(self._dimensions, lambda dimension: suggest_word(trial, dimension))

    def _jobs(self, number: int) -> list[Job]:
        return [self._sweep.jobs[num] for num in self._sweep.trials[number]]

    def _ask(self, study: Study, number: int) -> Trial:
        study.sampler = build_sampler(self._options.sampler, self._options.seed, number)
        return study.ask()

    def _outcome(self, number: int) -> tuple[str, list[float]]:
        """Return the state of a trial and the means of its jobs' values. One failed job makes it fail."""
        jobs = self._jobs(number)
        if not all(map(self._sweep.has_ended, jobs)):
            return RUNNING, []
        states = {job.result.state for job in jobs}
        if states != {"done"}:
            return "FAIL" if "failed" in states else "PRUNED", []
        scores = [job.result.scores for job in jobs]
        if any(len(score) != self._num_objectives for score in scores):
            return "FAIL", []  # done without a value
        return "COMPLETE", [fmean(column) for column in zip(*scores, strict=True)]

    def _agrees(self, study: Study) -> bool:
        """Return whether a study agrees with the jobs in points, values and states."""
        trials = study.get_trials(deepcopy=False)
        if len(trials) != len(self._sweep.trials) or len(study.directions) != self._num_objectives:
            return False
        return all(map(self._is_trial_of_jobs, trials))

    def _is_trial_of_jobs(self, trial: FrozenTrial) -> bool:
        jobs = self._jobs(trial.number)
        state, values = self._outcome(trial.number)
        agrees: bool = trial.state.name == state and trial.params == self._params(jobs[0])
        return agrees and (state != "COMPLETE" or trial.values == values)

    @property
    def _num_objectives(self) -> int:
        return max(len(self._options.objective), 1)

    def _rebuild_study(self) -> tuple[Study, BaseStorage]:
        """Create the study again from the jobs, point by point, and write it."""
        import optuna
        from optuna.study import StudyDirection

        directions = [StudyDirection.MINIMIZE] * self._num_objectives
        storage, name = optuna.storages.InMemoryStorage(), self._file.name
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
        curves = Curves(self._sweep, self._options)
        for number in range(len(self._sweep.trials)):
            jobs = self._jobs(number)
            params = self._params(jobs[0])
            study.enqueue_trial(params)
            trial = self._ask(study, number)
            if params and self._options.sampler in HAS_STATE:
                _ = trial.relative_params  # its sampler notes this point
            self._point(trial)
            self._report(study, storage, number, curves.read_point_values(self._sweep.trials[number]))
            state, values = self._outcome(number)
            if state != RUNNING:
                tell(study, number, state, values)
        self._file.write(storage)
        rebuilt = self._file.read()
        assert rebuilt is not None
        return rebuilt

    def _params(self, job: Job) -> dict[str, Any]:
        """Return the parameters of a job in Optuna's form."""
        params: dict[str, Any] = {}
        if not self._sweep.search:
            return params
        parts = [strip_override_marks(word).partition("=") for word in job.words]
        values = {key: value for key, _, value in parts}
        for dimension in self._dimensions:
            if is_searched(dimension) and dimension.applies_to(job.words):
                params[dimension.name] = parse_parameter(dimension, values[dimension.key])
        return params


def tell(study: Study, number: int, state: str, values: list[float]) -> None:
    from optuna.trial import TrialState

    study.tell(number, values or None, state=TrialState[state], skip_if_finished=True)


def is_searched(dimension: Dimension) -> bool:
    """Return whether a dimension is a parameter of the study: it has several values, and is not seed or fold."""
    several = dimension.interval is not None or len(set(dimension.choices)) > 1
    return several and dimension.key not in REPEATED


def suggest_word(trial: Trial, dimension: Dimension) -> str:
    """Let a trial choose a value of a dimension. Return it as a word."""
    if not is_searched(dimension):
        return dimension.word if dimension.key in REPEATED else dimension.choices[0]
    interval = dimension.interval
    if interval is None:
        words = {parse_sweep_value(word): word for word in dimension.choices}
        return words[trial.suggest_categorical(dimension.name, list(words))]
    if interval.is_whole:
        low, high = int(interval.low), int(interval.high)
        return dimension.format_override(trial.suggest_int(dimension.name, low, high, log=interval.log))
    value = trial.suggest_float(dimension.name, interval.low, interval.high, log=interval.log)
    return dimension.format_override(value)


def parse_sweep_value(word: str) -> str:
    return strip_override_marks(word).partition("=")[2]


def parse_parameter(dimension: Dimension, text: str) -> Any:
    if dimension.interval is None:
        return text
    return int(text) if dimension.interval.is_whole else float(text)


def build_sampler(name: str, seed: int, number: int) -> BaseSampler:
    """Return the sampler of one trial, with a seed made of the sweep's seed and the number of the trial."""
    from optuna.exceptions import ExperimentalWarning

    own_seed = (seed * 1_000_003 + number) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # its users chose the sampler by name
        return choose_sampler(name, seed, own_seed)


def choose_sampler(name: str, seed: int, own_seed: int) -> BaseSampler:
    from optuna import samplers

    if name == "qmc":  # one sequence for all trials
        others = samplers.RandomSampler(seed=own_seed)
        return samplers.QMCSampler(
            scramble=True, seed=seed, independent_sampler=others, warn_independent_sampling=False
        )
    if name == "cmaes":
        return samplers.CmaEsSampler(seed=own_seed, warn_independent_sampling=False)
    kinds: dict[str, Callable[..., BaseSampler]] = {
        "tpe": samplers.TPESampler, "gp": samplers.GPSampler, "random": samplers.RandomSampler,
        "nsga2": samplers.NSGAIISampler,
    }  # fmt: skip
    return kinds[name](seed=own_seed)


def check_packages(word: str, sampler: str) -> None:
    """Raise ConfigError if Optuna or a package of the sampler is not installed. Silence Optuna's log but for errors."""
    needed = ["optuna", *{"cmaes": ["cmaes"], "gp": ["scipy", "torch"], "qmc": ["scipy"]}.get(sampler, [])]
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{word}: the package {missing[0]} is not installed; {WHERE_TO_GET}")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
