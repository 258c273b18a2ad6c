"""Whose code a saved run names: a config in a run folder is data until it is known to be one's own.

`trainrun evaluate` on a folder from the net must run nothing of it, nor import what it names. Followed without a
question is what is ours or a class of `torch.nn` or `torch.optim`; what this user has trained with (each run adds lines
to `~/.local/state/trainrun/runs`, a plain file: the SHA-256 of the run's id and the part of its config); and what this
command line names again. Everything else is shown and refused; `--trust` follows it. The same holds for folders that a
run would write to, for references to the environment, and for links out of the run folder. That code lies in the
working directory says nothing: it may have come in the same archive.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainrun.config.saved_values import Foreign, foreign_parts
from trainrun.errors import ConfigError
from trainrun.instantiate import TARGET
from trainrun.runs.run_folder import RunDir, read_identity, read_json

SHOWN = 5


def links_out(root: Path) -> Iterator[Foreign]:
    """By the place that they lead to, so a run folder that is moved takes no relative link along."""
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in sorted(folders + files)):
            if path.is_symlink() and not Path(target := os.path.realpath(path)).is_relative_to(
                root.resolve()
            ):
                yield Foreign(f"link {path.relative_to(root)}", path, target)


def check_run(run: RunDir, config: dict[str, Any], words: list[str], trust: bool) -> None:
    """Raises ConfigError that shows what the folder names and why it is not followed. Imports nothing.

    config: of the folder, as plain values. words: `key=value` of this command line.
    """
    check_files(run.root, trust)
    named = {word.lstrip("+").partition("=")[0] for word in words}
    unnamed = [] if trust else [part for part in foreign_parts(config) if part.key not in named]
    if strange := unlisted(run, unnamed):
        shown = ", ".join(f"{part.key}={part.value}"[:160] for part in strange[:SHOWN])
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        raise ConfigError(
            f"{run.config}: names what is not known to be yours: {shown}{more}; nothing was imported. Where you trust "
            f"this folder: --trust, or name it again, as {strange[0].key}=..."
        )


def check_files(root: Path, trust: bool, way: str = "--trust") -> None:
    """What is written into a run folder must not land elsewhere, and nobody waits for a pipe. Raises ConfigError.

    way: the words that allow links out of it.
    """
    for folder, _, files in os.walk(root):
        for path in (Path(folder, name) for name in files):
            with contextlib.suppress(FileNotFoundError):  # the run may be training
                if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFLNK):
                    raise ConfigError(f"{path}: neither a plain file nor a folder; take it away")
    if not trust and (links := unlisted(RunDir(root), [*links_out(root)])):
        path = links[0].value
        raise ConfigError(
            f"{path}: leads out of the run folder, to {path.readlink()}; where that is of your own making: {way}"
        )


def check_found(run: RunDir, config: dict[str, Any]) -> None:
    """Raises ConfigError if a module that the run names is not to be found from here; looks, imports nothing."""
    for _, value, content in foreign_parts(config):
        module = str(value).partition(".")[0]
        if not isinstance(content, dict) or not module.isidentifier() or module in sys.modules:
            continue
        if find_spec(module) is None:
            way = ""
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                told = read_json(run.environment)
                began, words = told["working_dir"], told["command"]
                beside = any(word.startswith(("--config-dir", "-cd")) for word in words)
                more = " with the same --config-dir" if beside else f", or PYTHONPATH={began}"
                way = f"; the run began in {began}: call this from there{more}"
            raise ConfigError(
                f"{run.root}: names {value}, and there is no module {module} (looked in {Path.cwd()}, PYTHONPATH and "
                f"what is installed){way}"
            )


def list_file() -> Path:
    """Raises RuntimeError if nobody knows of a home."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "trainrun" / "runs"


def listed() -> set[str]:
    with contextlib.suppress(OSError, ValueError, RuntimeError), list_file().open(encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_uid == os.geteuid():
            return {line.partition(" ")[0].strip() for line in file}
    return set()


def unlisted(run: RunDir, parts: list[Foreign]) -> list[Foreign]:
    """All of them in a folder that is not whole."""
    if not parts:
        return []
    with contextlib.suppress(ConfigError):
        known, run_id = listed(), read_identity(run)["run_id"]
        return [part for part in parts if mark(run_id, part) not in known]
    return parts


def mark(run_id: str, part: Foreign) -> str:
    key = part.key.removesuffix(f".{TARGET}") if isinstance(part.content, dict) else part.key
    text = repr((run_id, key, part.content))  # plain values, in the file's order
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def add_to_list(run: RunDir, config: dict[str, Any]) -> None:
    """What this user trains with from now on. Where no home can be written, such a run is asked for again."""
    if not (new := unlisted(run, [*foreign_parts(config), *links_out(run.root)])):
        return
    run_id, place = read_identity(run)["run_id"], ascii(str(run.root))  # a line, whatever it is called
    with contextlib.suppress(OSError, RuntimeError):
        list_file().parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(list_file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("".join(f"\n{line} {place}" for line in sorted({mark(run_id, part) for part in new})))
