"""`trainrun diagnose [the words of a run]`: what the training waits for, measured by taking it away."""

from __future__ import annotations

import time

from trainrun.commands.arguments import Parser, known_and_words
from trainrun.commands.budget import take_seconds
from trainrun.errors import EXIT_DONE
from trainrun.output import say

BUDGET_SECONDS = 40.0
ABOUT = (
    "Takes the words of a run and measures, in a folder that is thrown away, how much faster it would be without "
    "loading, logging, validation, checkpoints, padding, the update: the real loop, in turns with itself. Says what it "
    "waits for, what this machine allows, and which words to try. Writes diagnosis.json and pictures."
)


def main(argv: list[str]) -> int:
    began = time.monotonic()
    argv, budget = take_seconds(argv, BUDGET_SECONDS, "diagnose")
    wish, words = known_and_words(diagnose_parser(), argv)
    from trainrun.lab.errand import begun, end_progress, progress, shown

    typed, folder = begun("diagnose", words)
    import trainrun.rank  # noqa: F401  # once, for all runs under test: they are copies of this process
    from trainrun.lab.diagnosis import diagnose
    from trainrun.lab.report import lines_of, write_report

    deadline, tell = began + budget, progress()
    try:
        found = diagnose(
            typed, deadline, lambda about: tell(about, max(deadline - time.monotonic(), 0.0)), wish.trace
        )
    finally:
        end_progress()
    say("\n".join(lines_of(found)))
    write_report(found, typed, folder)
    say(f"in {time.monotonic() - began:.0f} s; pictures and diagnosis.json: {shown(folder)}")
    return EXIT_DONE


def diagnose_parser() -> Parser:
    parser = Parser(
        prog="trainrun diagnose", description=ABOUT, allow_abbrev=False,
        usage="trainrun diagnose [key=value ...] [--budget SECONDS] [--trace]",
    )  # fmt: skip
    parser.add_argument("--budget", metavar="SECONDS", help="in all (40)")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also the operations that take most, and five steps as trace.json.gz for https://ui.perfetto.dev",
    )
    return parser
