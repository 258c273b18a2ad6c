"""The folder of a conversion: the complete files, a journal `convert.json`, and a lock for one writer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainrun.errors import ConfigError, DataError
from trainrun.folder.run_folder import read_json, sync_path, write_json

NAME, ENDING = "convert.json", ".tmp"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Journal:
    """The content of `convert.json`. arguments: the arguments that change the content of the folder. identity: of the
    source.

    use: the settings with which a run reads the folder, where {dest} stands for its path. use_test: the settings of the
        test data. files: the sizes of the complete files by name.
    """

    arguments: list[str]
    identity: str
    complete: bool = False
    use: list[str] = field(default_factory=list)
    use_test: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)

    def write(self, dest: Path) -> None:
        write_json(dest / NAME, asdict(self), durable=True)


def read_journal(dest: Path) -> Journal | None:
    """Return the journal of a folder, or None. Raise ConfigError if it cannot be read."""
    try:
        return Journal(**read_json(dest / NAME))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        way = "delete the folder, or name another one"
        raise ConfigError(f"{dest}: its {NAME} cannot be read ({error}); {way}") from error


def check_folder(dest: Path, arguments: list[str]) -> Journal | None:
    """Return the journal of a conversion to continue; None for a new conversion.

    Raise ConfigError if the folder contains something else.
    """
    if not dest.exists():
        return None
    if not dest.is_dir():
        raise ConfigError(f"{dest}: this is a file; DEST is a folder that does not exist")
    journal = read_journal(dest)
    if journal is None:
        others = sorted(item.name for item in dest.iterdir() if not item.name.startswith(f".{NAME}."))
        if others:
            raise ConfigError(
                f"{dest}: exists and is no conversion of trainrun's (it has {others[0]}); name a folder that "
                "does not exist"
            )
    elif journal.arguments != arguments:
        state = "a finished" if journal.complete else "an unfinished"
        raise ConfigError(
            f"{dest}: holds {state} conversion with other arguments: {' '.join(journal.arguments)}; use those, "
            "name another folder, or delete it"
        )
    return journal


@contextmanager
def lock_conversion(dest: Path) -> Iterator[None]:
    """Create the folder and lock it against other conversions. Raise ConfigError if it is locked.

    The lock is released when its process ends, in any way.
    """
    import fcntl  # not on Windows

    with open_for_writing(dest):
        dest.mkdir(parents=True, exist_ok=True)
        folder = os.open(dest, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network folders have no locks: no two are kept apart there
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{dest}: another conversion writes to it; wait until it is done, or name another folder"
                ) from error
        yield
    finally:
        with suppress(OSError):  # not empty, as it should be
            dest.rmdir()
        os.close(folder)


def temporary_path(path: Path) -> Path:
    """Return the hidden temporary name of a file. Readers of data skip hidden files."""
    return path.with_name(f".{path.name}{ENDING}")


def publish_file(temporary: Path, path: Path) -> None:
    """Give a file its final name after its content is safely on disk."""
    sync_path(temporary)
    os.replace(temporary, path)
    sync_path(path.parent)


@contextmanager
def open_for_writing(dest: Path) -> Iterator[None]:
    """Turn an OSError of the block into a DataError with advice."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DataError(
                f"{dest}: no room is left ({os.strerror(error.errno or 0)}). Make room and run the same "
                "command again: it continues after the files that are written"
            ) from error
        name = f" ({error.filename})" if error.filename else ""
        raise DataError(f"{dest}: cannot write in it: {error.strerror or error}{name}") from error
