"""The words that the commands on a finished run have in common."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from trainrun.errors import ConfigError
from trainrun.output import say
from trainrun.rundir import RunDir
from trainrun.words.checks import nearest

FOLDER_FLAGS = ("--config-dir", "-cd")


class Parser(argparse.ArgumentParser):
    """argparse whose mistakes are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog.partition(' ')[2]}: {message}; see {self.prog} --help")


def run_parser(name: str, about: str) -> Parser:
    """A parser of RUN_DIR and key=value words."""
    parser = Parser(prog=f"trainrun {name}", description=about)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="single values to change"
    )
    add_trust(parser)
    return parser


def add_trust(parser: Parser) -> None:
    """What a folder names, and where it leads, is followed without a question only where it is the user's own."""
    parser.add_argument(
        "--trust", action="store_true", help="run the code that RUN_DIR names, and follow its links"
    )


def add_checkpoint(parser: Parser) -> None:
    parser.add_argument(
        "--which", help="best, last, or a checkpoint's name (default: best, or last without one)"
    )
    parser.add_argument("--split", default="val", choices=("val", "test"), help="which data (default: val)")


def checkpoint_of(run: RunDir, which: str | None) -> str:
    """What `--which` says; without it the best, or the last where no metric chose a best one."""
    from trainrun.checkpoint.ranking import best_checkpoint

    if which is not None:
        return which
    if best_checkpoint(run.checkpoints) is not None:
        return "best"
    say("note: no checkpoint of this run was chosen by a metric, so this is of the last", file=sys.stderr)
    return "last"


def known_and_words(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own flags, and the words of a run; of its flags only the folder of configs means something here."""
    found, words = parser.parse_known_args(argv)
    own = [name for action in parser._actions for name in action.option_strings]
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("-") and flag not in FOLDER_FLAGS:
            near = nearest(flag, own)
            raise ConfigError(f"{word}: no flag of {parser.prog}.{near} See {parser.prog} --help")
    return found, words


def parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Options and key=value words in any order."""
    return parser.parse_intermixed_args(argv)
