"""Plant known mistakes, one at a time, and see that the tests of their rooms notice each of them.

    python scripts/mutants.py                    every mistake of the table
    python scripts/mutants.py padding int8       those whose name has one of these words

Each mistake is planted in a temporary copy of the repository, where the named tests then run. The exit code is 1 if a
mistake survives: a test is missing. To add one: a row in `MUTANTS`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
COPIED: Final = ("trainrun", "conf", "tests", "scripts", "pyproject.toml", "README.md")
TESTS_FAILED: Final = 1  # pytest's exit code


class Mutant(NamedTuple):
    """A mistake: `old`, which is in the file once, becomes `new`. tests: of which at least one then fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS: Final = (
    Mutant(
        "padding_fraction returns the useful part",
        "trainrun/summary/throughput_limits.py",
        "return 1 - useful / max(positions, 1)",
        "return useful / max(positions, 1)",
        ("tests/runs/test_throughput_limits.py::test_the_share_of_padding_is_counted",),
    ),
    Mutant(
        "the claim of autotune has an interval of 50 %",
        "trainrun/benchmark/tune/tuner.py",
        "SURE: Final = 0.99",
        "SURE: Final = 0.50",
        ("tests/benchmark/test_tuner.py::test_claim_holds_the_truth_however_much_processes_differ",),
    ),
    Mutant(
        "an interval has the normal distribution's width",
        "trainrun/timing/paired.py",
        "half = student_t(confidence, count - 1) * stdev",
        "half = student_t(confidence, 100_000) * stdev",
        ("tests/timing/test_coverage.py::test_interval_over_processes_covers_what_it_claims",),
    ),
    Mutant(
        "turns of all processes count as processes",
        "trainrun/timing/paired.py",
        "logs = [median(math.log(second / first) for first, second in pairs) for pairs in groups]",
        "logs = [math.log(second / first) for pairs in groups for first, second in pairs]",
        ("tests/timing/test_coverage.py::test_interval_over_processes_covers_what_it_claims",),
    ),
    Mutant(
        "a comparison ends at the first look that seems clear",
        "trainrun/timing/paired.py",
        "EARLY: Final = 0.99",
        "EARLY: Final = 0.50",
        (
            "tests/timing/test_coverage.py::"
            "test_no_candidate_is_taken_more_often_than_allowed_where_none_is_faster",
        ),
    ),
    Mutant(
        "the test of learning rates gives every group the same one",
        "trainrun/benchmark/finders/lr_range.py",
        "set_lr(group, peak * rate / self._peaks[0])",
        "set_lr(group, rate)",
        ("tests/benchmark/test_finders.py::test_groups_keep_their_proportions_in_every_step",),
    ),
    Mutant(
        "int8 weights have 31 levels to each side",
        "trainrun/transform/int8.py",
        "LARGEST = 127",
        "LARGEST = 31",
        ("tests/smaller/test_smaller.py::test_weights_use_all_levels_of_a_byte",),
    ),
    Mutant(
        "quantize and prune print microseconds as milliseconds",
        "trainrun/smaller/new_run.py",
        "1e3 / speed",
        "1e6 / speed",
        ("tests/smaller/test_smaller.py::test_table_shows_milliseconds_a_sample_and_samples_a_second",),
    ),
    Mutant(
        "MLflow gets seconds as milliseconds",
        "trainrun/trackers/mlflow_run.py",
        "at = int(1000 * seconds)",
        "at = int(seconds)",
        ("tests/trackers/test_services.py::test_mlflow_gets_times_in_milliseconds",),
    ),
    Mutant(
        "histograms are of the gradients of another step",
        "trainrun/hook/histograms.py",
        "(run.monitors.step + 1) % self._every == 0",
        "run.monitors.step % self._every == 0",
        ("tests/hook/test_histograms.py::test_gradients_are_those_of_the_step_of_their_row",),
    ),
    Mutant(
        "autotune does not try data.cache=memory",
        "trainrun/benchmark/remedies.py",
        "else (CACHE, WORKERS_BY_RULE)",
        "else (WORKERS_BY_RULE,)",
        ("tests/benchmark/test_tuner.py::test_slow_items_are_thirteen_times_faster_from_memory",),
    ),
    Mutant(
        "autotune uses what changes the training without being asked to",
        "trainrun/benchmark/tune/tuner.py",
        "faster = [trial for trial in trials if trial.is_faster and self.is_allowed(trial.remedy)]",
        "faster = [trial for trial in trials if trial.is_faster]",
        (
            "tests/benchmark/test_tuner.py::"
            "test_remedy_that_changes_the_training_is_measured_but_used_only_if_allowed",
        ),
    ),
    Mutant(
        "a resumed run chooses the pieces of its logits anew",
        "trainrun/assemble/start_choices.py",
        'names = ("precision", "logits_bytes", ',
        'names = ("precision", ',
        ("tests/assemble/test_limit_outputs.py::test_resumed_run_takes_the_same_pieces",),
    ),
    Mutant(
        "logits are made in pieces while they fit",
        "trainrun/task/chunked_loss.py",
        "if limit_bytes is None or needed_bytes <= limit_bytes:",
        "if limit_bytes is None or 2 * needed_bytes <= limit_bytes:",
        ("tests/task/test_chunked_loss.py::test_step_takes_one_piece_up_to_the_limit",),
    ),
    Mutant(
        "diagnose takes the interval of saves for steps",
        "trainrun/benchmark/measured_run.py",
        "saves_a_step += step_seconds / seconds",
        "saves_a_step += 1 / seconds",
        (
            "tests/benchmark/test_diagnosis.py::test_cost_of_checkpoints_is_that_of_one_over_the_steps_between_two",
        ),
    ),
)


def copy_repository(folder: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)


def survives(mutant: Mutant, folder: Path) -> bool:
    """Plant a mistake in the copy, run its tests, and take it out again.

    Raises RuntimeError if the mistake cannot be planted, or if the tests cannot run.
    """
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.name}: {mutant.file} has {text.count(mutant.old)} times: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        done = run_tests(mutant.tests, folder)
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode not in (0, TESTS_FAILED):
        raise RuntimeError(
            f"{mutant.name}: its tests do not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 0


def run_tests(tests: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="of the names of the mistakes to plant; all without")
    wanted = parser.parse_args().words
    chosen = [one for one in MUTANTS if not wanted or any(word in one.name for word in wanted)]
    survivors = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_repository(folder)
        for mutant in chosen:
            survived = survives(mutant, folder)
            survivors += survived
            print(f"{'SURVIVES' if survived else 'killed':<9} {mutant.name} ({mutant.file})", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mistakes were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
