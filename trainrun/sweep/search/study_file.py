"""Store the study of a sweep in a journal in its folder, or in the Optuna storage of `sweep.storage`."""

from __future__ import annotations

import fcntl
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainrun.errors import ConfigError
from trainrun.folder.lock import open_locked_file
from trainrun.sweep.jobs import Sweep, file_version
from trainrun.sweep.options import hide_password

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage

JOURNAL = "study.log"  # in the folder of a sweep
NAME_IN_JOURNAL = "sweep"
GRPC = "grpc"  # scheme of the address of Optuna's proxy
GRPC_PORT = 13000
SERVER_SECONDS = 10  # for the proxy's server to answer


class FileLock:
    """A lock of the journal that is released when its process ends, unlike Optuna's own lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1

    def acquire(self) -> bool:
        descriptor = open_locked_file(self._path, fcntl.LOCK_EX)
        assert descriptor is not None  # it waits
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        os.close(self._descriptor)


class StudyFile:
    """The stored study of a sweep. url: the address of an Optuna storage; empty for the journal. name: the name of
    the study in it.

    Raise ConfigError for a storage that cannot be reached.
    """

    def __init__(self, sweep: Sweep, url: str) -> None:
        self._path, self._url = sweep.folder / JOURNAL, url
        self._shared = shared_storage(url) if url else None
        self.name = sweep.name if url else NAME_IN_JOURNAL

    def version(self) -> object:
        """Return a value that changes when another worker has replaced the study."""
        if self._shared is None:
            return file_version(self._path)[:1]
        try:
            return self._shared.get_study_id_from_name(self.name)
        except KeyError:
            return None

    def is_whole(self) -> bool:
        """Return whether the journal ends with a complete line. A killed worker may have left half a line."""
        if self._shared is not None:
            return True
        try:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                return file.read(1) == b"\n"
        except OSError:
            return False

    def read(self) -> tuple[Study, BaseStorage] | None:
        """Return the study and its storage; None if it does not exist or cannot be read."""
        import optuna

        if not self.is_whole():
            return None
        try:
            storage = self._shared or journal_storage(self._path)
            return optuna.load_study(study_name=self.name, storage=storage), storage
        except Exception:  # of a damaged file Optuna raises what the damage happens to make
            return None

    def write(self, source: BaseStorage) -> None:
        """Replace the stored study by the study of another storage."""
        import optuna

        if self._shared is not None:
            if self.version() is not None:
                optuna.delete_study(study_name=self.name, storage=self._shared)
            optuna.copy_study(from_study_name=self.name, from_storage=source, to_storage=self._shared)
            return
        temporary = self._path.with_name(f"{JOURNAL}.new")
        temporary.unlink(missing_ok=True)
        optuna.copy_study(
            from_study_name=self.name, from_storage=source, to_storage=journal_storage(temporary)
        )
        temporary.replace(self._path)


def journal_storage(path: Path) -> BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    lock: Any = FileLock(path.with_name(f"{JOURNAL}.lock"))  # as Optuna's own, which are of a private class
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def shared_storage(url: str) -> BaseStorage:
    """Return Optuna's proxy at `grpc://host:port`, or its storage in a database. Raise ConfigError."""
    import optuna

    address = urlsplit(url)
    shown = hide_password(f"sweep.storage={url}")
    try:
        if address.scheme != GRPC:
            return optuna.storages.RDBStorage(url)
        return proxy_storage(address.hostname or "localhost", address.port or GRPC_PORT)
    except ImportError as error:
        raise ConfigError(f"{shown}: needs a package that is not installed ({error})") from error
    except Exception as error:  # each database raises errors of its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{shown}: cannot be reached ({reason})") from error


def proxy_storage(host: str, port: int) -> BaseStorage:
    """Return Optuna's proxy of a storage, once its server answers."""
    from optuna.exceptions import ExperimentalWarning
    from optuna.storages import GrpcStorageProxy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # the user chose it by the address
        storage = GrpcStorageProxy(host=host, port=port)
    storage.wait_server_ready(timeout=SERVER_SECONDS)
    return storage
