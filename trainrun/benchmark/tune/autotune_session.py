"""A search for faster settings, or a table of techniques: run it, print the result and write it."""

from __future__ import annotations

import contextlib
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from trainrun.benchmark.budget import Budget
from trainrun.benchmark.run_overrides import progress_line, relative_path, write_results
from trainrun.benchmark.tune import tune_report
from trainrun.benchmark.tune.preset_file import host_preset_name, preset_path, write_preset
from trainrun.benchmark.tune.techniques import TechniqueTable, measure_table
from trainrun.benchmark.tune.tuner import Tuner, Tuning
from trainrun.benchmark.worker_process import WorkerPool
from trainrun.config.tuned_settings import describe_machine
from trainrun.errors import EXIT_DONE
from trainrun.output import mask_arguments, say


def search_settings(wish: Namespace, typed: list[str], budget: float, folder: Path) -> int:
    """Run the search that the arguments of `trainrun autotune` describe. Return the exit code."""
    preset = preset_path(wish.name or host_preset_name(), Path.cwd())
    if wish.table:
        return report_table(typed, run_table(typed, budget), budget, folder)
    return report_search(wish, typed, run_search(wish, typed, budget), budget, folder, preset)


def run_search(wish: Namespace, typed: list[str], budget: float) -> Tuning:
    """Search for the fastest settings. Nothing is written before the end, so an interrupted search leaves no trace."""
    with open_tuner(typed, budget, wish.allow) as tuner:
        return tuner.run()


def run_table(typed: list[str], budget: float) -> TechniqueTable:
    with open_tuner(typed, budget, "numeric") as tuner:
        return measure_table(tuner)


@contextlib.contextmanager
def open_tuner(typed: list[str], budget: float, allowed: str) -> Iterator[Tuner]:
    with WorkerPool() as pool, progress_line() as progress:
        yield Tuner(pool, typed, Budget(budget), progress, allowed)


def report_search(
    wish: Namespace, typed: list[str], tuning: Tuning, budget: float, folder: Path, preset: Path
) -> int:
    print_head(typed, tuning.seconds, budget)
    for line in tune_report.tuning_lines(tuning):
        say(line)
    if tuning.is_claimed:
        written = write_preset(preset, typed, tuning, Path.cwd())
        use = f"trainrun {shlex.join(written.use)}"
        if written.path is not None:
            say(f"wrote {relative_path(written.path)}; use it with: {use}")
        else:
            say(f"no preset: a setting of yours, or an experiment, stands above it; say: {use}")
    if wish.allow == "exact":
        say("not tried: number types and compilation of the model, which round differently (--allow numeric)")
    results = tune_report.to_json_values(tuning)
    results |= {
        "found": list(tuning.best_settings),
        "claimed": tuning.is_claimed,
        "verdict": tuning.verdict,
    }
    write_results(folder, typed, results)
    say(f"details: {relative_path(folder / 'autotune.json')}")
    return EXIT_DONE


def report_table(typed: list[str], table: TechniqueTable, budget: float, folder: Path) -> int:
    print_head(typed, table.seconds, budget)
    for line in tune_report.table_lines(table):
        say(line)
    to_json = tune_report.to_json_values
    rows = [
        to_json(row) | {"title": row.trial.cause, "alone": to_json(row.speedup_alone)} for row in table.rows
    ]
    write_results(folder, typed, to_json(table) | {"rows": rows})
    say(f"details: {relative_path(folder / 'autotune.json')}")
    return EXIT_DONE


def print_head(typed: list[str], seconds: float, budget: float) -> None:
    head = f"trainrun autotune {shlex.join(mask_arguments(typed))}".rstrip()
    say(f"{head} | {describe_machine()} | {seconds:.0f} s of {budget:.0f} s")
