"""`trainrun diagnose [settings of a run]`: find the bottleneck of a training by removing one cost after the other."""

from __future__ import annotations

from trainrun.benchmark.run_overrides import parse_command
from trainrun.cli.run_arguments import Parser, parse_flags_and_overrides, split_budget_option

BUDGET_SECONDS = 40.0
ABOUT = (
    "Measures how much faster a run would be without loading, logging, validation, checkpoints, padding or the "
    "update. Runs the real training loop in a temporary folder, alternating with and without each cost. Names the "
    "bottleneck and settings to try. Writes diagnosis.json."
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
    parser.add_argument("--budget", metavar="SECONDS", help="seconds in all (40)")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also print the slowest operations, and write five steps as trace.json.gz for https://ui.perfetto.dev",
    )
    return parser
