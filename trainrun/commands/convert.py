"""`trainrun convert SOURCE DEST --to FORMAT`: any data that a run can read, in a format that it reads fast."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainrun.commands.arguments import Parser, parse
from trainrun.commands.convert_words import (
    SPLITS,
    checked_words,
    how_to_use,
    source_of,
    test_words,
    with_dest,
)
from trainrun.config import DataConfig
from trainrun.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, DataError
from trainrun.output import say
from trainrun.words.compose import compose_run

if TYPE_CHECKING:
    from trainrun.data.convert.samples import Samples
    from trainrun.data.convert.use import Conversion

FORMATS = ("npy", "parquet", "lmdb", "tfrecord", "webdataset")


def main(argv: list[str]) -> int:
    """Writes DEST, checks a sample of it, and prints the words with which a run uses it."""
    words = checked_words(parse(convert_parser(), argv))
    dest = Path(words.dest).expanduser()
    group, source = source_of(words)
    config = compose_run([*source, *words.overrides]).config.data
    asked = journal_words(words, group)
    from trainrun.data.convert.journal import check_place
    from trainrun.data.convert.lock import locked

    check_place(dest, asked)
    try:
        with locked(dest):
            journal = check_place(dest, asked)
            return convert(words, dest, config, parts_of(config, words.split), asked, journal)
    except KeyboardInterrupt:
        say("trainrun: interrupted; the same words go on where it stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def convert_parser() -> Parser:
    parser = Parser(
        prog="trainrun convert", allow_abbrev=False,
        description="Converts data that a run can read into another format, with all its parts. Run again "
        "with the same words, it goes on where it was stopped.",
    )  # fmt: skip
    parser.add_argument(
        "source", metavar="SOURCE", help="a file or folder, or a data group as digits or custom"
    )
    parser.add_argument("dest", metavar="DEST", help="a folder that does not exist")
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format")
    parser.add_argument(
        "--data", metavar="GROUP", help="the data group that reads SOURCE (default: by its ending)"
    )
    parser.add_argument("--split", choices=SPLITS, help="one part alone (default: all that are configured)")
    parser.add_argument(
        "--shard-size",
        metavar="N",
        type=int,
        help="samples a file (default: about 128 MiB); not of npy and lmdb",
    )
    parser.add_argument(
        "--num-workers", metavar="N", type=int, help="processes (default: one a core, up to 8)"
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="settings of the source, as data.train.dtype=uint8",
    )
    return parser


def journal_words(words: Namespace, group: str) -> list[str]:
    """What changes the content of DEST."""
    is_place = words.data is not None or words.source != group
    source = str(Path(words.source).expanduser().absolute()) if is_place else words.source
    asked = [source, f"--to={words.to}", f"--data={group}"]
    asked += [f"--split={words.split}"] if words.split else []
    asked += [f"--shard-size={words.shard_size}"] if words.shard_size else []
    return asked + list(words.overrides)


def parts_of(config: DataConfig, split: str | None) -> dict[str, Samples]:
    """The parts that the config has, or the one that is asked for."""
    from trainrun.data.convert.samples import Samples
    from trainrun.instantiate import bind_faults, build

    nodes = {name: getattr(config, name) for name in SPLITS}
    if split is not None and not nodes[split]:
        there = ", ".join(name for name, node in nodes.items() if node)
        raise ConfigError(f"--split {split}: the data has no data.{split}; it has {there}")
    chosen = {name: node for name, node in nodes.items() if node and split in (None, name)}
    faults = [fault for name, node in chosen.items() for fault in bind_faults(node, f"data.{name}")]
    if faults:
        raise ConfigError(*faults)
    return {name: Samples(build(node, f"data.{name}"), f"data.{name}") for name, node in chosen.items()}


def convert(words: Namespace, dest: Path, config: DataConfig, parts: dict[str, Samples], asked: list[str],
            journal: Any) -> int:  # fmt: skip
    """From parts to a folder that is complete and checked."""
    from rich.console import Console

    from trainrun.data.choice import usable_cores
    from trainrun.data.convert.files import writing_to
    from trainrun.data.convert.identity import identity_of
    from trainrun.data.convert.journal import Journal, check_source
    from trainrun.data.convert.use import GROUPS, conversion_of, paths_in
    from trainrun.data.convert.work import write_parts

    identity = identity_of({name: getattr(config, name) for name in parts}, parts)
    if journal is not None:
        check_source(dest, journal, identity)
    conversion = conversion_of(words.to, dest, parts, words.shard_size)
    use = [f"data={GROUPS[words.to]}", *paths_in(words.to, list(parts)), *conversion.words]
    if line := held_out_line(config, parts):
        say(line)
    with writing_to(dest):
        dest.mkdir(parents=True, exist_ok=True)
        if journal is None:
            Journal(asked, identity, use=use).write(dest)
    num_workers = min(usable_cores(), 8) if words.num_workers is None else words.num_workers
    write_parts(dest, conversion.targets, parts, num_workers, Console(highlight=False), say)
    count = read_back(words.to, dest, parts, conversion, use)
    test = test_words(words.to, use) if "test" in parts and len(parts) > 1 else []
    files = {str(file.relative_to(dest)): file.stat().st_size
             for target in conversion.targets.values() for file in target.files}  # fmt: skip
    with writing_to(dest):
        Journal(asked, identity, True, use, test, files).write(dest)
    say(
        f"{dest}: {len(files)} files, {sum(files.values()) / 1e6:,.1f} MB; {count} samples read back are the same"
    )
    say(how_to_use(words.to, dest, list(parts), use, test))
    return EXIT_DONE


def read_back(to: str, dest: Path, parts: dict[str, Samples], conversion: Conversion, use: list[str]) -> int:
    """How many samples were read as a run reads them, and are what the source gives."""
    from trainrun.data.convert.check import check_back
    from trainrun.data.convert.samples import Samples
    from trainrun.data.convert.use import node_of
    from trainrun.instantiate import build

    config = compose_run(with_dest(use, dest)).config.data
    count = 0
    for number, (split, samples) in enumerate(parts.items()):
        if to == "npy" or (split == "test" and number > 0):
            node = node_of(to, config.train, str(dest), split)
        else:
            node = config.val if number > 0 else config.train
        try:
            found = Samples(build(node, f"data.{split}"), f"data.{split}")
        except DataError as error:
            raise DataError(f"{dest}: cannot be read back: {error}") from error
        count += check_back(samples, found, conversion.exact)
    return count


def held_out_line(config: DataConfig, parts: dict[str, Samples]) -> str:
    """Says that the source was divided as a run divides it; empty where its parts are its own."""
    from trainrun.data.convert.samples import Samples
    from trainrun.instantiate import build

    node = config.train or {}
    fraction = node.get("val_fraction") or 0
    if not fraction or node.get("val_path") or not {"train", "val"} <= set(parts):
        return ""
    number = len(parts["train"]) + len(parts["val"])
    if abs(len(parts["val"]) - fraction * number) > 1 + (parts["train"].num_classes or 0):
        return ""
    try:
        if len(Samples(build({**node, "val_fraction": 0.0}, "data.train"), "data.train")) != number:
            return ""
    except DataError:
        return ""
    return (
        f"val is the part of the training data that a run holds out (data.train.val_fraction={fraction:g}); all of "
        "it as train: data.val=null data.train.val_fraction=0"
    )
