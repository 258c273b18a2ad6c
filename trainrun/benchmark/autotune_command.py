"""`trainrun autotune [settings of a run]`: try the remedies that `diagnose` names, and write the fastest settings as
a preset.

`trainrun autotune lr | batch` searches a learning rate or a batch size instead.
"""

from __future__ import annotations

from trainrun.benchmark.run_overrides import parse_command
from trainrun.cli.run_arguments import Parser, parse_flags_and_overrides, split_budget_option

SEARCH_SECONDS, TABLE_SECONDS = 120.0, 180.0
ABOUT = (
    "Finds the bottleneck of a run like diagnose, and tries the remedies with your model and data, alternating with "
    "the best settings so far. Keeps the fastest, and repeats this until nothing is clearly faster. Writes "
    "conf/preset/tuned-HOST.yaml; use it with preset=tuned-HOST. Remedies that change the training (batch, order of "
    "samples, intervals) are measured too, but used only with --allow training. With --table it measures well-known "
    "techniques instead, each alone and then together."
)

FINDERS = {
    "lr": "A range test of the learning rate on the run's own model, data and optimizer: the loss while the rate grows "
    "from step to step, a picture, and a suggestion.",
    "batch": "The largest batch that fits into memory, the speed of those that do, and what the linear and the square "
    "root rule would make of the learning rate.",
}


def main(argv: list[str]) -> int:
    if argv[:1] in (["lr"], ["batch"]):
        return find_lr_or_batch(argv[0], argv[1:])
    default = TABLE_SECONDS if "--table" in argv else SEARCH_SECONDS
    argv, budget = split_budget_option(argv, default, "autotune")
    wish, words = parse_flags_and_overrides(autotune_parser(), argv)
    typed, folder = parse_command("autotune", words)  # mistakes are answered without torch
    from trainrun.benchmark.tune.autotune_session import search_settings

    return search_settings(wish, typed, budget, folder)


def find_lr_or_batch(what: str, argv: list[str]) -> int:
    """Run `trainrun autotune lr` or `trainrun autotune batch`. Return the exit code."""
    argv, budget = (
        split_budget_option(argv, SEARCH_SECONDS, f"autotune {what}") if what == "batch" else (argv, 0.0)
    )
    parser = Parser(prog=f"trainrun autotune {what}", description=FINDERS[what], allow_abbrev=False,
                    usage=f"trainrun autotune {what} [key=value ...] [options]")  # fmt: skip
    if what == "lr":
        parser.add_argument("--low", type=float, default=1e-6, metavar="RATE", help="the first rate (1e-6)")
        parser.add_argument("--high", type=float, default=10.0, metavar="RATE", help="the last rate (10)")
        parser.add_argument("--steps", type=int, default=100, metavar="N", help="of the test (100)")
    else:
        parser.add_argument("--budget", metavar="SECONDS", help="in all, about (120)")
        parser.add_argument(
            "--memory", type=float, metavar="GB", help="on a CPU, of one process (what is free)"
        )
    wish, words = parse_flags_and_overrides(parser, argv)
    from trainrun.benchmark.finders import batch_size, lr_range  # they import torch

    return lr_range.main(wish, words) if what == "lr" else batch_size.main(wish, words, budget)


def autotune_parser() -> Parser:
    parser = Parser(
        prog="trainrun autotune", description=ABOUT, allow_abbrev=False,
        usage="trainrun autotune [key=value ...] [--allow exact|numeric|training] [--budget SECONDS] "
        "[--name PRESET] [--table]\n       trainrun autotune lr|batch [key=value ...]",
    )  # fmt: skip
    parser.add_argument("--allow", choices=("exact", "numeric", "training"), default="exact",
                        help="what the preset may contain. exact (default): settings that do not change the training; "
                             "numeric: also settings that round differently, as bfloat16; training: also settings "
                             "that change the training or its files, as the batch or checkpoints")  # fmt: skip
    parser.add_argument("--budget", metavar="SECONDS", help="seconds in all (120; 180 for the table)")
    parser.add_argument("--name", metavar="PRESET", help="name of the preset (tuned-HOST)")
    parser.add_argument(
        "--table", action="store_true", help="measure well-known techniques, and write no preset"
    )
    return parser
