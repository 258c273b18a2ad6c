"""`trainrun ladder [the words of a run]`: the folklore of fast training, measured on it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from trainrun.commands.arguments import Parser
from trainrun.commands.budget import take_seconds
from trainrun.errors import EXIT_DONE
from trainrun.masking import masked_words
from trainrun.output import say

if TYPE_CHECKING:
    from trainrun.lab.ladder import Heights

BUDGET_SECONDS = 180.0
ABOUT = (
    "Takes the words of a run and measures on its own model and data what everybody says makes training fast: "
    "batches, workers, resident data, precision, layout, accumulation, compilation, kernels, threads, monitoring; "
    "each alone, and on top of those before it. What hurts is shown as hurting. Writes a table and ladder.png."
)


def main(argv: list[str]) -> int:
    argv, budget = take_seconds(argv, BUDGET_SECONDS, "ladder")
    _, words = ladder_parser().parse_known_args(argv)
    from trainrun.lab.errand import begun

    typed, folder = begun("ladder", words)
    return told(typed, measured(typed, budget), budget, folder)


def ladder_parser() -> Parser:
    parser = Parser(
        prog="trainrun ladder", description=ABOUT, allow_abbrev=False,
        usage="trainrun ladder [key=value ...] [--budget SECONDS]",
    )  # fmt: skip
    parser.add_argument("--budget", metavar="SECONDS", help="in all (180)")
    return parser


def measured(typed: list[str], budget: float) -> Heights:
    """Nothing is written before it ends: an interrupted ladder leaves no trace."""
    import trainrun.rank  # noqa: F401 - torch, ahead of the bench: until that one holds signals, Ctrl-C just leaves
    from trainrun.lab.bench import Bench
    from trainrun.lab.contender import RealStand
    from trainrun.lab.errand import end_progress, progress
    from trainrun.lab.ladder import Ladder
    from trainrun.parallel.launch import num_cores

    with Bench() as bench:
        try:
            return Ladder(typed, RealStand(bench), num_cores(), budget, progress()).run()
        finally:
            end_progress()


def told(typed: list[str], found: Heights, budget: float, folder: Path) -> int:
    from trainrun.lab import ladder_report
    from trainrun.lab.errand import shown
    from trainrun.rundir import write_json
    from trainrun.words.tuned import machine

    head = f"trainrun ladder {shlex.join(masked_words(typed))}".rstrip()
    say(f"{head} | {machine()} | {found.seconds:.0f} s of {budget:.0f} s")
    say(ladder_report.table(found))
    for line in ladder_report.summary(found):
        say(line)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "ladder.json", {"machine": machine(), "words_typed": masked_words(typed), **found.row()}
    )
    picture = ladder_report.picture(found, folder / "ladder.png", head)
    say(f"details: {shown(folder / 'ladder.json')}, {picture.name}")
    return EXIT_DONE
