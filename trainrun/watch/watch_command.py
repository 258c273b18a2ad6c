"""`trainrun watch RUN_OR_SWEEP`: follow a run through its folder, from another terminal or machine."""

from __future__ import annotations

import shlex
import sys
import time

from trainrun.cli.run_arguments import Parser, add_trust_option
from trainrun.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from trainrun.folder.run_folder import RunDir, resolve_folder
from trainrun.folder.seal import check_files
from trainrun.folder.status import is_sweep
from trainrun.limits import parse_seconds
from trainrun.live.run_table import open_display, terminal_console
from trainrun.output import report_result, say
from trainrun.runs.run import open_run
from trainrun.watch.screen import RunsView, RunView, SweepView


def main(argv: list[str]) -> int:
    """Show the run until it ends. Return 0 if it ended normally, 1 if it failed or its process died."""
    parser = Parser(
        prog="trainrun watch", allow_abbrev=False,
        description="Follows a run or a sweep through its folder: state, step, losses, phases, devices. On a pipe it "
                    "prints lines. Ends with the run. Exit code 1 if the run failed or its process no longer exists.",
    )  # fmt: skip
    parser.add_argument(
        "folders", metavar="RUN_OR_SWEEP", nargs="+",
        help="the folder of a run or a sweep; several runs are shown as a table; other folders are skipped",
    )  # fmt: skip
    parser.add_argument("--every", metavar="TIME", default="1s", help="time between updates (default: 1s)")
    add_trust_option(parser)
    words = parser.parse_args(argv)
    try:
        every = words.every
        pause = max(
            parse_seconds(float(every) if every[-1:].isdigit() and ":" not in every else every) or 1.0, 0.05
        )
    except ValueError as error:
        raise ConfigError(f"--every {words.every}: {error}") from error
    view = open_view(words.folders, words.trust)
    view.read()
    if (console := terminal_console()) is not None:
        display = open_display(console, view.draw(console), is_erased=False)
        try:
            while not view.ended:
                time.sleep(pause)
                view.read()
                display.update(view.draw(console), refresh=True)
        finally:
            display.stop()
    else:
        while True:
            for line in view.lines():
                say(line, flush=True)
            if view.ended:
                break
            time.sleep(pause)
            view.read()
    report_result(ended=view.ended)
    if view.ended == "dead":
        say(
            "dead: nobody trains there any more, and the run did not end; continue with: trainrun resume "
            f"{shlex.quote(words.folders[0])}",
            file=sys.stderr,
        )
    return EXIT_FAILED if view.ended in ("failed", "dead") else EXIT_DONE


def open_view(words: list[str], trust: bool) -> RunView | RunsView:
    """Return the view of a run, a sweep, or several runs. Raise ConfigError if `words` names no run."""
    runs: list[RunDir] = []
    skipped: dict[str, ConfigError] = {}
    for word in words:
        folder = resolve_folder(word)
        if is_sweep(folder) and len(words) == 1:
            check_files(folder, trust)
            return SweepView(folder)
        try:
            runs.append(open_run(word))
        except ConfigError as error:
            skipped[word] = error
    if not runs:
        raise next(iter(skipped.values()))
    if skipped:
        say(f"note: skipped, no run: {', '.join(skipped)}", file=sys.stderr)
    for run in runs:
        check_files(run.root, trust)
    return RunView(runs[0]) if len(runs) == 1 else RunsView([run.root for run in runs])
