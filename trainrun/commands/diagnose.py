"""`trainrun diagnose [the words of a run]`: what the training waits for, measured by taking it away."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trainrun.commands.budget import take_seconds
from trainrun.compose import compose_run
from trainrun.errors import EXIT_DONE

if TYPE_CHECKING:
    from trainrun.lab.diagnosis import Diagnosis

USAGE = """usage: trainrun diagnose [--budget SECONDS] [--trace] [group=option ...] [key=value ...]

Takes the words of a run and measures, in a folder that is thrown away, how much faster it would be without
loading, logging, validation, checkpoints, padding, the update, ...: the real loop, in turns with itself. Says
what it waits for, the roofs of this machine, and what to try. Takes about 40 seconds (--budget). With --trace also
the operations that take most of a step, and trace.json.gz of five steps for https://ui.perfetto.dev.
"""
BUDGET = 40.0
TRACE = "--trace"


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return EXIT_DONE
    began = time.monotonic()
    argv, budget = take_seconds(argv, BUDGET, "diagnose")
    trace = TRACE in argv
    argv = [word for word in argv if word != TRACE]
    composition = compose_run(argv)
    for note in composition.notes:
        print(f"note: {note}", file=sys.stderr)

    import trainrun.rank  # noqa: F401  # once, for all runs under test: they are copies of this process
    from trainrun.lab.diagnosis import diagnose
    from trainrun.lab.report import lines_of, write_report

    terminal = sys.stdout.isatty()

    def progress(about: str) -> None:
        if terminal:
            print(f"\r\033[K  {about} ...", end="", flush=True)

    try:
        found: Diagnosis = diagnose(argv, began + budget, progress, trace)
    finally:
        if terminal:
            print("\r\033[K", end="", flush=True)
    now = datetime.now()
    folder = Path("outputs").absolute() / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}-diagnose"
    print("\n".join(lines_of(found)))
    write_report(found, argv, folder)
    print(f"in {time.monotonic() - began:.0f} s; pictures and diagnosis.json: {folder}")
    return EXIT_DONE
