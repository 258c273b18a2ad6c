"""What was found, as a preset in the user's `conf/`: small, with its evidence, and with where it holds."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from trainrun.errors import ConfigError
from trainrun.lab.choices import composed_anew, exchanged, key_of
from trainrun.lab.evidence import Outcome, Rung
from trainrun.masking import masked_words
from trainrun.rundir import write_text
from trainrun.words.tuned import MARK, fingerprint_line

SIGNED: Final = "# Written by `trainrun tune`"
_PLAIN = re.compile(r"(?:[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|true|false|null)\Z")


class Written(NamedTuple):
    """path: None if a preset cannot carry it. use: the words of a run that has it."""

    path: Path | None
    use: list[str]


def preset_path(name: str, working_dir: Path) -> Path:
    """Raises ConfigError if a file of that name is somebody's own."""
    path = working_dir / "conf" / "preset" / f"{name}.yaml"
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"--name {name}: a preset is named with letters, digits, - and _")
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"{path}: is not one that trainrun tune wrote; give another with --name")
    return path


def host_preset() -> str:
    host = re.sub(r"[^\w-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")
    return f"tuned-{host or 'here'}"


def write_preset(path: Path, typed: Sequence[str], outcome: Outcome, working_dir: Path) -> Written:
    """typed: the words of the run, without what it chose for itself."""
    found = outcome.words
    wanted = composed_anew(exchanged(typed, found))
    taken = {key_of(word) for word in found} | {"preset"}
    inside = tuple(f"{key}." for key in taken if "." not in key)
    kept = [word for word in typed if key_of(word) not in taken and not key_of(word).startswith(inside)]
    before = next((word.partition("=")[2] for word in typed if key_of(word) == "preset"), "none").strip('"')
    use = [*kept, f"preset={path.stem}"]
    old = path.read_text(encoding="utf-8") if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, preset_text(typed, outcome, before, fingerprint_line(wanted, working_dir)))
    if composed_anew(use) == wanted:
        return Written(path, use)
    if old is None:  # an experiment of the user's sets one of the keys itself, and comes after a preset
        path.unlink()
    else:
        write_text(path, old)
    return Written(None, exchanged(typed, found))


def preset_text(typed: Sequence[str], outcome: Outcome, before: str, fingerprint: str) -> str:
    assert outcome.claim is not None
    claim, words = outcome.claim, " ".join(masked_words(typed)) or "(no words)"
    head = [
        "# @package _global_",
        f"{SIGNED} on {datetime.now():%Y-%m-%d %H:%M}: {outcome.unit}/s {claim.value:.2f}x "
        f"({claim.low:.2f} to {claim.high:.2f}, 99 %, {claim.pairs} fresh pairs) of: {words}",
        f"# The same training: loss off by at most {outcome.loss or 0:.1g} in {outcome.gate_steps} steps, "
        f"update cosine {outcome.cosine or 0:.4f}. Noise of the machine: {outcome.noise}.",
        fingerprint,
    ]
    groups = [(word, rung) for rung in outcome.rungs for word in rung.words if "." not in key_of(word)]
    lines = ["defaults:"] if groups or before != "none" else []
    lines += [f"  - /preset/{before}"] if before != "none" else []
    for word, rung in groups:
        group, _, option = word.partition("=")
        lines.append(f"  - override /{group}: {option} # {evidence(rung)}")
    values = [(word, rung) for rung in outcome.rungs for word in rung.words if "." in key_of(word)]
    return "\n".join([*head, *lines, *tree_lines(values)]) + "\n"


def evidence(rung: Rung) -> str:
    if rung.first_in is None and rung.last_out is None:
        return "all that was found" if rung.found is None else f"found at {rung.found}"
    told = [("alone", rung.first_in), ("the rest without it", rung.last_out)]
    return ", ".join(f"{name} {ratio}" for name, ratio in told if ratio is not None)


def tree_lines(values: Sequence[tuple[str, Rung]]) -> list[str]:
    """`trainer.num_threads=2` as nested YAML, each value with its evidence."""
    tree: dict[str, Any] = {}
    for word, rung in values:
        key, _, value = word.lstrip("+").partition("=")
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = f"{scalar(value)} # {evidence(rung)}"
    return _indented(tree, 0)


def _indented(tree: dict[str, Any], depth: int) -> list[str]:
    lines = []
    for name, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{name}:", *_indented(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {value}")
    return lines


def scalar(value: str) -> str:
    """As YAML reads it back: `off` is a word to Hydra, and false to YAML."""
    value = value.strip('"')
    return value if _PLAIN.match(value) or yaml.safe_load(value) == value else f'"{value}"'
