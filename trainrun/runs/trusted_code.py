"""Whose code a saved run names: a config in a run folder is data until it is known to be one's own.

A `_target_` on the command line, or in a file of `conf/`, is the user's own word. One in a run folder may be
anybody's: `trainrun evaluate` on a folder from the net must run nothing of it, nor import what it names. So a target
there is followed without a question only if it is

- one of ours, or a class of `torch.nn`, `torch.optim` or `torch.optim.lr_scheduler`;
- in a node that this user has trained with: each run adds a line to `~/.local/state/trainrun/runs` (a plain file, below
  XDG_STATE_HOME where that is set) with the SHA-256 of its id and the node, so a run folder may be moved, and nothing
  in the node changed;
- named again on this command line, as `model._target_=my_net.Net`.

Everything else is shown and refused; `--trust` follows it. The same holds for folders outside of the working directory
that a run would write to, and for links out of the run folder. That code lies in the working directory, or who owns a
file, says nothing: both come with an archive that is unpacked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainrun.config.aliases import target_of_today
from trainrun.errors import ConfigError
from trainrun.instantiate import TARGET
from trainrun.runs.run_folder import RunDir, read_identity, read_json

MAX_ENTRIES = 100_000  # of a run folder
SHOWN = 5
OURS = re.compile(
    r"trainrun\.(?:(?:model|task|optimizer|scheduler)\.\w+|data\.augment\.\w+)\.[A-Z]\w*"
    r"|trainrun\.data\.readers\.\w+\.\w+\.load"
    r"|trainrun\.scheduler\.curves\.[a-z]\w*"
    r"|trainrun\.transform\.(?:lora\.lora|freeze\.freeze)|trainrun\.hook\.\w+\.[A-Z]\w*"
    r"|trainrun\.monitor\.tensorboard\.TensorBoard"
    r"|torch\.(?:nn|optim|optim\.lr_scheduler)\.[A-Z]\w*",
    re.ASCII,
)


@dataclass(frozen=True)
class Node:
    """What is not ours in a config: where it stands, as typed; and all of it. place: of a folder that is written to."""

    key: str
    shown: str
    content: Any
    place: str = ""


def foreign_nodes(value: Any, key: str = "", named: Collection[str] = ()) -> Iterator[Node]:
    """The outermost nodes whose target is not ours, wherever they stand in plain values; folders of caches too.

    named: keys whose value the command line gives.
    """
    if isinstance(value, dict):
        if is_foreign(value.get(TARGET)) and f"{key}.{TARGET}" not in named:
            yield Node(key, f"{key}.{TARGET}={value[TARGET]}", value)
            return
        for name, item in value.items():
            yield from foreign_nodes(item, f"{key}.{name}" if key else str(name), named)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from foreign_nodes(item, f"{key}[{number}]", named)
    elif isinstance(value, str) and key not in named:
        place = written_to(key, value)
        if place or "${oc.env:" in value:  # what the environment holds is not for everybody to look up
            yield Node(key, f"{key}={value}", value, place)


def is_foreign(target: Any) -> bool:
    return target is not None and not (isinstance(target, str) and OURS.fullmatch(target_of_today(target)))


def written_to(key: str, value: str) -> str:
    """The folder that a setting has a run write to."""
    if key == "data.cache":
        return value.removeprefix("disk:") if value.startswith("disk:") else ""
    return value if key.endswith((".cache_dir", ".log_dir")) else ""


def check_run(run: RunDir, config: dict[str, Any], words: list[str], trust: bool) -> None:
    """Raises ConfigError that shows what the folder names and why it is not followed. Imports nothing.

    config: of the folder, as plain values. words: `key=value` of this command line.
    """
    check_files(run.root, trust)
    if trust:
        return
    nodes = foreign_nodes(config, named=[word.lstrip("+").partition("=")[0] for word in words])
    here = [node for node in nodes if not (node.place and is_here(node.place, run.root))]
    strange = [node for node in here if not is_listed(run, node)]
    if strange:
        shown = ", ".join(node.shown[:160] for node in strange[:SHOWN])
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        raise ConfigError(
            f"{run.config}: names what is not known to be yours: {shown}{more}; nothing was imported. Where you trust "
            f"this folder: --trust, or name it again, as {strange[0].shown.partition('=')[0]}=..."
        )


def is_here(place: str, root: Path) -> bool:
    """Whether it lies in the working directory; one inside of the run is nobody's."""
    folder = Path.cwd().resolve()
    inside = Path(os.path.realpath(folder / os.path.expanduser(place))).is_relative_to(folder)
    return inside and not folder.is_relative_to(root.resolve())


def check_found(run: RunDir, config: dict[str, Any]) -> None:
    """Raises ConfigError if a module that the run names is not to be found from here; looks, imports nothing."""
    for node in foreign_nodes(config):
        target = str(node.content[TARGET]) if isinstance(node.content, dict) else ""
        module = target.partition(".")[0]
        if module.isidentifier() and module not in sys.modules and find_spec(module) is None:
            began: Any = None
            with contextlib.suppress(OSError, ValueError, AttributeError):
                began = read_json(run.environment).get("working_dir")
            way = f"; the run began in {began}: call this from there, or PYTHONPATH={began}" if began else ""
            raise ConfigError(
                f"{run.root}: names {target}, and there is no module {module} (looked in {Path.cwd()}, PYTHONPATH and "
                f"what is installed){way}"
            )


def add_run(run: RunDir, config: dict[str, Any]) -> None:
    """List what this user trains with from now on: the code that the run names, the places it writes to, its links."""
    add_to_list(run, [*foreign_nodes(config)])


def add_links(run: RunDir) -> None:
    """The same for the links out of it, through which the run that begins or goes on will write."""
    add_to_list(run, [link_node(run, path) for path in entries_of(run.root) if leads_out(path, run.root)])


def link_node(run: RunDir, path: Path) -> Node:
    """The place that a link leads to is listed, so a run folder that is moved takes no relative link along."""
    place = str(path.relative_to(run.root))
    return Node(f"link {place}", place, os.path.realpath(path))


def leads_out(path: Path, root: Path) -> bool:
    """`realpath` also knows the end of a link that leads to itself, where `Path.resolve` raises."""
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root.resolve())


def mark(run: RunDir, node: Node) -> str:
    text = repr((read_identity(run)["run_id"], node.key, node.content))  # plain values, in the file's order
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def list_file() -> Path:
    """Raises RuntimeError if nobody knows of a home."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "trainrun" / "runs"


def listed() -> set[str]:
    with contextlib.suppress(OSError, ValueError, RuntimeError), list_file().open(encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_uid == os.geteuid():
            return {line.partition(" ")[0].strip() for line in file}
    return set()


def is_listed(run: RunDir, node: Node) -> bool:
    """Never in a folder that is not whole."""
    with contextlib.suppress(ConfigError):
        return mark(run, node) in listed()
    return False


def add_to_list(run: RunDir, nodes: list[Node]) -> None:
    """Nothing where no home can be written: such a run is asked for again."""
    new = {mark(run, node) for node in nodes} - listed() if nodes else set()
    if not new:
        return
    place = ascii(str(run.root))  # a line, whatever it is called
    with contextlib.suppress(OSError, RuntimeError):
        list_file().parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(list_file(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("".join(f"\n{line} {place}" for line in sorted(new)))


def check_files(root: Path, trust: bool, way: str = "--trust") -> None:
    """What is written into a run folder must not land elsewhere, and nobody waits for a pipe. Raises ConfigError.

    way: the words that allow links out of it. One that is listed is followed.
    """
    run = RunDir(root)
    for number, path in enumerate(entries_of(root)):
        if number >= MAX_ENTRIES:
            raise ConfigError(f"{root}: more than {MAX_ENTRIES:,} files: no run folder")
        kind = stat.S_IFMT(path.lstat().st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise ConfigError(f"{path}: neither a plain file nor a folder; take it away")
        if not trust and leads_out(path, root) and not is_listed(run, link_node(run, path)):
            raise ConfigError(
                f"{path}: leads out of the run folder, to {path.readlink()}; where that is of your own making: {way}"
            )


def entries_of(root: Path) -> Iterator[Path]:
    """What lies below a folder; links are not followed."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        yield from (Path(folder, name) for name in sorted([*folders, *files]))
