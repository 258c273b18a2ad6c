"""The words that the commands on a finished run have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn

from trainrun.errors import ConfigError


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


def parse(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Options and key=value words in any order."""
    return parser.parse_intermixed_args(argv)
