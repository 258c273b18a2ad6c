"""From words with several values to jobs with one value each, and what a sweep folder remembers of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import secrets
import shlex
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from trainrun.config.messages import explain_unreadable
from trainrun.errors import ConfigError
from trainrun.folder.named_run import BEST, SWEEP_FILE
from trainrun.folder.run_folder import cannot_write, read_json, write_json
from trainrun.folder.seal import check_files, digest_part, make_key
from trainrun.output import masked_words
from trainrun.sweep.points import SweepPoint, best_job, ranked_points
from trainrun.sweep.results import Job, Result

SEAL = "seal"  # in the file of a sweep: shows that this user wrote the words
NAME_LENGTH = 80  # of a folder: below the limit of every file system, and still readable


@dataclass
class Sweep:
    """All jobs that were ever asked for in `folder`, and the numbers of those that this call wants.

    working_dir: where the first call was typed, to which paths in its words may refer.
    """

    folder: Path
    calls: list[list[str]] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)
    working_dir: Path = field(default_factory=Path.cwd)

    def add_call(self, words: list[str]) -> None:
        """Want the jobs that the words make; those that are there already are the same jobs. Raise ConfigError."""
        combinations = expand(words)
        varied = varied_columns(combinations)
        known = {tuple(sorted(masked_words(job.words))): job.num for job in self.jobs.values()}
        for row in combinations:
            num = known.setdefault(tuple(sorted(masked_words(row))), len(self.jobs))
            name = file_name_of(masked_words([row[column] for column in varied] or row)) or "default"
            job = self.jobs.setdefault(num, Job(num, row, f"{num}-{name}"))
            if sorted(job.words) != sorted(row):  # its secrets are not in the file
                self.jobs[num] = replace(job, words=row)
            if num not in self.wanted:  # the same value twice is one job
                self.wanted.append(num)
        if masked_words(words) not in self.calls:
            self.calls.append(masked_words(words))

    def note(self, num: int, result: Result) -> None:
        """Keep the result of a job, on the disk too."""
        self.jobs[num] = replace(self.jobs[num], result=result)
        self.save()

    def save(self) -> None:
        jobs = [{**asdict(job), "words": masked_words(job.words)} for job in self.jobs.values()]
        best = best_job(self.points())
        write_json(self.folder / SWEEP_FILE, {
            "calls": self.calls, "working_dir": str(self.working_dir), SEAL: seal_of_words(self.calls),
            BEST: "" if best is None else best.folder, "jobs": jobs,
        })  # fmt: skip

    def swept_keys(self) -> list[str]:
        """Return the keys whose value differs between jobs, in the order in which they were written."""
        keys = dict.fromkeys(key for job in self.jobs.values() for key in job.settings)
        return [key for key in keys if len({job.settings.get(key) for job in self.jobs.values()}) > 1]

    def points(self) -> list[SweepPoint]:
        """Return the ways to train, the best first."""
        return ranked_points(list(self.jobs.values()), self.swept_keys())


def varied_columns(combinations: list[tuple[str, ...]]) -> list[int]:
    """Return the numbers of the words that are not the same in all combinations."""
    return [place for place, column in enumerate(zip(*combinations, strict=True)) if len(set(column)) > 1]


def open_sweep(calls: list[list[str]], folder: Path | None) -> Sweep:
    """Return the sweep in the folder, or a new one, with the jobs of these command lines. Raise ConfigError."""
    if folder is None:
        combinations = expand(calls[0])
        folder = new_folder(
            [combinations[0][column].partition("=")[0].lstrip("+") for column in varied_columns(combinations)]
        )
    folder = folder.expanduser().absolute()
    sweep = load_sweep(folder)
    for words in calls:
        sweep.add_call(words)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep.save()
    except OSError as error:
        raise cannot_write(folder, error) from error
    return sweep


def load_sweep(folder: Path) -> Sweep:
    """Return what earlier calls left in the folder; an empty sweep if there is none. Raise ConfigError."""
    path = folder / SWEEP_FILE
    if not path.exists():
        return Sweep(folder)
    try:
        saved: dict[str, Any] = read_json(path)
        jobs = [
            Job(job["num"], tuple(job["words"]), job["folder"], Result(**job["result"]))
            for job in saved["jobs"]
        ]
        check_files(folder, trust=False)
        for job in jobs:  # they are written to, and deleted where nothing was saved
            if not re.fullmatch(rf"{int(job.num)}-[A-Za-z0-9_.=+-]+", job.folder, re.ASCII):
                raise ValueError(f"{job.folder[:80]!r} is no folder of a job")
        working_dir = Path(saved.get("working_dir", Path.cwd()))
        return Sweep(folder, saved["calls"], {job.num: job for job in jobs}, working_dir=working_dir)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"output_dir={folder}: its {SWEEP_FILE} cannot be read ({error}); name another folder"
        ) from error


def calls_to_resume(folder: Path, trust: bool) -> list[list[str]]:
    """Return the command lines of a sweep, to be given again. Raise ConfigError if they cannot be.

    trust: they may have been written by somebody else. They name code to run.
    """
    sweep = load_sweep(folder)
    calls = sweep.calls
    if not trust and seal_of_words(calls) != read_json(folder / SWEEP_FILE).get(SEAL, ""):
        raise ConfigError(
            f"{folder}: may be from somebody else: you did not write its {SWEEP_FILE}. Its words can name any code; "
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


def seal_of_words(calls: list[list[str]]) -> str:
    """Return what only this user can write beside these words; empty if the user can have no key."""
    try:
        return digest_part(make_key(), "sweep", "calls", json.dumps(calls).encode())
    except OSError:
        return ""


def expand(words: list[str]) -> list[tuple[str, ...]]:
    """The words of every job; the first word with several values varies slowest. Raises ConfigError.

    Words that begin with a dash are flags, one word each, and the same for all jobs.
    """
    return list(itertools.product(*[[word] if word.startswith("-") else values_of(word) for word in words]))


def values_of(word: str) -> list[str]:
    """`lr=1,2` -> `lr=1`, `lr=2`; a word with one value stays as it was typed."""
    try:
        override: Override = OverridesParser.create().parse_override(word)
        if not override.is_sweep_override():
            return [word]
        if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
            raise ConfigError(
                f"{word}: a sweep takes names, not a pattern, as {override.key_or_group}=one,two"
            )
        if override.value_type is ValueType.INTERVAL_SWEEP:
            raise ConfigError(
                f"{word}: a sweep takes values, not an interval, as {override.key_or_group}=0.1,0.2"
            )
        values = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:
        raise ConfigError(explain_unreadable(word)) from error
    if not values:
        raise ConfigError(f"{word}: holds no value")
    if len(set(masked_words(values))) < len(set(values)):
        key = override.get_key_element()
        raise ConfigError(
            f"{key}=***: values of a secret would stand in the names of folders and in tables; put them into the "
            f"environment, as '{key}=${{oc.env:FIRST}},${{oc.env:SECOND}}'"
        )
    return values


def new_folder(keys: list[str]) -> Path:
    """A folder that no other sweep has, named after what is varied."""
    now = datetime.now()
    name = file_name_of(keys) if keys else "sweep"
    return Path("sweeps") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-{name}-{secrets.token_hex(4)}"


def file_name_of(words: list[str] | tuple[str, ...]) -> str:
    """The words as a file name; a long one is cut and ends in a hash of the whole."""
    text = re.sub(
        r"[^A-Za-z0-9_.=+-]+", "_", "-".join(word.replace('"', "").replace("'", "") for word in words)
    )
    longest = NAME_LENGTH - 6  # room for the number in front
    if len(text) <= longest:
        return text
    return f"{text[: longest - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
