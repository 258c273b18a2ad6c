"""`trainrun convert SOURCE DEST --to FORMAT`: any data that a run can read, in a format that it reads fast."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from trainrun.cli.run_arguments import Parser, parse
from trainrun.config.argv import conf_dir, options, user_conf_dirs
from trainrun.config.compose import compose_run
from trainrun.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from trainrun.output import say

FORMATS = ("npy", "parquet", "lmdb", "tfrecord", "hdf5", "webdataset")
SHARDED = ("parquet", "tfrecord", "webdataset")
SPLITS = ("train", "val", "test")
NODES = tuple(f"data.{split}" for split in SPLITS)
KEYS = ("data.shape", "data.num_classes", "data.name", "data.path")


def main(argv: list[str]) -> int:
    """Write DEST, check a sample of it, and print the settings with which a run uses it."""
    asked = _checked(parse(convert_parser(), argv))
    from trainrun.convert.source import source_of

    dest = Path(asked.dest).expanduser()
    groups = options("data", [*user_conf_dirs([], Path.cwd()), conf_dir()])
    group, source = source_of(asked.source, asked.data, dest, groups)
    config = compose_run([*source, *asked.overrides]).config.data
    is_place = asked.data is not None or asked.source != group
    place = str(Path(asked.source).expanduser().absolute()) if is_place else asked.source
    arguments = [place, f"--to={asked.to}", f"--data={group}"]
    arguments += [f"--shard-size={asked.shard_size}"] if asked.shard_size else []
    from trainrun.convert.conversion import convert, parts_of
    from trainrun.runtime.machine import usable_cores

    num_workers = min(usable_cores(), 8) if asked.num_workers is None else asked.num_workers
    try:
        convert(
            asked.to, dest, lambda: parts_of(config), arguments + asked.overrides,
            asked.shard_size, num_workers, say,
        )  # fmt: skip
    except KeyboardInterrupt:
        say("trainrun: interrupted; the same words go on where it stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def convert_parser() -> Parser:
    parser = Parser(
        prog="trainrun convert", allow_abbrev=False,
        description="Converts data that a run can read into another format, with all its parts (data.val=null leaves "
        "one out). Run again with the same words, it goes on where it was stopped.",
    )  # fmt: skip
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a file or folder, or a data group as digits or custom")
    add("dest", metavar="DEST", help="a folder that does not exist")
    add("--to", required=True, choices=FORMATS, help="the format")
    add("--data", metavar="GROUP", help="the data group that reads SOURCE (default: by its ending)")
    add(
        "--shard-size",
        metavar="N",
        type=int,
        help=f"samples a file (default: about 128 MiB); {', '.join(SHARDED)}",
    )
    add("--num-workers", metavar="N", type=int, help="processes (default: one a core, up to 8)")
    settings = "settings of the source, as data.train.dtype=uint8"
    add("overrides", metavar="key=value", nargs="*", default=[], help=settings)
    return parser


def _checked(asked: Namespace) -> Namespace:
    """ConfigError: all arguments that cannot mean anything here."""
    errors = []
    for name, place in (("SOURCE", asked.source), ("DEST", asked.dest)):
        if "=" in place and not Path(place).expanduser().exists():
            errors.append(f"convert: {name} is missing before {place}; see trainrun convert --help")
    for setting in asked.overrides:
        key, equals, _ = setting.lstrip("+~").partition("=")
        if not equals or not (key in (*KEYS, *NODES) or key.startswith(tuple(f"{node}." for node in NODES))):
            errors.append(
                f"{setting}: means nothing to a conversion, which keeps what {', '.join(NODES)} give; allowed: "
                f"their settings, {', '.join(KEYS)}"
            )
    for flag, value, least in (
        ("--shard-size", asked.shard_size, 1),
        ("--num-workers", asked.num_workers, 0),
    ):
        if value is not None and value < least:
            errors.append(f"{flag} {value}: must be {least} or more")
    if asked.shard_size is not None and asked.to not in SHARDED:
        errors.append(f"--shard-size {asked.shard_size}: --to {asked.to} has one file a part; leave it out")
    if errors:
        raise ConfigError(*errors)
    return asked
