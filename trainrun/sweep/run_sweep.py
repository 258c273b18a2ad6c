"""Run a sweep: several runs from one command line, each in a process and folder of its own.

So a job cannot disturb the next one, and can be inspected, resumed and compared like any other run. The same command
again runs what is missing: finished jobs stay, jobs with a checkpoint continue from it, and new values add new jobs.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from trainrun.config.argv import OWN_KEYS, CommandLine
from trainrun.config.compose import compose_run, prepare_command_line
from trainrun.config.schema import validation_nodes
from trainrun.errors import (
    EXIT_AGAIN,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    FULL,
    ConfigError,
    SaveError,
    TrainrunError,
)
from trainrun.folder.run_folder import RunDir, is_run_folder, remove_new_folder, resolve_folder, write_text
from trainrun.output import format_count, format_path_to_paste, report_result, say
from trainrun.parallel.devices import choose_num_devices
from trainrun.runtime.signals import catch_stops
from trainrun.sweep.forked_job import import_what_jobs_need
from trainrun.sweep.job_queue import Command, JobQueue, StopRelay, job_command
from trainrun.sweep.jobs import Sweep, load_calls, open_sweep
from trainrun.sweep.options import AUTO, SweepOptions, read_options, split_options, translate_hydra_words
from trainrun.sweep.places.leases import (
    DevicePlace,
    Leases,
    core_numbers,
    find_places,
    gpu_names,
    most_devices,
)
from trainrun.sweep.points import best_job
from trainrun.sweep.progress import SweepProgress
from trainrun.sweep.results import Job
from trainrun.sweep.search.study import SweepStudy
from trainrun.sweep.space import (
    explain_fraction,
    list_overrides_to_check,
    list_points,
    num_points,
    parse_dimensions,
    split_branch,
    split_branches,
)
from trainrun.sweep.table import MEANS, jobs_csv, points_csv, print_tables, repeated_keys, sweep_facts

POINT_KEYS = ("sweep", "sweep.seed", "sweep.sampler", "sweep.objective")
ENDED = ("done", "pruned")  # states of jobs that are not started again
PARALLEL_WORDS = ("parallel", "experiment", "preset", "--")  # that may say how many devices a job needs


def sweep_command(prepared: CommandLine, sweep_words: list[str]) -> int:
    """Run the sweep of a command line. Raise ConfigError for mistakes of any job, before the first one starts."""
    words, folder = check_sweep(prepared, sweep_words)
    return run_sweep([words], folder)


def check_sweep(prepared: CommandLine, sweep_words: list[str]) -> tuple[list[str], Path | None]:
    """Return the settings of a sweep and its folder, None for a new one. Raise ConfigError for mistakes of any job.

    sweep_words: settings of the sweep itself, also by Hydra's names, and overrides that hold for one of its branches.
    """
    branches, own = split_branches(sweep_words)
    options, notes = translate_hydra_words(own)
    for note in [*prepared.notes, *notes]:
        say(f"note: {note}", file=sys.stderr)
    words = [*[f"--config-dir={folder}" for folder in prepared.config_dirs], *prepared.overrides]
    words += [word for branch in branches for word in translate_branch(branch)] + options
    named = [prepared.own[key] for key in OWN_KEYS if key in prepared.own]
    if len(named) > 1:
        raise ConfigError(
            f"output_dir={named[0]} and hydra.sweep.dir={named[1]}: two folders for one sweep; leave one of them out"
        )
    check_words([words])
    return words, Path(named[0]) if named else None


def translate_branch(word: str) -> list[str]:
    """Translate condition and setting of a branch as if both were typed on a command line. Return one or more
    overrides.
    """
    condition, setting = split_branch(word)
    conditions, settings = (
        prepare_command_line(["--multirun", part], Path.cwd())[0].overrides for part in (condition, setting)
    )
    if len(conditions) == 1:  # else an own class, which is a value of the sweep as it was typed
        condition = conditions[0]
    return [f"{condition}: {setting}" for setting in settings]


def resume_sweep(folder: Path, trust: bool, options: list[str]) -> int:
    """Run the unfinished jobs of a sweep with the settings of its earlier calls. Raise ConfigError.

    options: settings of the sweep that replace earlier ones, such as sweep.jobs=2.
    """
    calls = [replace_options(words, options) for words in load_calls(folder, trust)]
    kinds = [read_options(split_options(words)[0]).kind for words in calls]
    if set(kinds) == {"grid"}:
        read_options(options)  # raises for settings of points that a grid has not
    check_words(calls)
    return run_sweep(calls, folder)


def replace_options(words: list[str], options: list[str]) -> list[str]:
    """Replace settings of the sweep in the overrides of a call. Raise ConfigError if its points would change."""
    own, job_overrides = split_options(words)
    values = {word.partition("=")[0]: word for word in own}
    is_grid = read_options(own).kind == "grid"
    for word in options:
        key = word.partition("=")[0]
        if key in POINT_KEYS:
            raise ConfigError(
                f"{word}: would choose other points, but a sweep continues with its own points. Repeat all its settings"
            )
        if not (is_grid and key == "sweep.trials"):
            values[key] = word
    return [*job_overrides, *values.values()]


def check_words(calls: list[list[str]]) -> None:
    """Compose a config with each value of each setting. Raise ConfigError with all mistakes."""
    seen: set[str] = set()
    faults: dict[str, None] = {}
    for words in calls:
        for job in list_overrides_to_check(words):
            if seen.issuperset(job):
                continue
            seen.update(job)
            try:
                compose_run(list(job))
            except ConfigError as error:
                faults.update(dict.fromkeys(explain_fraction(fault, words) for fault in error.faults))
    if faults:
        raise ConfigError(*faults)
    for words in calls:
        options = read_options(split_options(words)[0])
        if options.pruner != "none":
            check_validation(list_overrides_to_check(words)[0], options)


def run_sweep(calls: list[list[str]], folder: Path | None, command: Command = job_command) -> int:
    """Run all jobs of the command lines, and return the exit code. Raise ConfigError for mistakes.

    folder: of the sweep; None for a new one below `sweeps/`. Tables and page are written at the end, also after an
    interruption. If every job of a new sweep was refused, no folder is left.
    """
    options = read_options(split_options(calls[-1])[0])
    relay = StopRelay(writes=False)
    folder = None if folder is None else resolve_folder(str(folder))
    is_new = folder is None or not folder.exists()
    with join_sweep(calls, folder) as sweep, catch_stops(relay.handle):
        forks = command is job_command and can_fork(sweep, options)
        if forks:
            import_what_jobs_need()
        num_jobs, devices_of = sweep.num_jobs, build_device_counter()
        places, about = choose_job_places(sweep, options, devices_of, forks)
        check_devices(calls, options, places, devices_of)
        study = SweepStudy(sweep, options) if sweep.search or options.pruner != "none" else None
        sweep.retry_jobs(options.revive)
        notes = [*describe_excess_trials(calls), *describe_pruner(sweep, options, max(len(places), 1))]
        for note in notes:
            say(f"note: {note}", file=sys.stderr)
        jobs = format_count(num_jobs, "job") if num_jobs else "jobs"
        say(f"sweep: {jobs} in {sweep.folder}{about and f', {about}'}", flush=True)
        progress = SweepProgress(sweep, max(len(places), 1))
        until = None if options.max_seconds is None else time.monotonic() + options.max_seconds
        queue = JobQueue(
            sweep, None if forks else command, relay, progress, Leases(places) if places else None,
            devices_of, until, options.objective, study,
        )  # fmt: skip
        try:
            queue.run()
        except OSError as error:
            if not error.filename:  # of a pipe that was closed
                raise
            raise build_disk_error(sweep.folder, error) from error
        finally:
            progress.close()
            if (why := sweep.reason_search_ended()) and why not in " ".join(notes):
                say(f"sweep=optuna: {why}", flush=True)
            all_refused = is_new and bool(sweep.wanted) and queue.refused == set(sweep.wanted)
            if not all_refused and has_begun(sweep):
                write_tables(sweep)
            report_result(**sweep_facts(sweep))
    if all_refused:
        remove_refused_sweep(sweep)
    if queue.fault:
        raise ConfigError(queue.fault)
    if queue.out_of_time:
        say(f"sweep.max_time: the time of this call is over after {options.max_seconds:g} s", flush=True)
        return EXIT_AGAIN
    if relay.number:
        if not sweep.folder.exists():
            say("stopped before the first job; no folder is left", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED if relay.number == signal.SIGINT else EXIT_AGAIN
    done = all(sweep.jobs[num].result.state in ENDED for num in sweep.wanted)
    return EXIT_DONE if done else EXIT_FAILED


def check_validation(words: Sequence[str], options: SweepOptions) -> None:
    """Raise ConfigError if jobs do not validate, so that a pruner could not compare them."""
    config = compose_run(list(words)).config
    if config.trainer.limit_val_batches == 0 or not (validation_nodes(config.data) or config.data.folds):
        raise ConfigError(
            f"sweep.pruner={options.pruner}: compares validations, but the jobs have no validation data; set data.val"
        )


def describe_excess_trials(calls: list[list[str]]) -> list[str]:
    """Return a note for each call with a sweep.trials larger than the number of points of its space."""
    notes = []
    for words in calls:
        own, job_overrides = split_options(words)
        options = read_options(own)
        trials, total = options.trials, num_points(parse_dimensions(job_overrides))
        if options.kind == "random" and total is None:
            total = len(list_points(words))  # of an interval with few numbers
        if trials is not None and total is not None and trials > total:
            notes.append(
                f"sweep.trials={trials}: the space has {format_count(total, 'point')}, and no other is trained"
            )
    return notes


def describe_pruner(sweep: Sweep, options: SweepOptions, num_places: int) -> list[str]:
    """Return a note if the jobs of a point cannot run side by side, so that a pruner judges it late."""
    num_jobs = sweep.max_jobs_per_point
    if options.pruner == "none" or num_jobs <= num_places:
        return []
    return [
        f"sweep.pruner={options.pruner}: judges a point by the mean over its {num_jobs} jobs, and "
        f"{format_count(num_places, 'job')} at a time can run; with sweep.jobs={num_jobs} it is judged sooner"
    ]


def build_disk_error(folder: Path, error: OSError) -> SaveError:
    """Return the error that a file of a sweep cannot be written, with the command that continues the sweep."""
    return SaveError(
        f"{error.filename}: {error.strerror}; {FULL.get(error.errno or 0, 'make it writable')}, then: "
        f"trainrun resume {format_path_to_paste(folder)}"
    )


def write_tables(sweep: Sweep) -> None:
    """Print the tables, write them and the page, and print their paths and the commands to continue."""
    print_tables(sweep)
    write_table("table", sweep.folder / "sweep.csv", jobs_csv(sweep))
    if repeated_keys(sweep):
        write_table("means", sweep.folder / MEANS, points_csv(sweep.points()))
    best = best_job(sweep.points())
    if best is not None:
        from trainrun.sweep.sweep_page import PAGE, build_page, describe_best, format_longer_command

        write_table("page", sweep.folder / PAGE, build_page(sweep))
        say(f"best: {describe_best(sweep.points()[0], best)}")
        if best.result.state == "done":
            say(f"train the best longer: {format_longer_command(sweep, best)}")
    if any(sweep.jobs[num].result.state not in ENDED for num in sweep.wanted) or sweep.num_jobs > len(
        sweep.wanted
    ):
        say(f"not finished; to continue: trainrun resume {format_path_to_paste(sweep.folder)}", flush=True)


def write_table(name: str, path: Path, text: str) -> None:
    """Write a file of tables, and print its path, or why it cannot be written."""
    try:
        write_text(path, text)
        say(f"{name}: {path}")
    except OSError as error:
        say(f"{name}: {path} cannot be written ({error.strerror})")


def has_begun(sweep: Sweep) -> bool:
    """Return whether a job has started."""
    return any((sweep.folder / job.folder).is_dir() for job in sweep.jobs.values())


def remove_refused_sweep(sweep: Sweep) -> None:
    """Remove the folder of a sweep whose jobs were all refused. Raise ConfigError with their mistakes."""
    remove_new_sweep(sweep)
    raise ConfigError(*dict.fromkeys(sweep.jobs[num].result.error for num in sweep.wanted))


def remove_new_sweep(sweep: Sweep) -> None:
    """Remove the folder of a sweep in which nothing was trained, unless it has other workers."""
    with sweep.locks.register_worker() as is_alone:
        if is_alone:
            remove_new_folder(sweep.folder, "sweeps")


def build_device_counter() -> Callable[[Job], int]:
    """Return a function that returns how many devices a job needs. Equal overrides are composed once."""

    @cache
    def devices(words: tuple[str, ...]) -> int:
        parallel = compose_run(list(words)).config.parallel
        return choose_num_devices(parallel.mode, parallel.accelerator, parallel.devices)[0]

    return lambda job: devices(tuple(word for word in job.words if word.startswith(PARALLEL_WORDS)))


def check_devices(
    calls: list[list[str]],
    options: SweepOptions,
    places: Sequence[DevicePlace],
    devices_of: Callable[[Job], int],
) -> None:
    """Raise ConfigError if a job needs more devices than one job can have. places: empty for the whole machine."""
    for words in itertools.chain.from_iterable(map(list_overrides_to_check, calls)) if places else ():
        count, most = devices_of(Job(0, words, "")), most_devices(places)
        if count > most:
            raise ConfigError(
                f"sweep.jobs={options.jobs or AUTO}: a job on {count} devices needs as many places, and "
                f"there are {most}; set sweep.jobs={count}, or fewer parallel.devices"
            )


def choose_job_places(
    sweep: Sweep, options: SweepOptions, devices_of: Callable[[Job], int], forks: bool
) -> tuple[list[DevicePlace], str]:
    """Choose the places of the jobs of a sweep. Return them and the reason. forks: whether jobs are forks."""
    if (options.jobs, options.per_device) == (1, 1):
        return [], ""
    words = sweep.first_overrides()
    most_jobs = None if sweep.num_points_left is None else sweep.num_jobs
    measure = None
    if forks:
        num_threads, cores = compose_run(list(words)).config.trainer.num_threads, core_numbers()
        if num_threads != AUTO:
            most_jobs = min(most_jobs or len(cores), max(len(cores) // num_threads, 1))
        elif devices_of(Job(0, words, "")) == 1:
            measure = partial(measure_thread_gain, words)
    return find_places(options, most_jobs, uses_gpus(sweep), measure)


def measure_thread_gain(words: Sequence[str], cores: Sequence[int]) -> float | None:
    """Measure how much two jobs of one thread train, relative to one job of two; print a note if that fails."""
    from trainrun.sweep.places.thread_trial import measure_gain

    try:
        return measure_gain(words, cores)
    except TrainrunError as error:
        say(f"note: sweep.jobs=auto: jobs of one and two threads are not compared ({error})", file=sys.stderr)
        return None


def uses_gpus(sweep: Sweep) -> bool:
    """Return whether the first job may compute on a GPU."""
    words = [word for word in sweep.first_overrides() if word.startswith(PARALLEL_WORDS)]
    return compose_run(words).config.parallel.accelerator in ("auto", "cuda")


def can_fork(sweep: Sweep, options: SweepOptions) -> bool:
    """Return whether jobs can be forks: on Linux, several jobs, without GPUs and without a sampler that uses torch."""
    computes = bool(sweep.search) and options.sampler == "gp"
    is_alone = sweep.num_jobs == 1
    return sys.platform == "linux" and not (computes or is_alone or (uses_gpus(sweep) and gpu_names()))


@contextlib.contextmanager
def join_sweep(calls: list[list[str]], folder: Path | None) -> Iterator[Sweep]:
    """Open a sweep and work on it inside the block. If no job of a new sweep has started, its folder is removed."""
    is_new = folder is None or not folder.exists()
    if folder is not None and is_run_folder(RunDir(folder)):
        raise ConfigError(f"output_dir={folder}: already contains a run; name another folder for the sweep")
    sweep = open_sweep(calls, folder)
    try:
        with sweep.register_worker():
            yield sweep
    finally:
        if is_new and not has_begun(sweep):
            remove_new_sweep(sweep)
