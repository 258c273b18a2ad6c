"""`trainrun diagnose [settings of a run]`: what the training waits for, measured by taking it away."""

from __future__ import annotations

from trainrun.cli.run_arguments import Parser, known_and_words, take_seconds
from trainrun.errors import EXIT_DONE
from trainrun.output import say

BUDGET_SECONDS = 40.0
ABOUT = (
    "Takes the settings of a run and measures, in a folder that is thrown away, how much faster it would be without "
    "loading, logging, validation, checkpoints, padding, the update: the real loop, in turns with itself. Says what it "
    "waits for, what this machine allows, and which settings to try. Writes diagnosis.json."
)


def main(argv: list[str]) -> int:
    from trainrun.benchmark.budget import Budget

    argv, seconds = take_seconds(argv, BUDGET_SECONDS, "diagnose")
    budget = Budget(seconds)
    wish, words = known_and_words(diagnose_parser(), argv)
    from trainrun.benchmark.run_overrides import begin, progress_line, shown

    typed, folder = begin("diagnose", words)
    from trainrun.benchmark.diagnose.diagnosis import diagnose
    from trainrun.benchmark.diagnose.diagnosis_report import lines_of, write_report

    with progress_line() as progress:
        diagnosis = diagnose(typed, budget, progress, wish.trace)
    say("\n".join(lines_of(diagnosis)))
    write_report(diagnosis, typed, folder)
    say(f"in {budget.spent:.0f} s; details: {shown(folder / 'diagnosis.json')}")
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
