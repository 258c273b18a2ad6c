"""`trainrun diagnose [settings of a run]`: find the bottleneck of a training by removing one cost after the other."""

from __future__ import annotations

from trainrun.benchmark.run_overrides import parse_command
from trainrun.cli.run_arguments import Parser, parse_flags_and_overrides, split_budget_option

BUDGET_SECONDS = 40.0
ABOUT = (
    "Takes the settings of a run and measures, in a folder that is thrown away, how much faster it would be without "
    "loading, logging, validation, checkpoints, padding, the update: the real loop, in turns with itself. Says what it "
    "waits for, what this machine allows, and which settings to try. Writes diagnosis.json."
)


def main(argv: list[str]) -> int:
    argv, seconds = split_budget_option(argv, BUDGET_SECONDS, "diagnose")
    wish, words = parse_flags_and_overrides(diagnose_parser(), argv)
    typed, folder = parse_command("diagnose", words)  # mistakes are answered without torch
    from trainrun.benchmark.diagnose.diagnosis_report import report_diagnosis

    return report_diagnosis(typed, seconds, wish.trace, folder)


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
