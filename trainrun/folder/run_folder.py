"""All paths inside a run folder, and functions that write files there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainrun.errors import ConfigError, SaveError

MAX_JSON_BYTES = 4 * 2**20
# They hold settings: for their owner alone.
PRIVATE = (
    "config.yaml", ".config-before.yaml", "overrides.txt", ".secrets.json", "environment.json", "status.json",
    ".job.json", "changes.diff",
)  # fmt: skip
SAVED = "saved"  # in RUN.json, once a checkpoint was seen
SEED_DRAWN = "seed_drawn"  # in RUN.json: whether nobody named one
SEED = "seed"  # in RUN.json
DIGEST = "sha256"  # in RUN.json: of the rest
IDENTITY_KINDS: dict[str, type | tuple[type, ...]] = {
    "run_id": str, "created": (int, float), SEED_DRAWN: bool, SEED: int, SAVED: bool, "num_threads": int,
    "precision": str, "data": dict,
}  # fmt: skip


@dataclass(frozen=True)
class LaunchSpec:
    """The facts that ranks need besides the config: `job.json` in the run folder.

    paths: where the user's modules are found. resume: continue from the newest checkpoint. began: the start of the
        run's time (`time.perf_counter()`), not passed to ranks; None for the start of this process. sees_folder:
        whether this rank sees the run folder; not if it is on the disk of another machine.
    """

    resume: bool
    paths: list[str]
    began: float | None = None
    sees_folder: bool = True


def list_typed_keys(overrides: list[str]) -> tuple[str, ...]:
    """Return the keys of overrides, without `+` and values."""
    return tuple(word.lstrip("+").partition("=")[0] for word in overrides)


class _RunPath:
    """A descriptor for a path inside a run folder. The path is built at its first use."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type[RunDir], attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        path = run.root / self.name
        run.__dict__[self._attribute] = path  # read from there the next time, without this method
        return path


@dataclass(frozen=True)
class RunDir:
    """A run folder and every path in it."""

    root: Path
    config = _RunPath("config.yaml")  # all settings; references to other settings as they were written
    config_before = _RunPath(".config-before.yaml")  # without the words of a resume, until those hold
    overrides_before = _RunPath(".overrides-before.txt")  # likewise
    secrets = _RunPath(".secrets.json")  # values of settings that are named like a secret, by key
    overrides = _RunPath("overrides.txt")  # the words of the command line, one a line
    environment = _RunPath("environment.json")  # versions, device, git commit
    changes = _RunPath("changes.diff")  # what of the working directory is not in that commit
    identity = _RunPath("RUN.json")  # the run's id, made once, and what was chosen for it
    identity_copy = _RunPath(".RUN.json")  # the same again: a run goes on where one of the two is damaged
    lock = _RunPath(".lock")  # open and locked by the processes that train here; stays when they end
    job = _RunPath(".job.json")  # what the ranks are told besides the config; there while a run is going on
    metrics = _RunPath("metrics.jsonl")  # one JSON object a line, append only
    tokenizer = _RunPath("tokenizer.json")  # that was trained for this run (data.train.tokenizer=bpe:N)
    samples = _RunPath("samples.safetensors")  # a few predictions with their inputs, for the grid of pictures
    pictures = _RunPath("pictures.safetensors")  # what the task drew at the newest validation
    status = _RunPath("status.json")  # running, done, stopped or failed, and why
    log = _RunPath("run.log")
    checkpoints = _RunPath("checkpoints")
    best = _RunPath("checkpoints/best.json")  # the best checkpoints by name, for people and tools
    nonfinite = _RunPath("nonfinite")  # the steps whose gradients were not finite, with their batches
    plots = _RunPath("plots")
    report = _RunPath("report.html")

    @property
    def effective_config_path(self) -> Path:
        """Return `config_before` if it exists, else `config`."""
        return self.config_before if self.config_before.is_file() else self.config

    def rank_log(self, rank: int) -> Path:
        return self.root / f"rank{rank}.log"

    def memory_report(self, rank: int) -> Path:
        """Return the path of what a rank's memory held when it ended."""
        return self.root / f"memory-rank{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Return the file for the thread stacks of a rank that makes no progress."""
        return self.root / f"stacks-rank{rank}.txt"

    def rank_error(self, rank: int) -> Path:
        """Return the file in which a failing rank writes time, message and traceback."""
        return self.root / f".error-rank{rank}.json"

    def create(self) -> None:
        """Make the folder. Raise ConfigError if it cannot be written."""
        if ascii(str(self.root)) != ascii(os.fsencode(self.root).decode("utf-8", "replace")):
            raise ConfigError(f"output_dir={self.root}: not UTF-8; name another folder with output_dir=...")
        try:
            for folder in [*reversed(self.root.parents), self.root]:
                if not folder.is_dir():
                    folder.mkdir(exist_ok=True)
                    sync_path(folder.parent)
            with tempfile.TemporaryFile(dir=self.root):
                pass
        except OSError as error:
            raise build_folder_error(self.root, error) from error


def is_run_file_name(name: str) -> bool:
    """Return whether a run writes a file or folder of this name into its folder."""
    names = [path.name for path in vars(RunDir).values() if isinstance(path, _RunPath)]
    patterns = (
        "seal-*.txt",
        "rank*.log",
        "stacks-rank*.txt",
        "memory-rank*.json",
        ".error-rank*.json",
        ".*.tmp",
    )
    return name in names or any(fnmatch(name, pattern) for pattern in patterns)


def read_overrides(run: RunDir) -> list[str]:
    """Return the typed settings of a run; [] if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return run.overrides.read_text(encoding="utf-8").splitlines()
    return []


def is_run_folder(run: RunDir) -> bool:
    """Return whether the folder still holds a run."""
    return os.path.lexists(run.identity) or os.path.lexists(run.identity_copy)


def check_folder_exists(run: RunDir) -> None:
    """Raise SaveError if the folder was removed during the run. A new folder would lack the earlier files."""
    if not is_run_folder(run):
        raise SaveError(
            f"{run.root}: the folder of this run is gone (removed, moved or unmounted), so nothing is saved any more; "
            "bring it back, or where it was moved: trainrun resume NEW_PLACE"
        )


def has_ever_saved(run: RunDir) -> bool:
    """Return whether a checkpoint was ever committed here, even if no undamaged one is left."""
    traces = any(next(run.checkpoints.glob(name), None) for name in ("step-*", ".bad-*", "best.json"))
    return traces or has_recorded_checkpoint(run)


def has_recorded_checkpoint(run: RunDir) -> bool:
    """Return whether RUN.json records a checkpoint. The record stays if the folder of checkpoints is empty or
    unmounted.
    """
    with contextlib.suppress(ConfigError):
        return read_identity(run).get(SAVED) is True
    return False


def record_has_checkpoint(run: RunDir, saved: bool = True) -> None:
    """Record in RUN.json whether a checkpoint was ever committed. The file is written only if that changed."""
    if has_recorded_checkpoint(run) != saved:
        write_identity(run, read_identity(run) | {SAVED: saved})


def record_checkpoints(run: RunDir) -> None:
    """Record in RUN.json that the run has checkpoints, if it has any."""
    if next(run.checkpoints.glob("step-*"), None):
        record_has_checkpoint(run)


def prepare_commit(run: RunDir, sync_rows: Callable[[], None] | None) -> None:
    """Write what a run needs to continue from the next checkpoint. Raise SaveError if the folder was removed.

    sync_rows: writes the metric rows. A run that continues from the checkpoint has every row before it, also after a
        power loss.
    """
    check_folder_exists(run)
    if sync_rows is not None:
        sync_rows()
    record_checkpoints(run)


def remove_new_folder(folder: Path, above: str) -> None:
    """Remove a folder in which nothing was trained, and the empty folders above it, up to `above`."""
    shutil.rmtree(folder)
    for parent in folder.parents:
        if not parent.is_relative_to(Path.cwd() / above):
            break
        with contextlib.suppress(OSError):  # holds something else
            parent.rmdir()


def resolve_folder(text: str) -> Path:
    """Return a user's path as an absolute path. `..` after a link means the parent of the link's target."""
    path = Path(text).expanduser().absolute()
    return path.resolve() if ".." in path.parts else path


def build_folder_error(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"output_dir={folder}: cannot write in it ({error.strerror}); name another folder with output_dir=..."
    )


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Replace a file atomically. Its folder must exist.

    durable: sync it, so that it survives a power loss. Otherwise an empty file could remain.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        mode = 0o600 if path.name in PRIVATE else 0o666
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode),
            "w",
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync_path(path.parent)
    except OSError as error:  # of a full disk it names no file
        error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any, durable: bool = False) -> None:
    """Write strict JSON with one key per line."""
    write_text(path, format_json_file(value), durable)


def format_json_file(value: Any) -> str:
    """Return strict JSON with one key per line."""
    return json.dumps(replace_non_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def replace_non_finite(value: Any) -> Any:
    """Return the value with NaN and infinity replaced by the texts "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {name: replace_non_finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(inner) for inner in value]
    return value


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk, so that they survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raise OSError or ValueError."""
    return parse_json_text(read_bytes(path, MAX_JSON_BYTES).decode("utf-8"))


def parse_json_text(text: str) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is invalid or nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raise OSError or ValueError.

    A pipe is refused, because reading it could block forever.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a plain file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"longer than {limit:,} bytes")
    return data


def read_identity(run: RunDir) -> dict[str, Any]:
    """Return RUN.json, or its copy if it is damaged. Raise ConfigError if both are damaged."""
    for path in (run.identity, run.identity_copy):
        if identity := read_valid_identity(path):
            return identity
    raise ConfigError(
        f"{run.identity}: {'damaged' if os.path.lexists(run.identity) else 'missing'}, so this run folder is "
        f"incomplete; start a new run ({shlex.quote(f'ckpt_path={run.root}')} continues from a checkpoint)"
    )


def read_origin(run: RunDir) -> tuple[Path, Path] | None:
    """Return the working directory in which the run began and its folder at that time; None if unknown."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        environment = read_json(run.environment)
        began = Path(environment["working_dir"])
        return began, Path(environment.get("folder", began / "run"))
    return None


def read_valid_identity(path: Path) -> dict[str, Any]:
    """Read RUN.json or its copy. Return {} if it is missing, damaged, or invalid."""
    with contextlib.suppress(OSError, ValueError):
        identity = read_json(path)
        digest = identity.pop(DIGEST, None) if isinstance(identity, dict) else None
        if (
            isinstance(identity, dict)
            and (digest is None or digest == _digest_identity(identity))
            and _is_identity(identity)
        ):
            return identity
    return {}


def _is_identity(told: dict[str, Any]) -> bool:
    data = told.get("data", {})
    return (
        isinstance(told.get("run_id"), str)
        and all(isinstance(value, IDENTITY_KINDS.get(name, object)) for name, value in told.items())
        and all(type(size) is int for size in [*(data.get("shape") or []), data.get("num_classes") or 0])
    )


def write_identity(run: RunDir, told: dict[str, Any]) -> None:
    """Write RUN.json and its copy, with a hash that reveals damage."""
    sealed = {**told, DIGEST: _digest_identity(told)}
    write_json(run.identity, sealed, durable=True)
    write_json(run.identity_copy, sealed)


def _digest_identity(told: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode("ascii")).hexdigest()
