"""`trainrun convert SOURCE DEST --to FORMAT`: convert any data that a run can read into a fast format."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from trainrun.cli.run_arguments import Parser, parse_arguments
from trainrun.config.argv import find_conf_dir, find_user_conf_dirs, list_options
from trainrun.config.compose import compose_run
from trainrun.convert.source import resolve_source
from trainrun.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError
from trainrun.output import say

FORMATS = ("npy", "parquet", "lmdb", "tfrecord", "hdf5", "webdataset")
SHARDED = ("parquet", "tfrecord", "webdataset")
SPLITS = ("train", "val", "test")
NODES = tuple(f"data.{split}" for split in SPLITS)
INTERRUPTED = (
    "trainrun: interrupted; run the same command again: it continues after the files that are written"
)
KEYS = ("data.shape", "data.num_classes", "data.name", "data.path")


def main(argv: list[str]) -> int:
    """Write DEST, check a sample of it, and print the settings with which a run uses it. Return the exit code."""
    options_given = check_arguments(parse_arguments(convert_parser(), argv))
    dest = Path(options_given.dest).expanduser()
    groups = list_options("data", [*find_user_conf_dirs([], Path.cwd()), find_conf_dir()])
    group, settings = resolve_source(options_given.source, options_given.data, dest, groups)
    config = compose_run([*settings, *options_given.overrides]).config.data
    is_path = options_given.data is not None or options_given.source != group
    source = str(Path(options_given.source).expanduser().absolute()) if is_path else options_given.source
    arguments = [source, f"--to={options_given.to}", f"--data={group}"]
    arguments += [f"--shard-size={options_given.shard_size}"] if options_given.shard_size else []
    arguments += options_given.overrides
    from trainrun.convert.conversion import convert, open_splits

    shard_size = options_given.shard_size
    try:
        convert(options_given.to, dest, lambda: open_splits(config), arguments, shard_size, say)
    except KeyboardInterrupt:
        say(INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def convert_parser() -> Parser:
    parser = Parser(
        prog="trainrun convert", allow_abbrev=False,
        description="Converts data that a run can read into another format, with all its splits (data.val=null leaves "
        "one out). Files of pictures stay as they are. If it was stopped, run the same command again.",
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
        help=f"samples per file (default: about 128 MiB); {', '.join(SHARDED)}",
    )
    settings = "settings of the source, as data.train.dtype=uint8"
    add("overrides", metavar="key=value", nargs="*", default=[], help=settings)
    return parser


def check_arguments(options: Namespace) -> Namespace:
    """Raise ConfigError that lists all arguments with no meaning for a conversion."""
    errors = []
    for name, path in (("SOURCE", options.source), ("DEST", options.dest)):
        if "=" in path and not Path(path).expanduser().exists():
            errors.append(f"convert: {name} is missing before {path}; see trainrun convert --help")
    for setting in options.overrides:
        key, equals, _ = setting.lstrip("+~").partition("=")
        if not equals or not (key in (*KEYS, *NODES) or key.startswith(tuple(f"{node}." for node in NODES))):
            errors.append(
                f"{setting}: means nothing to a conversion, which keeps what {', '.join(NODES)} give; allowed: "
                f"their settings, {', '.join(KEYS)}"
            )
    if options.shard_size is not None and options.shard_size < 1:
        errors.append(f"--shard-size {options.shard_size}: must be 1 or more")
    if options.shard_size is not None and options.to not in SHARDED:
        errors.append(
            f"--shard-size {options.shard_size}: --to {options.to} has one file a split; leave it out"
        )
    if errors:
        raise ConfigError(*errors)
    return options
