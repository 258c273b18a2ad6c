"""`trainrun --help`, read from the first comment of each config file: no Hydra, no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from trainrun.checks import nearest
from trainrun.config import RunConfig, conf_dir, groups
from trainrun.errors import ConfigError

EXAMPLES = """\
usage: trainrun [group=option ...] [key=value ...]     one run
       trainrun --multirun optimizer.lr=1e-3,3e-4      every combination
       trainrun COMMAND RUN_DIR ...                    something with a finished run
       trainrun --help GROUP                           the options of one group; --help all: every key
       trainrun --cfg job [key=value ...]              the composed config, without running

  trainrun                                             digits, a small network, 20 epochs
  trainrun data=fashion_mnist model=cnn preset=fast
  trainrun parallel=ddp precision=16-mixed
  trainrun model=my_net.Net model.width=9              your own class, from the folder you are in
"""


def help_text(topics: list[str], commands: dict[str, str], folders: list[Path]) -> str:
    """The overview, one group with its options, or every key.

    folders: with configs, the user's first, ours last.
    """
    known_groups = groups(folders)
    if topics and topics[0] in known_groups:
        return _group(topics[0], folders)
    if topics and topics[0] == "all":
        return "\n".join(_keys(RunConfig(), ""))
    if topics and topics[0] in commands:
        return f"trainrun {topics[0]}: {commands[topics[0]]}; see trainrun {topics[0]} --help"
    if topics:
        known = [*known_groups, "all"]
        raise ConfigError(
            f"--help {topics[0]}: no such topic.{nearest(topics[0], known)} Choose from: {', '.join(known)}"
        )
    lines = [EXAMPLES, "groups (the default comes first):"]
    defaults = _defaults(conf_dir())
    for group in known_groups:
        options = sorted(_option_files(group, folders), key=lambda name: (name != defaults.get(group), name))
        lines.append(f"  {group:<12} {', '.join(options)}")
    lines.append("\ncommands:")
    lines += [f"  {name:<12} {text}" for name, text in commands.items()]
    return "\n".join(lines)


def _group(group: str, folders: list[Path]) -> str:
    lines = [f"{group}="]
    for name, path in sorted(_option_files(group, folders).items()):
        lines.append(f"  {name:<16} {first_comment(path)}".rstrip())
    return "\n".join(lines)


def _option_files(group: str, folders: list[Path]) -> dict[str, Path]:
    """Those of an earlier folder hide those of a later one."""
    return {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}


def first_comment(path: Path) -> str:
    """What an option file says of itself."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""


def _defaults(folder: Path) -> dict[str, str]:
    pairs = [
        line.strip("- ").partition("#")[0] for line in (folder / "trainrun.yaml").read_text().splitlines()
    ]
    return {key.strip(): value.strip() for key, _, value in (pair.partition(":") for pair in pairs) if value}


def _keys(section: Any, prefix: str) -> list[str]:
    lines = []
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            lines += _keys(value, f"{prefix}{item.name}.")
        else:
            choices = item.metadata.get("choices")
            allowed = f"  ({', '.join(choices)})" if choices else ""
            lines.append(f"{prefix}{item.name}={'null' if value is None else value}{allowed}")
    return lines
