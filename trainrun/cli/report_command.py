"""`trainrun report RUN_DIR...`: draw the plots of runs again. `trainrun compare`: show several runs side by side."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainrun.cli.run_arguments import Parser, add_trust_option
from trainrun.config.overrides import load_tracker_nodes
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.folder.lock import lock_run_folder
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.folder.seal import check_files, check_seal
from trainrun.folder.status import find_named_run
from trainrun.monitor.metric_rows import read_metric_rows
from trainrun.output import format_count, report_result, say
from trainrun.plots.history import read_config
from trainrun.plots.report import draw_report
from trainrun.plots.run_curves import draw_run_plots
from trainrun.trackers.sender import send_all_rows


def compare_command(argv: list[str]) -> int:
    """Print what differs between runs, and write `compare.html`."""
    parser = Parser(
        prog="trainrun compare", allow_abbrev=False,
        description="Prints the differences between runs: settings, environment, data and results. Writes "
                    "compare.html with their curves.",
    )  # fmt: skip
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="the folder of a run")
    add_output_option(parser)
    words = parser.parse_args(argv)
    runs = find_reported_runs(words)
    if len(runs) < 2:
        raise ConfigError(
            f"compare {words.run_dirs[0]}: compare needs two or more runs; for one run use trainrun report"
        )
    with convert_write_errors():
        draw_comparison(runs, words.out)
    return EXIT_DONE


def main(argv: list[str]) -> int:
    """Draw `plots/*.png` and `report.html` of each run, and `compare.html` for several."""
    parser = Parser(
        prog="trainrun report", allow_abbrev=False,
        description="Draws the plots and report.html of runs again from their logs. Several runs are also compared in "
                    "compare.html.",
    )  # fmt: skip
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="the folder of a run")
    parser.add_argument(
        "--to", metavar="NAME", type=lambda text: text.split(","), default=[],
        help="send all logged rows to a tracker, as wandb or wandb,mlflow",
    )  # fmt: skip
    add_output_option(parser)
    words = parser.parse_args(argv)
    runs = find_reported_runs(words)
    if words.to:
        for run in runs:
            send_rows(run, words.to, words.trust)
        return EXIT_DONE
    if words.out is not None and len(runs) == 1:
        raise ConfigError(
            f"--out={words.out}: needs several runs; the pictures of one run are written to its own folder"
        )
    with convert_write_errors():
        reports = []
        for run in runs:
            pictures = draw_run_plots(run)
            reports.append(draw_report(run))
            say(f"{reports[-1]}  (pictures: {len(pictures)}, in {run.plots})")
        report_result(reports=reports)
        if len(runs) > 1:
            draw_comparison(runs, words.out)
    return EXIT_DONE


def add_output_option(parser: Parser) -> None:
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="folder of the comparison (default: beside the first run)"
    )
    add_trust_option(parser)


def find_reported_runs(words: Namespace) -> list[RunDir]:
    """Return the runs that the arguments name. Raise ConfigError if no argument names one.

    Arguments without a run are listed in a note.
    """
    runs: list[RunDir] = []
    skipped: dict[str, ConfigError] = {}
    for word in words.run_dirs:
        try:
            runs.append(find_logged_run(word))
        except ConfigError as error:
            skipped[word] = error
    if not runs:
        raise next(iter(skipped.values()))
    if skipped:
        say(f"note: skipped, no run: {', '.join(skipped)}", file=sys.stderr)
    runs = list(dict.fromkeys(runs))
    for run in runs:
        check_files(run.root, words.trust)
    return runs


@contextmanager
def convert_write_errors() -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError about the path."""
    try:
        yield
    except BrokenPipeError:  # of who reads what is printed
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename or 'report'}: cannot write in it ({error.strerror})") from error


def draw_comparison(runs: list[RunDir], out: Path | None) -> None:
    from trainrun.plots.compare import compare_runs as compared

    comparison = compared(runs, out or runs[0].root.parent)
    say(f"\n{comparison.table}\n\n{comparison.further}\n")
    say(comparison.file)
    report_result(page=comparison.file, runs=comparison.columns)


def send_rows(run: RunDir, names: list[str], trust: bool) -> None:
    """Send all metric rows of a run to each named tracker, with the arguments that the run's config has for it."""
    check_seal(run, trust)
    config, tracker_options = read_config(run), load_tracker_nodes()
    nodes = {name: node for name, node in config.get("monitor", {}).items() if isinstance(node, dict)}
    if wrong := [name for name in names if name not in tracker_options | nodes]:
        raise ConfigError(f"--to {wrong[0]}: no such tracker; there are {', '.join(tracker_options | nodes)}")
    rows = read_metric_rows(run.metrics)
    facts = {"name": config.get("run_name") or run.root.name, "run_id": read_identity(run)["run_id"]}
    facts |= {"folder": str(run.root), "config": config}
    sent = {}
    for name in names:
        with lock_run_folder(run):
            sent[name] = send_all_rows(run, name, (tracker_options | nodes)[name], facts, rows)
        say(f"{name}: {format_count(sent[name], 'row')} sent")
    report_result(sent=sent)


def find_logged_run(word: str) -> RunDir:
    """Return a run that has metrics; for a sweep, its best run. Raise ConfigError if there is none."""
    run = find_named_run(word)
    if run.metrics.is_file():
        return run
    if run.config.is_file():
        raise ConfigError(
            f"{word}: this run has no {run.metrics.name}, so nothing can be drawn. Runs write it with "
            "monitor.metrics_file=true"
        )
    reason = "no run is in this folder" if run.root.is_dir() else "no such folder"
    if run.root.is_file():
        reason = "is a file"
    raise ConfigError(
        f"{word}: {reason} (no {run.metrics.name}); give the folder that a run has named as its own"
    )
