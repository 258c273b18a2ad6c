"""`trainrun autotune [settings of a run]`: try what `diagnose` names, and write the fastest settings as a preset; and
`trainrun autotune lr | batch`."""

from __future__ import annotations

import contextlib
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainrun.cli.run_arguments import Parser, known_and_words, take_seconds
from trainrun.errors import EXIT_DONE
from trainrun.output import masked_words, say

if TYPE_CHECKING:
    from trainrun.benchmark.tune.techniques import TechniqueTable
    from trainrun.benchmark.tune.tuner import Tuner, Tuning

SEARCH_SECONDS, TABLE_SECONDS = 120.0, 180.0
ABOUT = (
    "Takes the settings of a run, measures what it waits for as diagnose does, and tries the remedies on its own model "
    "and data, in turns with the best settings so far. Keeps the fastest, and repeats that until nothing is clearly "
    "faster. Writes conf/preset/tuned-HOST.yaml, which preset=tuned-HOST finds. Remedies that change the training (the "
    "batch, the order of samples, intervals) are measured too, and used only with --allow training. With --table it "
    "measures well-known techniques instead, each alone and then together; what hurts is shown as hurting."
)

FINDERS = {
    "lr": "A range test of the learning rate on the run's own model, data and optimizer: the loss while the rate grows "
    "from step to step, a picture, and a suggestion.",
    "batch": "The largest batch that fits into memory, the speed of those that do, and what the linear and the square "
    "root rule would make of the learning rate.",
}


def main(argv: list[str]) -> int:
    if argv[:1] in (["lr"], ["batch"]):
        return find(argv[0], argv[1:])
    default = TABLE_SECONDS if "--table" in argv else SEARCH_SECONDS
    argv, budget = take_seconds(argv, default, "autotune")
    wish, words = known_and_words(autotune_parser(), argv)
    from trainrun.benchmark.run_overrides import begin

    typed, folder = begin("autotune", words)
    from trainrun.benchmark.tune.preset_file import host_preset, preset_path

    preset = preset_path(wish.name or host_preset(), Path.cwd())
    if wish.table:
        return report_table(typed, measured_table(typed, budget), budget, folder)
    return report(wish, typed, measured(wish, typed, budget), budget, folder, preset)


def find(what: str, argv: list[str]) -> int:
    """`trainrun autotune lr` and `trainrun autotune batch`."""
    argv, budget = take_seconds(argv, SEARCH_SECONDS, f"autotune {what}") if what == "batch" else (argv, 0.0)
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
    wish, words = known_and_words(parser, argv)
    if what == "lr":
        from trainrun.benchmark.finders import lr_range

        return lr_range.main(wish, words, write_results)
    from trainrun.benchmark.finders import batch_size

    return batch_size.main(wish, words, budget, write_results)


def autotune_parser() -> Parser:
    parser = Parser(
        prog="trainrun autotune", description=ABOUT, allow_abbrev=False,
        usage="trainrun autotune [key=value ...] [--allow exact|numeric|training] [--budget SECONDS] "
        "[--name PRESET] [--table]\n       trainrun autotune lr|batch [key=value ...]",
    )  # fmt: skip
    parser.add_argument("--allow", choices=("exact", "numeric", "training"), default="exact",
                        help="what the preset may hold. exact (default): what leaves the training the same; "
                        "numeric: also what rounds differently, as bfloat16; training: also what changes the training "
                        "or its files, as the batch or the interval of checkpoints")  # fmt: skip
    parser.add_argument("--budget", metavar="SECONDS", help="in all (120; 180 for the table)")
    parser.add_argument("--name", metavar="PRESET", help="of the preset (tuned-HOST)")
    parser.add_argument(
        "--table", action="store_true", help="measure well-known techniques, and write no preset"
    )
    return parser


def measured(wish: Namespace, typed: list[str], budget: float) -> Tuning:
    """Nothing is written before the search ends: an interrupted one leaves no trace."""
    with tuner_of(typed, budget, wish.allow) as tuner:
        return tuner.run()


def measured_table(typed: list[str], budget: float) -> TechniqueTable:
    from trainrun.benchmark.tune.techniques import measure_table

    with tuner_of(typed, budget, "numeric") as tuner:
        return measure_table(tuner)


@contextlib.contextmanager
def tuner_of(typed: list[str], budget: float, allowed: str) -> Iterator[Tuner]:
    from trainrun.benchmark.budget import Budget
    from trainrun.benchmark.run_overrides import progress_line
    from trainrun.benchmark.tune.tuner import Tuner
    from trainrun.benchmark.worker_process import WorkerPool

    with WorkerPool() as pool, progress_line() as progress:
        yield Tuner(pool, typed, Budget(budget), progress, allowed)


def report(
    wish: Namespace, typed: list[str], tuning: Tuning, budget: float, folder: Path, preset: Path
) -> int:
    from trainrun.benchmark.run_overrides import shown
    from trainrun.benchmark.tune import tune_report
    from trainrun.benchmark.tune.preset_file import write_preset

    print_head(typed, tuning.seconds, budget)
    for line in tune_report.tuning_lines(tuning):
        say(line)
    if tuning.is_claimed:
        written = write_preset(preset, typed, tuning, Path.cwd())
        use = f"trainrun {shlex.join(written.use)}"
        if written.path is not None:
            say(f"wrote {shown(written.path)}; use it with: {use}")
        else:
            say(f"no preset: a setting of yours, or an experiment, stands above it; say: {use}")
    if wish.allow == "exact":
        say("not tried: number types and compilation of the model, which round differently (--allow numeric)")
    results = tune_report.as_plain(tuning)
    results |= {"found": list(tuning.found), "claimed": tuning.is_claimed, "verdict": tuning.verdict}
    write_results(folder, typed, results)
    say(f"details: {shown(folder / 'autotune.json')}")
    return EXIT_DONE


def report_table(typed: list[str], table: TechniqueTable, budget: float, folder: Path) -> int:
    from trainrun.benchmark.run_overrides import shown
    from trainrun.benchmark.tune import tune_report

    print_head(typed, table.seconds, budget)
    for line in tune_report.table_lines(table):
        say(line)
    rows = [tune_report.as_plain(row) | {"title": row.trial.cause, "alone": tune_report.as_plain(row.alone)}
            for row in table.rows]  # fmt: skip
    write_results(folder, typed, tune_report.as_plain(table) | {"rows": rows})
    say(f"details: {shown(folder / 'autotune.json')}")
    return EXIT_DONE


def print_head(typed: list[str], seconds: float, budget: float) -> None:
    from trainrun.config.tuned_settings import machine

    head = f"trainrun autotune {shlex.join(masked_words(typed))}".rstrip()
    say(f"{head} | {machine()} | {seconds:.0f} s of {budget:.0f} s")


def write_results(folder: Path, typed: list[str], results: dict[str, object]) -> None:
    from trainrun.config.tuned_settings import machine
    from trainrun.folder.run_folder import write_json

    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "autotune.json", {"machine": machine(), "words_typed": masked_words(typed), **results}
    )
