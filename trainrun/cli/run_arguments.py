"""Arguments that several commands share: a run folder with overrides, and `--budget SECONDS`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from trainrun.cli.json_output import FLAG as JSON_FLAG
from trainrun.config.argv import find_conf_dir, list_groups, translate_flag
from trainrun.config.validate import suggest_closest_name
from trainrun.errors import ConfigError
from trainrun.limits import parse_seconds
from trainrun.user_code import add_import_paths

LEAST_SECONDS = 5.0
SPLITS = ("val", "test")  # that a command may be about
SETTINGS = ("key=value", "single values to change")
FOLDER_FLAGS = ("--config-dir", "-cd")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake as a ConfigError of one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # taken from the command line before a parser sees it
        self.add_argument(
            JSON_FLAG, action="store_true", help="print the result as one JSON object, see help agents"
        )

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ").split(", ")
        helps = [
            action.help for action in self._actions if {*action.option_strings, action.metavar} & {*missing}
        ]
        if message.startswith("the following") and len(missing) == 1 and helps and helps[0]:
            message = f"add {missing[0]}: {helps[0]}"
        raise ConfigError(f"{self.prog.partition(' ')[2]}: {message}; see {self.prog} --help")


def build_run_parser(name: str, about: str, words: tuple[str, str] = SETTINGS) -> Parser:
    """Return a parser for RUN_DIR and key=value settings. words: name and description of the settings in the help."""
    parser = Parser(prog=f"trainrun {name}", description=about)
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="the folder of a run, or of a sweep (then its best run)"
    )
    parser.add_argument("overrides", metavar=words[0], nargs="*", default=[], help=words[1])
    parser.add_argument(
        *FOLDER_FLAGS, metavar="FOLDER", type=add_parent_to_import_path, action="append", default=[],
        help="the --config-dir of the run, if its code is beside that folder",
    )  # fmt: skip
    add_trust_option(parser)
    return parser


def add_parent_to_import_path(config_dir: str) -> str:
    """Add the parent folder of `config_dir` to the import path. Return the parent folder."""
    beside = str(Path(config_dir).resolve().parent)
    add_import_paths([beside])
    return beside


def add_trust_option(parser: Parser) -> None:
    """Add the flag `--trust`, which somebody else's run folder needs once."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="use a run folder from somebody else, with its code, files and links; needed once per folder",
    )


def add_checkpoint_options(parser: Parser) -> None:
    parser.add_argument(
        "--which", help="best, last, or a checkpoint's name (default: best, or last without one)"
    )
    parser.add_argument("--split", default="val", help="val, test, or a named set as val/day (default: val)")


def build_missing_split_error(there: Iterable[str], split: str) -> ConfigError:
    """Return the error for a `--split` that the run does not have. there: the splits that it has."""
    there = list(there)
    if split == "train":
        return ConfigError(f"--split train: is for held-out data; this run has {', '.join(there) or 'none'}")
    name = f"data.{split.replace('/', '.')}"
    problem = f"--split {split}: this run has no {name}."
    if split not in SPLITS and (suggestion := suggest_closest_name(split, [*there, *SPLITS])):
        return ConfigError(f"{problem}{suggestion}")
    choices = " or ".join(f"--split {set_name}" for set_name in there)
    if any(set_name.startswith(f"{split}/") for set_name in there):
        return ConfigError(f"{problem} Use {choices}")
    way = f"Use {choices}, or name" if there else "Name"
    return ConfigError(f"{problem} {way} the data: {name}._target_=...")


def parse_flags_and_overrides(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split arguments into the flags of the command itself and the overrides of a run.

    Raise ConfigError for an unknown flag. A flag that names a config folder is among the overrides.
    """
    flags = list_own_flags(parser)
    options, words = parser.parse_known_args(translate_flags(argv, flags))
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag not in FOLDER_FLAGS:
            near = suggest_closest_name(flag, flags)
            raise ConfigError(f"{word}: no flag of {parser.prog}.{near} See {parser.prog} --help")
    return options, words


def parse_arguments(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Parse the flags of a command and key=value overrides, in any order."""
    return parser.parse_intermixed_args(translate_flags(argv, list_own_flags(parser)))


def list_own_flags(parser: Parser) -> list[str]:
    return [name for action in parser._actions for name in action.option_strings]


def translate_flags(argv: list[str], own: list[str]) -> list[str]:
    """Return the arguments with flags such as `--batch-size 64` as `batch_size=64`. own: flags of the command, which
    stay.
    """
    words, rest, known_groups = [], list(argv), list_groups([find_conf_dir()])
    while rest:
        word = rest.pop(0)
        flag = word.partition("=")[0]
        is_own = any(name.startswith(flag) for name in own)
        setting = "" if is_own else translate_flag(word, rest, known_groups)[0]
        words.append(setting or word)
    return words


def split_budget_option(argv: list[str], default: float, command: str) -> tuple[list[str], float]:
    """Remove `--budget 120` or `--budget=2m` from the arguments. Return the other arguments and the budget in
    seconds.

    Raise ConfigError for a value that is not a duration.
    """
    rest: list[str] = []
    seconds = default
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--budget":
            rest.append(word)
            continue
        text = value if equals else next(words, "")
        try:
            duration = parse_seconds(float(text) if text.replace(".", "", 1).isdigit() else text or None)
        except ValueError:
            duration = None
        if duration is None or duration < LEAST_SECONDS:
            raise ConfigError(
                f"{command}: --budget {text}: must be {LEAST_SECONDS:g} seconds or more, as 60 or 2m"
            )
        seconds = duration
    return rest, seconds
