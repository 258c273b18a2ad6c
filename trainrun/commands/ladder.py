"""`trainrun ladder [the words of a run]`: the folklore of fast training, measured on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainrun.commands.arguments import Parser
from trainrun.commands.budget import take_seconds
from trainrun.errors import EXIT_DONE, ConfigError

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
    from trainrun.compose import compose_run
    from trainrun.lab.choices import plain_words
    from trainrun.lab.errand import new_folder

    composition = compose_run(words)
    for note in composition.notes:
        print(f"note: {note}", file=sys.stderr)
    folder = new_folder("ladder", composition.config.run_name or "run", composition.own.get("hydra.run.dir"))
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"output_dir={folder}: holds a run already; name another folder")
    typed = [word for word in plain_words(words) if not word.startswith("hydra.run.dir=")]
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
    from trainrun.lab.errand import end_of_progress, progress
    from trainrun.lab.ladder import Ladder
    from trainrun.parallel.launch import num_cores

    with Bench() as bench:
        try:
            return Ladder(typed, RealStand(bench), num_cores(), budget, progress()).run()
        finally:
            print(end_of_progress(), end="", flush=True)


def told(typed: list[str], found: Heights, budget: float, folder: Path) -> int:
    from trainrun.lab import ladder_report
    from trainrun.lab.errand import shown
    from trainrun.rundir import write_json
    from trainrun.tuned import machine

    head = f"trainrun ladder {' '.join(typed)}".rstrip()
    print(f"{head} | {machine()} | {found.seconds:.0f} s of {budget:.0f} s")
    print(ladder_report.table(found))
    for line in ladder_report.summary(found):
        print(line)
    write_json(folder / "ladder.json", {"machine": machine(), "words_typed": typed, **found.row()})
    picture = ladder_report.picture(found, folder / "ladder.png", head)
    print(f"details: {shown(folder / 'ladder.json')}, {picture.name}")
    return EXIT_DONE
