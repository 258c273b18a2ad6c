"""The words of `trainrun convert`: what SOURCE is, which settings mean something, and the words of a run."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from trainrun.config import conf_dir, options, user_conf_dirs
from trainrun.errors import ConfigError
from trainrun.words.compose import compose_run

SHARDED = ("parquet", "tfrecord", "webdataset")
SPLITS = ("train", "val", "test")
KEYS = ("data.shape", "data.num_classes", "data.name", "data.path")
NODES = tuple(f"data.{split}" for split in SPLITS)
DEST = "{dest}"
PLAIN = re.compile(r"[\w./~*?-]+")


def checked_words(words: Namespace) -> Namespace:
    """ConfigError: all words that cannot mean anything here."""
    faults = []
    for name, place in (("SOURCE", words.source), ("DEST", words.dest)):
        if "=" in place and not Path(place).expanduser().exists():
            faults.append(f"convert: {name} is missing before {place}; see trainrun convert --help")
    for word in words.overrides:
        key = word.lstrip("+~").partition("=")[0]
        if "=" not in word or not (
            key in KEYS or key.startswith(tuple(f"{node}." for node in NODES)) or key in NODES
        ):
            faults.append(
                f"{word}: means nothing to a conversion, which keeps what {', '.join(NODES)} give; allowed: "
                f"their settings, {', '.join(KEYS)}"
            )
    for flag, value in (("--shard-size", words.shard_size), ("--num-workers", words.num_workers)):
        if value is not None and value < (1 if flag == "--shard-size" else 0):
            faults.append(f"{flag} {value}: must be {'1' if flag == '--shard-size' else '0'} or more")
    if words.shard_size is not None and words.to not in SHARDED:
        faults.append(f"--shard-size {words.shard_size}: --to {words.to} has one file a part; leave it out")
    if faults:
        raise ConfigError(*faults)
    return words


def source_of(words: Namespace) -> tuple[str, list[str]]:
    """The data group, and the words that compose it."""
    groups = options("data", [*user_conf_dirs([], Path.cwd()), conf_dir()])
    if words.data is not None and words.data not in groups:
        raise ConfigError(f"--data {words.data}: no such data group; allowed: {', '.join(groups)}")
    if words.data is None and words.source in groups:
        if Path(words.source).exists():
            raise ConfigError(
                f"{words.source}: is a data group and a place here; write ./{words.source} for the place"
            )
        return words.source, [f"data={words.source}"]
    if words.data is None and (earlier := converted_before(Path(words.source).expanduser())):
        return "converted", earlier
    from trainrun.data.convert.guess import kind_of

    group = words.data or kind_of(words.source, groups)
    dest, place = Path(words.dest).expanduser().resolve(), Path(words.source).expanduser().resolve()
    if dest.is_relative_to(place):
        raise ConfigError(f"{words.dest}: lies in SOURCE, which must not change; name a folder elsewhere")
    return group, [f"data={group}", f"data.path={quoted(words.source)}"]


def converted_before(place: Path) -> list[str]:
    """The words of a folder that a conversion has written."""
    if not place.is_dir():
        return []
    from trainrun.data.convert.journal import read_journal

    journal = read_journal(place)
    if journal is None:
        return []
    if not journal.complete:
        raise ConfigError(
            f"{place}: is a conversion that is not finished; finish it first with its own words"
        )
    return with_dest([*journal.use, *journal.use_test], place)


def with_dest(words: list[str], dest: Path) -> list[str]:
    """The words of a run with DEST in its place, as Hydra takes them."""
    filled = []
    for word in words:
        key, _, value = word.partition("=")
        filled.append(f"{key}={quoted(value.replace(DEST, str(dest)))}" if DEST in value else word)
    return filled


def quoted(value: str) -> str:
    """A value as Hydra reads it back unchanged."""
    if PLAIN.fullmatch(value) and not value.isdigit():
        return value
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return f"'{escaped}'"


def test_words(to: str, use: list[str]) -> list[str]:
    """The node of the test data of its own, word by word, with DEST left open."""
    from trainrun.data.convert.use import node_of

    train = compose_run(with_dest(use, Path(DEST))).config.data.train
    node = node_of(to, train, DEST, "test")
    return [f"data.test.{key}={written(value)}" for key, value in node.items() if value is not None]


def written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(written(item) for item in value)}]"
    if isinstance(value, str):
        return value if DEST in value else quoted(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def how_to_use(to: str, dest: Path, splits: list[str], use: list[str], test: list[str]) -> str:
    """The last lines on the screen."""
    if to == "npy" and "train" not in splits:
        names = ", ".join(f"x_{split}.npy" for split in splits)
        return f"use it with data=arrays: move {names} (and y) beside an x_train.npy"
    lines = [f"use it with: {' '.join(map(shlex.quote, with_dest(use, dest)))}"]
    if test:
        lines.append(f"with test data: {' '.join(map(shlex.quote, with_dest(test, dest)))}")
    return "\n".join(lines)
