"""`trainrun verify [the words of a run]`: certificates that this config is trained exactly."""

from __future__ import annotations

import sys
import time

from trainrun.errors import EXIT_DONE, EXIT_FAILED
from trainrun.words.compose import compose_run

USAGE = """usage: trainrun verify [group=option ...] [key=value ...]

Takes the words of a run and checks on short trials of it, in a temporary folder: micro-batches, ranks and
engines change nothing, a resume is bit for bit, evaluation counts every sample once, padding does not
matter, every parameter changes, mixed precision drifts less than a bound. Exit code 1 on a failure.
"""


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return EXIT_DONE
    composition = compose_run(argv)
    for note in composition.notes:
        print(f"note: {note}", file=sys.stderr)
    config = composition.config
    if config.seed is None:
        config.seed = 42

    from trainrun.verify.run import certificates

    terminal, began = sys.stdout.isatty(), time.monotonic()

    def progress(about: str) -> None:
        if terminal:
            print(f"\r\033[K  {about} ...", end="", flush=True)

    failed = 0
    for found in certificates(config, progress):
        failed += found.state == "FAIL"
        start = "\r\033[K" if terminal else ""
        print(f"{start}{found.state:<5} {found.name:<18} {found.measured:<14} {found.text}", flush=True)
    seconds = time.monotonic() - began
    print(f"{failed or 'none'} failed, in {seconds:.0f} s")
    return EXIT_FAILED if failed else EXIT_DONE
