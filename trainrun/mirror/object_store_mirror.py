"""Checkpoints in an object store, beside those on the disk: `checkpoint.mirror=s3://bucket/run`.

    URL/step-00000042/run/config.yaml, RUN.json, metrics.jsonl, ...     what a resume on another machine needs
    URL/step-00000042/run.json                                          their sizes and SHA-256
    URL/step-00000042/state.json, shared.safetensors, ...
    URL/step-00000042/MANIFEST.json                                     the last, and the first to be removed

Stores have no rename of folders, so the manifest is the commit: a step without a manifest does not exist. A thread of
rank 0 uploads; the training never waits for it. A new checkpoint replaces one that waits for its upload. A failure is
reported once, and the next checkpoint is tried again. Source: Check-N-Run (Eisenman et al., NSDI 2022) decouples the
upload from the training in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainrun.checkpoint.files import (
    PIECE_BYTES,
    FileDigest,
    format_folder_name,
    list_committed_steps,
    parse_step,
)
from trainrun.checkpoint.load import BEST, parse_manifest, read_manifest
from trainrun.checkpoint.save import MANIFEST
from trainrun.errors import CheckpointError, ConfigError
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.runtime.object_store import open_object_store

KEY = "checkpoint.mirror"
RUN_FILES = "run.json"  # names, sizes and hashes of the files below `run/`
LONGEST_SILENCE_SECONDS = 30.0  # of an upload without progress, at the end of a run
# Values that are named like a secret (.secrets.json) stay on this machine.
MIRRORED = (
    "config.yaml", "overrides.txt", "RUN.json", "environment.json", "changes.diff", "tokenizer.json", "metrics.jsonl",
    "status.json",
)  # fmt: skip


class HeldFile(NamedTuple):
    """A file that can be read to its end even if it is removed meanwhile."""

    file: BinaryIO
    size: int


class Upload(NamedTuple):
    """A checkpoint that is to be uploaded. run_files, files: by name. protected: steps that stay in the store."""

    name: str
    run_files: dict[str, HeldFile]
    files: dict[str, HeldFile]
    manifest: bytes
    expected: Mapping[str, FileDigest]
    protected: frozenset[str]
    held: ExitStack


class ObjectStoreMirror:
    """Uploads the checkpoints of one run. Raise ConfigError for a store that cannot be used at all.

    keep: how many of the newest stay in the store, besides the best ones. run_id: no step of another run is touched.
    """

    def __init__(self, url: str, keep: int, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.url, self.keep, self._run_id, self._clock = url, keep, run_id, clock
        self._store, self._root = open_object_store(url, KEY)
        self._changed = threading.Condition()
        self._waiting: Upload | None = None
        self._is_busy = False
        self._progress = clock()
        self._notes: list[str] = []
        self._has_failed = False
        self._uploaded: dict[str, Mapping[str, FileDigest]] = {}
        self._thread: threading.Thread | None = None

    def offer(self, folder: Path) -> None:
        """Upload a committed checkpoint in the background, in place of one that still waits."""
        try:
            upload = open_upload(folder)
        except (OSError, CheckpointError) as error:
            self._report(f"{folder.name} was not uploaded: {error}")
            return
        with self._changed:
            if self._waiting is not None:
                self._waiting.held.close()
            self._waiting = upload
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._upload_queued_checkpoints, name="trainrun mirror", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def take_notes(self) -> list[str]:
        """Return the messages for the user since the last call."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def finish(self, silence_seconds: float = LONGEST_SILENCE_SECONDS) -> None:
        """Wait until all checkpoints are uploaded, or an upload makes no progress for `silence_seconds`."""
        with self._changed:
            self._progress = self._clock()
            while self._waiting is not None or self._is_busy:
                if self._clock() - self._progress > silence_seconds:
                    break
                self._changed.wait(0.05)
            else:
                return
        self._report(
            f"the last upload had no progress for {silence_seconds:g} s and was left; the disk has all"
        )

    def _upload_queued_checkpoints(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None:
                    self._changed.wait()
                upload, self._waiting, self._is_busy = self._waiting, None, True
            try:
                with upload.held:
                    self._write(upload)
                self._has_failed = False
            except Exception as error:  # of any store: a failing one ends no run
                text = " ".join(str(error).split())[:300]
                self._report(f"{upload.name} was not uploaded: {type(error).__name__}: {text}")
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _report(self, text: str) -> None:
        """Report a failed upload, unless the previous upload failed too."""
        with self._changed:
            if not self._has_failed:
                self._notes.append(f"{KEY}={self.url}: {text}")
            self._has_failed = True

    # ---- in the thread

    def _write(self, upload: Upload) -> None:
        root = f"{self._root}/{upload.name}"
        if not self._uploaded:
            self._check_owner()
        if self._uploaded.get(upload.name) != upload.expected:  # else only the manifest changed
            self._remove(f"{root}/{MANIFEST}")
            entries = {
                name: self._copy(f"{root}/run/{name}", source) for name, source in upload.run_files.items()
            }
            self._store.pipe_file(f"{root}/{RUN_FILES}", json.dumps(entries).encode())
            for name, source in upload.files.items():
                if self._copy(f"{root}/{name}", source) != upload.expected[name]:
                    raise CheckpointError(f"{name} is not what its manifest says")
        self._store.pipe_file(f"{root}/{MANIFEST}", upload.manifest)
        self._uploaded[upload.name] = upload.expected
        self._advance()
        self._remove_old(upload.protected | {upload.name})

    def _check_owner(self) -> None:
        """Raise CheckpointError if the folder of the store has checkpoints of another run."""
        for name in list_stored_steps(self._store, self._root)[-1:]:
            path = f"{self._root}/{name}/{MANIFEST}"
            other = parse_manifest(self._store.cat_file(path), path).run_id
            if other != self._run_id:
                raise CheckpointError(f"another run ({other}) is there; give each run a URL of its own")

    def _copy(self, path: str, source: HeldFile) -> FileDigest:
        """Copy a file into the store; return its size and hash. Raise CheckpointError if not all arrived."""
        content, left = hashlib.sha256(), source.size
        self._store.makedirs(path.rpartition("/")[0], exist_ok=True)
        source.file.seek(0)
        with self._store.open(path, "wb") as target:
            while left and (piece := source.file.read(min(left, PIECE_BYTES))):
                target.write(piece)
                content.update(piece)
                left -= len(piece)
                self._advance()
        self._store.invalidate_cache()
        arrived = self._store.info(path)["size"]
        if left or arrived != source.size:
            raise CheckpointError(f"{path}: {arrived:,} of {source.size:,} bytes arrived")
        return FileDigest(source.size, content.hexdigest())

    def _advance(self) -> None:
        with self._changed:
            self._progress = self._clock()
            self._changed.notify_all()

    def _remove_old(self, protected: frozenset[str]) -> None:
        """Remove all but the newest `keep` steps and the protected ones: the manifest first, then the files."""
        names = list_stored_steps(self._store, self._root)
        for name in names[: -self.keep]:
            if name not in protected:
                self._remove(f"{self._root}/{name}/{MANIFEST}")
                self._remove(f"{self._root}/{name}")
                self._uploaded.pop(name, None)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._store.rm(path, recursive=True)


def open_upload(folder: Path) -> Upload:
    """Open all files of a committed checkpoint and of its run."""
    run = RunDir(folder.parent.parent)
    manifest = read_manifest(folder)
    with ExitStack() as stack:

        def open_object(path: Path) -> HeldFile:
            file = stack.enter_context(open(path, "rb"))
            return HeldFile(file, os.fstat(file.fileno()).st_size)

        run_files = {}
        names = [*MIRRORED, *(path.name for path in run.root.glob("seal-*.txt"))]
        for name in names:
            with suppress(FileNotFoundError):
                run_files[name] = open_object(run.root / name)
        files = {name: open_object(folder / name) for name in manifest.files}
        text = (folder / MANIFEST).read_bytes()
        return Upload(
            folder.name, run_files, files, text, manifest.files, read_best_steps(run), stack.pop_all()
        )


def read_best_steps(run: RunDir) -> frozenset[str]:
    """Return the names of the best checkpoints of a run, as `best.json` lists them."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        entries = json.loads((run.checkpoints / BEST).read_bytes())["entries"]
        return frozenset(str(entry["folder"]) for entry in entries)
    return frozenset()


def list_stored_steps(store: Any, root: str) -> list[str]:
    """Return the names of the steps in the store that have a manifest, oldest first."""
    store.invalidate_cache()
    names = {str(path).rstrip("/").split("/")[-2] for path in store.glob(f"{root}/step-*/{MANIFEST}")}
    return sorted(name for name in names if parse_step(name) is not None)


# ---- a run of a store on a fresh machine


def fetch_run(url: str, say: Callable[[str], None]) -> Path:
    """Download the newest whole checkpoint of a run, and its best one, with what a resume needs; return the folder.

    The folder is `outputs/NAME` by the last name of the URL. If this run is there already and is not older, it is used
    as it is. Raise ConfigError if the store has no run, or cannot be read.
    """
    store, root = open_object_store(url, "RUN_DIR")
    folder = Path("outputs").absolute() / root.rpartition("/")[2]
    try:
        steps = list_stored_steps(store, root)
        if not steps:
            raise ConfigError(f"RUN_DIR={url}: no whole checkpoint is there (no step-*/{MANIFEST})")
        if folder.exists():
            check_same_run(url, folder, steps[-1])
            say(f"{url} is in {folder}, which is used as it is")
            return folder
        download(store, root, steps, folder, say)
    except (OSError, ValueError) as error:
        raise ConfigError(f"RUN_DIR={url}: cannot be read ({type(error).__name__}: {error})") from error
    say(f"{url}: downloaded to {folder}")
    return folder


def check_same_run(url: str, folder: Path, newest: str) -> None:
    """Raise ConfigError if a folder has other files than the run, or an older state of the run."""
    steps = list_committed_steps(folder / "checkpoints")
    is_run = RunDir(folder).config.is_file()
    if not is_run or not steps or format_folder_name(steps[-1]) < newest:
        held = f"the run up to {format_folder_name(steps[-1])}" if is_run and steps else "something else"
        raise ConfigError(
            f"RUN_DIR={url}: {folder} holds {held}, and the store has {newest}; rename or remove that folder"
        )


def download(store: Any, root: str, steps: list[str], folder: Path, say: Callable[[str], None]) -> None:
    """Download into a temporary folder, which gets its name when all is there. Raise ConfigError."""
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    run, checkpoints = temporary / "run", temporary / "run" / "checkpoints"
    try:
        temporary.mkdir(parents=True)
        for name in reversed(steps):
            try:
                checkpoint = download_step(store, f"{root}/{name}", temporary / name)
                if not run.exists():
                    download_run_files(store, f"{root}/{name}", run)
                    checkpoints.mkdir()
                os.rename(checkpoint, checkpoints / name)
            except (CheckpointError, FileNotFoundError) as error:
                say(f"{name} in the store is damaged and was left out: {error}")
        if not run.exists():
            raise ConfigError(f"{root}: no checkpoint in the store is sound")
        read_identity(RunDir(run))  # raises ConfigError if it is no run
        os.rename(run, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def download_step(store: Any, source: str, folder: Path) -> Path:
    """Download one checkpoint completely, or not at all."""
    manifest = store.cat_file(f"{source}/{MANIFEST}")
    files = parse_manifest(manifest, f"{source}/{MANIFEST}").files
    download_checked_files(store, source, folder, files)
    (folder / MANIFEST).write_bytes(manifest)
    read_manifest(folder)  # raises CheckpointError for a step of another number
    return folder


def download_run_files(store: Any, source: str, folder: Path) -> None:
    """Download the other files of a run, all or none. Raise CheckpointError."""
    try:
        entries = json.loads(store.cat_file(f"{source}/{RUN_FILES}"))
        files = {name: FileDigest(*entry) for name, entry in entries.items() if name == Path(name).name}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{source}/{RUN_FILES}: not a list of files ({error})") from error
    download_checked_files(store, f"{source}/run", folder, files)


def download_checked_files(store: Any, source: str, folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Download files into a new folder, which exists afterwards only if all are there. Raise CheckpointError."""
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir()
    try:
        for name, expected in files.items():
            download_file(store, f"{source}/{name}", part / name, expected)
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def download_file(store: Any, source: str, path: Path, expected: FileDigest) -> None:
    content = hashlib.sha256()
    with store.open(source, "rb") as file, path.open("xb") as target:
        while piece := file.read(PIECE_BYTES):
            target.write(piece)
            content.update(piece)
    if FileDigest(path.stat().st_size, content.hexdigest()) != expected:
        raise CheckpointError(f"{source}: another size or SHA-256 than when it was uploaded")
