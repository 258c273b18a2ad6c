"""Whose code a saved run names: a config that is found in a run folder is data until it is known to be one's own.

A `_target_` on the command line, or in a file of `conf/`, is the user's own word. One in a run folder may be
anybody's: `trainrun evaluate` on a folder from the net must run nothing of it, nor import what it names. So a
target there is followed without a question only if it is

- one of ours, or a class of `torch.nn`, `torch.optim` or `torch.optim.lr_scheduler`;
- in a node that this user has run before: the node is sealed in `RUN.json` with a key that never leaves the user's
  home (`~/.local/state/trainrun/key`, made for the first run with code of one's own), so a run folder may be moved;
- a class or function that a Python file of the working directory itself defines;
- named again on this command line, as `model._target_=my_net.Net`.

Everything else is shown and refused; `--trust` follows it. The same holds for a cache on the disk outside of the
working directory, and for links out of the run folder: one through which this user has trained before (`checkpoints`
on a scratch disk, made ahead of the run) is sealed with the place it leads to. Who owns a link says nothing: what is
unpacked from an archive is one's own.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from trainrun.errors import ConfigError
from trainrun.instantiate import TARGET
from trainrun.rundir import RunDir, read_bytes, read_identity, read_json, write_identity

SEALS = "seals"
CACHE = "data.cache"
KEY_BYTES = 32
MAX_SOURCE_BYTES = 2**20
MAX_ENTRIES = 100_000  # of a run folder
SHOWN = 5
OURS = re.compile(
    r"trainrun\.(?:(?:model|task|optimizer|scheduler)\.\w+|data\.augment\.\w+)\.[A-Z]\w*"
    r"|trainrun\.data\.(?:formats\.\w+|arrays|digits|fashion_mnist|synthetic)\.load"
    r"|trainrun\.scheduler\.curves\.[a-z]\w*"
    r"|torch\.(?:nn|optim|optim\.lr_scheduler)\.[A-Z]\w*",
    re.ASCII,
)


@dataclass(frozen=True)
class Node:
    """What is not ours in a config: where it stands, as typed; and all of it."""

    key: str
    shown: str
    content: Any


def foreign_nodes(value: Any, key: str = "", named: Collection[str] = ()) -> Iterator[Node]:
    """The outermost nodes whose target is not ours, wherever they stand in plain values; a cache on the disk too.

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
    elif key == CACHE and str(value).startswith("disk:") and key not in named:
        yield Node(key, f"{key}={value}", value)


def is_foreign(target: Any) -> bool:
    return target is not None and not (isinstance(target, str) and OURS.fullmatch(target))


def check_run(run: RunDir, config: dict[str, Any], words: list[str], trust: bool) -> None:
    """Raises ConfigError that shows what the folder names and why it is not followed. Imports nothing.

    config: of the folder, as plain values. words: `key=value` of this command line.
    """
    check_files(run.root, trust)
    if trust:
        return
    nodes = list(foreign_nodes(config, named=[word.lstrip("+").partition("=")[0] for word in words]))
    if not nodes:
        return
    sealed = seals_of(run)
    strange = [
        node
        for node in nodes
        if seal(run, node) not in sealed and not defined_here(node.content, run.root, Path.cwd())
    ]
    if strange:
        shown = ", ".join(node.shown[:160] for node in strange[:SHOWN])
        more = f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else ""
        raise ConfigError(
            f"{run.config}: names what is not known to be yours: {shown}{more}; nothing was imported. Where you trust "
            "this folder: --trust; where the code is yours: call this from the folder it lies in, or name it again, as "
            f"{strange[0].shown.partition('=')[0]}=..."
        )


def check_found(run: RunDir, config: dict[str, Any]) -> None:
    """Raises ConfigError where a module that the run names is not to be found from here; looks, imports nothing."""
    for target in targets_in(config):
        module = target.partition(".")[0]
        if module.isidentifier() and module not in sys.modules and find_spec(module) is None:
            began = folder_of(run)
            way = f"; the run began in {began}: call this from there, or PYTHONPATH={began}" if began else ""
            raise ConfigError(
                f"{run.root}: names {target}, and there is no module {module} (looked in {Path.cwd()}, PYTHONPATH and "
                f"what is installed){way}"
            )


def folder_of(run: RunDir) -> str:
    """Where the command that began the run was called; empty where that is not known."""
    told: Any = None
    with contextlib.suppress(OSError, ValueError):
        told = read_json(run.environment)
    folder = told.get("working_dir") if isinstance(told, dict) else None
    return folder if isinstance(folder, str) else ""


def seal_run(run: RunDir, config: dict[str, Any]) -> None:
    """Notes in the run folder that this user has run these nodes."""
    add_seals(run, list(foreign_nodes(config)))


def seal_links(run: RunDir) -> None:
    """The same for the links out of it, through which the run that begins or goes on will write."""
    inside = run.root.resolve()
    links = [path for path, _ in islice(entries_of(run.root), MAX_ENTRIES) if path.is_symlink()]
    add_seals(run, [link_node(run, path) for path in links if not leads_to(path).is_relative_to(inside)])


def link_node(run: RunDir, path: Path) -> Node:
    """The place that a link leads to is sealed, so a run folder that is moved takes no relative link along."""
    place = path.relative_to(run.root)
    return Node(f"link {place}", str(place), str(leads_to(path)))


def leads_to(path: Path) -> Path:
    """The end of a link; a link that leads to itself has no other end, and `Path.resolve` raises there."""
    return Path(os.path.realpath(path))


def add_seals(run: RunDir, nodes: list[Node]) -> None:
    if not nodes:
        return
    own_key(make=True)
    known = seals_of(run)
    new = known | {mark for node in nodes if (mark := seal(run, node))}
    if new != known:
        write_identity(run, read_identity(run) | {SEALS: sorted(new)})


def seals_of(run: RunDir) -> set[str]:
    found = read_identity(run).get(SEALS, [])
    return {mark for mark in found if isinstance(mark, str)} if isinstance(found, list) else set()


def seal(run: RunDir, node: Node) -> str:
    """What only the holder of the key can write; empty where there is no key, which no seal equals."""
    key = own_key()
    if not key:
        return ""
    text = repr(
        (read_identity(run)["run_id"], node.key, node.content)
    )  # plain values, in the order of the file
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def own_key(make: bool = False) -> bytes:
    """The user's key; empty where there is none, or where no home can be written."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last: nobody knows of a home
        path = Path.home() / ".local" / "state" / "trainrun" / "key"
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".key-{secrets.token_hex(4)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(KEY_BYTES))
                with contextlib.suppress(FileExistsError):  # another run was faster
                    os.link(temporary, path)
            finally:
                temporary.unlink()
        key = read_bytes(path, KEY_BYTES)
        if len(key) == KEY_BYTES and path.stat().st_uid == os.geteuid():
            return key
    return b""


def defined_here(content: Any, root: Path, folder: Path) -> bool:
    """Whether files of `folder` define every target of a node; a folder inside of the run is nobody's.

    Of a cache on the disk: whether it lies in `folder`.
    """
    if folder.resolve().is_relative_to(root.resolve()):
        return False
    if isinstance(content, str):
        place = folder / Path(content.partition(":")[2]).expanduser()
        return place.resolve().is_relative_to(folder.resolve())
    return all(is_defined(target, folder) for target in targets_in(content))


def targets_in(value: Any) -> Iterator[str]:
    """All of them that are not ours."""
    if isinstance(value, dict):
        if is_foreign(value.get(TARGET)):
            yield str(value[TARGET])
        for item in value.values():
            yield from targets_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from targets_in(item)


def is_defined(target: str, folder: Path) -> bool:
    """`package.module.Name`: a class or function at the top of that file. Nothing is imported to see it."""
    *modules, name = target.split(".")
    if not modules or not all(part.isidentifier() for part in (*modules, name)):
        return False
    place = folder.joinpath(*modules)
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        try:
            if not path.resolve().is_relative_to(folder.resolve()):
                continue
            tree = ast.parse(read_bytes(path, MAX_SOURCE_BYTES))
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return any(
            isinstance(item, (ast.ClassDef, ast.FunctionDef)) and item.name == name for item in tree.body
        )
    return False


def check_files(root: Path, trust: bool, way: str = "--trust") -> None:
    """What is written into a run folder must not land elsewhere, and nobody waits for a pipe. Raises ConfigError.

    way: the words that allow links out of it. One that is sealed is followed.
    """
    inside, run = root.resolve(), RunDir(root)
    for number, (path, is_plain) in enumerate(entries_of(root)):
        if number >= MAX_ENTRIES:
            raise ConfigError(f"{root}: more than {MAX_ENTRIES:,} files: no run folder")
        if not path.is_symlink():
            if not is_plain:
                raise ConfigError(f"{path}: neither a plain file nor a folder; take it away")
        elif not (trust or leads_to(path).is_relative_to(inside) or is_known(run, link_node(run, path))):
            raise ConfigError(
                f"{path}: leads out of the run folder, to {path.readlink()}; where that is of your own making: {way}"
            )


def is_known(run: RunDir, node: Node) -> bool:
    """Whether it is sealed; never in a folder that is not whole."""
    with contextlib.suppress(ConfigError):
        return seal(run, node) in seals_of(run)
    return False


def entries_of(folder: Path) -> Iterator[tuple[Path, bool]]:
    """What lies below a folder, and whether it is a plain file or a folder itself; links are not followed."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        is_folder = entry.is_dir(follow_symlinks=False)
        yield Path(entry.path), is_folder or entry.is_file(follow_symlinks=False)
        if is_folder:
            yield from entries_of(Path(entry.path))
