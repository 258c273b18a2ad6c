"""A command line in, an exit code out. No torch here: help and mistakes are answered before it could be imported."""

from __future__ import annotations

import os
import sys
import traceback

from trainrun.cli.commands import command_of, report_crash
from trainrun.errors import EXIT_INTERRUPTED, ConfigError, TrainrunError
from trainrun.output import say


def main(argv: list[str] | None = None) -> int:
    """Run one command line; every fault of the user's is one short message and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        check_surroundings(words)
        return command_of(words)()
    except TrainrunError as error:
        return report_fault(error)
    except KeyboardInterrupt as error:
        say(f"trainrun: {str(error) or 'interrupted'}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        return report_crash(error)


def check_surroundings(words: list[str]) -> None:
    """Raise ConfigError if the working directory is gone, and for words that are no text."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory is gone or closed ({error.strerror}); change to another one first"
        ) from error
    for word in words:
        if word != word.encode("utf-8", "replace").decode("utf-8"):
            raise ConfigError(f"{word}: not UTF-8; rename what it names, or reach it through a link")


def report_fault(error: TrainrunError) -> int:
    if os.environ.get("TRAINRUN_FULL_ERROR") == "1":
        say("".join(traceback.format_exception(error)), file=sys.stderr, end="")
    for line in str(error).splitlines():
        say(f"trainrun: {line}" if not line.startswith(" ") else line, file=sys.stderr)
    return error.exit_code
