"""From words with several values to jobs with one value each, and what a sweep folder remembers of them."""

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from trainrun.config.messages import explain_unreadable
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import read_json, write_json
from trainrun.folder.seal import check_files
from trainrun.output import masked_words
from trainrun.sweep.results import Result

NAME_LENGTH = 80  # of a folder: below the limit of every file system, and still readable


@dataclass(frozen=True)
class Job:
    """One point of a sweep. words: all that its command line gets; folder: its name inside the sweep's."""

    num: int
    words: tuple[str, ...]
    folder: str
    result: Result = field(default_factory=Result)

    @property
    def settings(self) -> dict[str, str]:
        """What the words set: key -> value, without the marks of the grammar."""
        pairs = [word.lstrip("+").partition("=") for word in self.words if not word.startswith("-")]
        return {key: value.strip("\"'") for key, _, value in pairs}

    def label(self, keys: list[str]) -> str:
        """What sets this job apart, given the keys that vary; all its words where none does."""
        settings = self.settings
        found = [f"{key}={settings[key]}" for key in keys if key in settings]
        return " ".join(found or masked_words(self.words))


@dataclass
class Sweep:
    """All jobs that were ever asked for in `folder`, and the numbers of those that this call wants."""

    folder: Path
    calls: list[list[str]]
    jobs: dict[int, Job]
    wanted: list[int]

    def note(self, num: int, result: Result) -> None:
        """Remember how a job stands, on the disk too."""
        self.jobs[num] = replace(self.jobs[num], result=result)
        self.save()

    def save(self) -> None:
        jobs = [{**asdict(job), "words": masked_words(job.words)} for job in self.jobs.values()]
        write_json(self.folder / "sweep.json", {"calls": self.calls, "jobs": jobs})

    def swept_keys(self) -> list[str]:
        """The keys whose value differs between jobs, in the order they were written."""
        keys = dict.fromkeys(key for job in self.jobs.values() for key in job.settings)
        return [key for key in keys if len({job.settings.get(key) for job in self.jobs.values()}) > 1]


def open_sweep(words: list[str], folder: Path | None) -> Sweep:
    """A new sweep, or one that goes on in its folder with these words. Raises ConfigError."""
    combinations = expand(words)
    varied = [place for place, column in enumerate(zip(*combinations, strict=True)) if len(set(column)) > 1]
    names = [
        file_name_of(masked_words([row[place] for place in varied] or row)) or "default"
        for row in combinations
    ]
    keys = [combinations[0][place].partition("=")[0].lstrip("+") for place in varied]
    folder = (folder or new_folder(keys)).expanduser().absolute()
    sweep = load_sweep(folder)
    known = {tuple(sorted(masked_words(job.words))): job.num for job in sweep.jobs.values()}
    for row, name in zip(combinations, names, strict=True):
        num = known.setdefault(tuple(sorted(masked_words(row))), len(sweep.jobs))
        job = sweep.jobs.setdefault(num, Job(num, row, f"{num}-{name}"))
        if sorted(job.words) != sorted(row):  # its secrets are not in the file
            sweep.jobs[num] = replace(job, words=row)
        if num not in sweep.wanted:  # the same value twice is one job
            sweep.wanted.append(num)
    if masked_words(words) not in sweep.calls:
        sweep.calls.append(masked_words(words))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep.save()
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder}: cannot write there ({error.strerror}); "
            "name another folder with output_dir=..."
        ) from error
    return sweep


def load_sweep(folder: Path) -> Sweep:
    """What an earlier call left in the folder; nothing where there is none."""
    path = folder / "sweep.json"
    if not path.exists():
        return Sweep(folder, [], {}, [])
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
        return Sweep(folder, saved["calls"], {job.num: job for job in jobs}, [])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"output_dir={folder}: its sweep.json cannot be read ({error}); name another folder"
        ) from error


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
