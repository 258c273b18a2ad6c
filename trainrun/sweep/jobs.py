"""The jobs of a sweep, and the file in its folder that stores them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainrun.errors import ConfigError
from trainrun.folder.run_folder import build_folder_error, read_json, write_json
from trainrun.folder.seal import check_files, digest_part, find_key_path, make_key
from trainrun.folder.status import BEST, SWEEP_FILE
from trainrun.output import format_count, mask_arguments
from trainrun.sweep.options import hide_password, read_options, split_options
from trainrun.sweep.places.sweep_locks import SweepLocks
from trainrun.sweep.points import REPEATED, SweepPoint, best_job, ranked_points
from trainrun.sweep.results import Job, Result, format_short_numbers, parse_number
from trainrun.sweep.space import (
    Dimension,
    build_point,
    list_point_jobs,
    list_points,
    num_points,
    parse_dimensions,
    read_override_key,
    varied_keys,
)

SEAL = "seal"  # in the file of a sweep: shows that this user wrote the words
MOST_REPEATED = 100  # points that a search asks for one after the other, and that it had before
LOG_RANGE = 10  # a decade crowds the small values of a linear axis
NAME_LENGTH = 80  # of a folder: below the limit of every file system, and still readable


@dataclass
class Sweep:
    """All jobs of the sweep in `folder`, and the numbers of the jobs of this call (`wanted`).

    trials: the job numbers of each point, in the order in which the points were created. search: the settings of a
        `sweep=optuna`. working_dir: the directory of the first call, to which paths in settings are relative. name:
        the name of the Optuna study. session: how often a first worker has started. Other workers may write the
        file at any time, so every change of the sweep is made inside `lock_exclusively`.
    """

    folder: Path
    calls: list[list[str]] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)
    trials: list[list[int]] = field(default_factory=list)
    search: list[str] = field(default_factory=list)
    working_dir: Path = field(default_factory=Path.cwd)
    name: str = ""
    session: int = 0
    typed: dict[str, str] = field(default_factory=dict)  # words with secrets, which the file has not
    seal: str = ""  # of the file, when it was read
    has_other_key: bool = False  # whether it was written with the key of another user or machine
    is_locked: bool = False
    version: tuple[int, ...] = ()  # of the file, when it was read or written

    @property
    def locks(self) -> SweepLocks:
        return SweepLocks(self.folder)

    @contextmanager
    def lock_exclusively(self) -> Iterator[None]:
        """Lock the file of the sweep inside the block, after reading what other workers wrote."""
        if self.is_locked:
            yield
            return
        with self.locks.lock_file():
            self.refresh()
            self.is_locked = True
            try:
                yield
            finally:
                self.is_locked = False

    def refresh(self) -> None:
        """Read the file again if another worker has written it since."""
        if file_version(self.folder / SWEEP_FILE) == self.version:
            return
        saved = read_sweep(self.folder) if self.version else load_sweep(self.folder)
        if not self.version:
            self.has_other_key = saved.seal != sign_overrides(saved.calls)
        self.calls, self.trials, self.working_dir = saved.calls, saved.trials, saved.working_dir
        self.name, self.session = saved.name, saved.session
        self.version = saved.version
        for job in saved.jobs.values():
            known = self.jobs.get(job.num)
            words = known.words if known else tuple(self.typed.get(word, word) for word in job.words)
            self.jobs[job.num] = replace(job, words=words)
        self._queue_search_points()

    @contextmanager
    def register_worker(self) -> Iterator[None]:
        """Register this process as a worker of the sweep inside the block. The first worker retries failed jobs."""
        with ExitStack() as closing:
            with self.lock_exclusively():
                if closing.enter_context(self.locks.register_worker()):
                    self.session += 1
                    self.save()
                elif self.has_other_key:
                    raise ConfigError(
                        f"output_dir={self.folder}: its workers have another key, so they cannot continue each "
                        f"other's jobs; copy the key of the first machine to {find_key_path()} here"
                    )
            yield

    def has_ended(self, job: Job) -> bool:
        """Return whether no worker has to start this job: it is done, pruned, or failed in this session."""
        failed_now = job.result.state == "failed" and job.session == self.session
        return job.result.state in ("done", "pruned") or failed_now

    def add_call(self, words: list[str]) -> None:
        """Add the jobs of these settings. Jobs that the sweep has already are not added twice. Raise ConfigError."""
        options, job_overrides = read_options(split_options(words)[0]), split_options(words)[1]
        dimensions = parse_dimensions(job_overrides)
        call = [hide_password(word) for word in mask_arguments(words)]
        others = [other for other in self.calls if build_call_key(other) != build_call_key(call)]
        searches = [other for other in [*others, call] if build_call_key(other)[0] == "optuna"]
        if others and searches:
            raise ConfigError(
                f"output_dir={self.folder}: contains a sweep with other settings; choose another folder"
            )
        self.calls = [*others, call]
        if options.kind == "optuna":
            self.search = words
            self.typed = dict(zip(mask_arguments(job_overrides), job_overrides, strict=True))
            self._queue_search_points()
        for point in list_points(words):
            self.add_point(dimensions, point)

    def add_point(self, dimensions: Sequence[Dimension], rows: Sequence[tuple[str, ...]]) -> list[int]:
        """Add the jobs of a point, and return their numbers."""
        varied = varied_keys(dimensions)
        numbers: list[int] = []
        known = {tuple(sorted(mask_arguments(job.words))): job.num for job in self.jobs.values()}
        for row in rows:
            num = known.setdefault(tuple(sorted(mask_arguments(row))), len(self.jobs))
            words = [word for word in row if read_override_key(word) in varied]
            words = words or [word for word in row if not word.startswith("-")][:1]
            name = format_file_name(mask_arguments(words)) or "default"
            job = self.jobs.setdefault(num, Job(num, row, f"{num}-{name}"))
            if sorted(job.words) != sorted(row):  # its secrets are not in the file
                self.jobs[num] = replace(job, words=row)
            self._queue_jobs(num)
            if num not in numbers:  # the same value twice is one job
                numbers.append(num)
        if self.search or numbers not in self.trials:
            self.trials.append(numbers)
        return numbers

    def retry_jobs(self, count: int) -> None:
        """Let the best pruned points continue. count: their number, over all calls together."""
        with self.lock_exclusively():
            points = [point for point in self.points() if any(job.revived for job in point.jobs)]
            pruned = [point for point in self.points() if point.jobs[0].result.state == "pruned"]
            for point in pruned[: max(count - len(points), 0)]:
                for job in point.jobs:
                    if job.result.state == "pruned":
                        stopped = replace(job.result, state="stopped")
                        self.jobs[job.num] = replace(job, result=stopped, revived=True)
            self.save()

    def _queue_search_points(self) -> None:
        for num in itertools.chain.from_iterable(self.trials if self.search else ()):
            job = self.jobs[num]
            self.jobs[num] = replace(job, words=tuple(self.typed.get(word, word) for word in job.words))
            self._queue_jobs(num)

    def _queue_jobs(self, num: int) -> None:
        if num not in self.wanted:
            self.wanted.append(num)

    def shuffle_job_numbers(self, jobs: Sequence[int]) -> list[int]:
        """Return the numbers of jobs, ordered by a fixed random order of their points."""
        order = list(range(len(self.trials)))
        random.Random(0).shuffle(order)
        in_order = [num for number in order for num in self.trials[number] if num in jobs]
        return list(dict.fromkeys([*in_order, *jobs]))

    @property
    def num_jobs(self) -> int:
        """The number of jobs of this call, including the jobs that a search has not created yet."""
        return len(self.wanted) + (self.num_points_left or 0) * self.max_jobs_per_point

    @property
    def max_jobs_per_point(self) -> int:
        """Return the largest number of jobs of a point. The jobs of a point differ only in seed or fold."""
        if not self.search:
            return max(map(len, self.trials), default=1)
        dimensions = self.dimensions()
        return len(list_point_jobs(dimensions, [one.word for one in dimensions if one.key in REPEATED]))

    @property
    def num_points_left(self) -> int | None:
        """Return the number of points that a search will still create; None if only the time limit ends the search."""
        if not self.search or self.is_stuck:
            return 0
        trials, total = read_options(split_options(self.search)[0]).trials, num_points(self.dimensions())
        left = [] if trials is None else [trials - len(self.trials)]
        left += [] if total is None else [total - len(set(map(tuple, self.trials)))]
        return max(min(left), 0) if left else None

    @property
    def is_stuck(self) -> bool:
        """Whether the last points of a search were all repetitions of earlier ones."""
        earlier = set(map(tuple, self.trials[:-MOST_REPEATED]))
        return bool(earlier) and earlier.issuperset(map(tuple, self.trials))

    def reason_search_ended(self) -> str:
        """Return why a search ended before `sweep.trials` points; empty if it did not."""
        trials, total = read_options(split_options(self.search)[0]).trials, num_points(self.dimensions())
        if not self.search or self.num_points_left != 0 or (trials and len(self.trials) >= trials):
            return ""
        if self.is_stuck:
            return f"no other point in {format_count(MOST_REPEATED, 'ask')}"
        return f"the space has {format_count(total or 0, 'point')}, and no other is trained"

    def dimensions(self) -> list[Dimension]:
        """Return the space of a search."""
        return parse_dimensions(split_options(self.search)[1])

    def first_overrides(self) -> tuple[str, ...]:
        """Return the settings of the first job. For a search without jobs, return those of a typical job."""
        if self.wanted:
            return self.jobs[self.wanted[0]].words
        return build_point(self.dimensions(), lambda dimension: dimension.values_to_check[0])

    def note(self, num: int, result: Result) -> None:
        """Set the result of a job, and write the file."""
        with self.lock_exclusively():
            self.jobs[num] = replace(self.jobs[num], result=result, session=self.session)
            self.save()

    def save(self) -> None:
        jobs = [
            {**vars(job), "words": mask_arguments(job.words), "result": vars(job.result)}
            for job in self.jobs.values()
        ]
        best = best_job(self.points())
        write_json(self.folder / SWEEP_FILE, {
            "calls": self.calls, "working_dir": str(self.working_dir), SEAL: sign_overrides(self.calls),
            BEST: "" if best is None else best.folder, "jobs": jobs, "trials": self.trials,
            "name": self.name, "session": self.session,
        })  # fmt: skip
        self.version = file_version(self.folder / SWEEP_FILE)

    def swept_keys(self) -> list[str]:
        """Return the keys whose value differs between jobs, in the order in which they were written."""
        keys = dict.fromkeys(key for job in self.jobs.values() for key in job.settings)
        return [key for key in keys if len({job.settings.get(key) for job in self.jobs.values()}) > 1]

    def is_logarithmic(self, key: str) -> bool:
        """Return whether a setting needs a logarithmic axis: its interval is logarithmic, or it spans a decade."""
        for words in self.calls:
            for dimension in parse_dimensions(split_options(words)[1]):
                if dimension.key == key and dimension.interval is not None:
                    return dimension.interval.log
        values = [parse_number(job.settings[key]) for job in self.jobs.values() if key in job.settings]
        numbers = [value for value in values if value is not None]
        return len(numbers) == len(values) and min(numbers) > 0 and max(numbers) >= LOG_RANGE * min(numbers)

    def points(self) -> list[SweepPoint]:
        """Return the points of the sweep, the best first."""
        return ranked_points(list(self.jobs.values()), self.swept_keys())


def open_sweep(calls: list[list[str]], folder: Path | None) -> Sweep:
    """Return the sweep in the folder, or a new one, with the jobs of these command lines. Raise ConfigError."""
    if folder is None:
        folder = choose_sweep_folder(calls[0])
    folder = folder.expanduser().absolute()
    sweep = Sweep(folder, name=f"{folder.name}-{secrets.token_hex(4)}")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with sweep.lock_exclusively():
            for words in calls:
                sweep.add_call(words)
            sweep.save()
    except OSError as error:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise build_folder_error(folder, error) from error
    return sweep


def load_sweep(folder: Path) -> Sweep:
    """Return the sweep that earlier calls stored in the folder; an empty sweep if there is none. Raise ConfigError."""
    if (folder / SWEEP_FILE).exists():
        check_files(folder, trust=False)
    return read_sweep(folder)


def read_sweep(folder: Path) -> Sweep:
    """Read the file of a sweep without the check that its folder holds only plain files. Raise ConfigError."""
    path = folder / SWEEP_FILE
    version = file_version(path)
    if not version:
        return Sweep(folder)
    try:
        saved: dict[str, Any] = read_json(path)
        jobs = [
            Job(
                job["num"],
                tuple(job["words"]),
                job["folder"],
                Result(**job["result"]),
                job.get("revived", False),
                job.get("session", 0),
            )
            for job in saved["jobs"]
        ]
        for job in jobs:  # they are written to, and deleted where nothing was saved
            if not re.fullmatch(rf"{int(job.num)}-[A-Za-z0-9_.=+-]+", job.folder, re.ASCII):
                raise ValueError(f"{job.folder[:80]!r} is no folder of a job")
        working_dir = Path(saved.get("working_dir", Path.cwd()))
        trials = [[int(num) for num in numbers] for numbers in saved.get("trials", [])]
        known = {job.num: job for job in jobs}
        if not known.keys() >= set(itertools.chain.from_iterable(trials)):
            raise ValueError("a point has a job that is not there")
        name, session = str(saved.get("name", folder.name)), int(saved.get("session", 0))
        return Sweep(
            folder, saved["calls"], known, trials=trials, working_dir=working_dir, name=name, session=session,
            seal=str(saved.get(SEAL, "")), version=version,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"output_dir={folder}: its {SWEEP_FILE} cannot be read ({error}); name another folder"
        ) from error


def file_version(path: Path) -> tuple[int, ...]:
    """Return inode, time and size of a file, which differ after each write; empty if there is no file.

    The file is opened, because network file systems cache names and times for seconds until a file is opened.
    """
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
    except FileNotFoundError:
        return ()
    return about.st_ino, about.st_mtime_ns, about.st_size


def build_call_key(words: list[str]) -> tuple[Any, ...]:
    """Return a key that is equal for two calls which create the same jobs: kind, settings of the jobs, and seed."""
    own, job_overrides = split_options(words)
    options = read_options(own)
    about = {"grid": (), "random": (options.seed,), "optuna": (options.seed, options.objective)}
    return options.kind, tuple(job_overrides), about[options.kind]


def load_calls(folder: Path, trust: bool) -> list[list[str]]:
    """Return the command lines with which a sweep was started. Raise ConfigError if they cannot be run again.

    trust: accept command lines that another user may have written; they can name any code.
    """
    sweep = load_sweep(folder)
    calls = sweep.calls
    if not trust and sign_overrides(calls) != sweep.seal:
        raise ConfigError(
            f"{folder}: may belong to somebody else: you did not write its {SWEEP_FILE}. Its words can name any code; "
            "if you trust them, add --trust"
        )
    if any("***" in word for words in calls for word in words):
        raise ConfigError(
            f"{folder}: secrets are not saved with a sweep; give its words again, with output_dir={folder}"
        )
    if sweep.working_dir != Path.cwd() and sweep.working_dir.is_dir():
        raise ConfigError(
            f"{folder}: was begun in another directory, to which its words may refer; use: "
            f"cd {shlex.quote(str(sweep.working_dir))} && trainrun resume {shlex.quote(str(folder))}"
        )
    return calls


def sign_overrides(calls: list[list[str]]) -> str:
    """Return a signature of the settings by the key of this user; empty if no key can be created."""
    try:
        return digest_part(make_key(), "sweep", "calls", json.dumps(calls).encode())
    except OSError:
        return ""


def choose_sweep_folder(words: list[str]) -> Path:
    """Return the path of a folder for a new sweep with these settings, named after those that vary."""
    keys = varied_keys(parse_dimensions(split_options(words)[1]))
    now = datetime.now()
    name = format_file_name(keys) if keys else "sweep"
    return Path("sweeps") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{name}-{secrets.token_hex(4)}"


def format_file_name(words: list[str] | tuple[str, ...]) -> str:
    """Return settings as a file name. A long name is cut and ends with a hash of the whole."""
    text = re.sub(
        r"[^A-Za-z0-9_.=+-]+",
        "_",
        "-".join(format_short_numbers(word).replace('"', "").replace("'", "") for word in words),
    )
    longest = NAME_LENGTH - 6  # room for the number in front
    if len(text) <= longest:
        return text
    return f"{text[: longest - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
