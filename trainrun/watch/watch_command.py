"""`trainrun watch RUN_OR_SWEEP`: follow a run through its folder alone, from another terminal or machine."""

from __future__ import annotations

import sys
import time

from trainrun.cli.run_arguments import Parser, add_trust
from trainrun.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from trainrun.folder.run_folder import named_folder
from trainrun.folder.seal import check_files
from trainrun.limits import parse_seconds
from trainrun.output import say
from trainrun.runs.run import open_run
from trainrun.watch.screen import RunView, SweepView


def main(argv: list[str]) -> int:
    """Draw until it ends; the exit code says whether it ended well."""
    parser = Parser(
        prog="trainrun watch", allow_abbrev=False,
        description="Follows a run or a sweep through its folder: state, step, losses, phases, devices. On a pipe "
        "it prints lines. Ends with the run: 0, or 1 where that failed or died.",
    )  # fmt: skip
    parser.add_argument("folder", metavar="RUN_OR_SWEEP", help="the folder of a run or a sweep")
    parser.add_argument("--every", metavar="TIME", default="1s", help="between looks (default: 1s)")
    add_trust(parser)
    words = parser.parse_args(argv)
    try:
        every = words.every
        pause = max(
            parse_seconds(float(every) if every[-1:].isdigit() and ":" not in every else every) or 1.0, 0.05
        )
    except ValueError as error:
        raise ConfigError(f"--every {words.every}: {error}") from error
    folder = named_folder(words.folder)
    is_sweep = (folder / "sweep.json").is_file()
    view: RunView | SweepView = SweepView(folder) if is_sweep else RunView(open_run(words.folder))
    check_files(folder, words.trust)
    view.read()
    if sys.stdout.isatty():
        from rich.live import Live

        with Live(view.draw(), auto_refresh=False) as live:
            while not view.ended:
                time.sleep(pause)
                view.read()
                live.update(view.draw(), refresh=True)
    else:
        while True:
            for line in view.lines():
                say(line, flush=True)
            if view.ended:
                break
            time.sleep(pause)
            view.read()
    if view.ended == "dead":
        say(
            f"dead: nobody trains there any more, and the run did not end; go on with: trainrun resume {folder}",
            file=sys.stderr,
        )
    return EXIT_FAILED if view.ended in ("failed", "dead") else EXIT_DONE
