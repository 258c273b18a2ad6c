"""`trainrun verify [settings of a run]`: certificates that this config is trained exactly."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace

from trainrun.config.compose import compose_run
from trainrun.errors import EXIT_DONE, EXIT_FAILED
from trainrun.output import redraw_line, report_result, say

USAGE = """usage: trainrun verify [group=option ...] [key=value ...]

Takes the words of a run and checks on short trials of it, in a temporary folder: micro-batches, ranks and
engines change nothing, a resume is bit for bit, evaluation counts every sample once, padding does not
matter, every parameter changes, mixed precision drifts less than a bound. What must only differ in rounding is computed
in float64 on a CPU, in evaluation mode; its line says so. Exit code 1 on a failure.
"""


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        say(USAGE, end="")
        return EXIT_DONE
    composition = compose_run(argv)
    for note in composition.notes:
        say(f"note: {note}", file=sys.stderr)
    config = composition.config
    config = replace(config, seed=42) if config.seed is None else config

    from trainrun.verify.run_checks import iterate_certificates

    terminal, began = sys.stdout.isatty(), time.monotonic()

    def progress(about: str) -> None:
        if terminal:
            redraw_line(f"  {about} ...")

    failed, checks = 0, []
    for certificate in iterate_certificates(config, progress):
        failed += certificate.state == "FAIL"
        checks.append(asdict(certificate))
        if terminal:
            redraw_line()
        say(
            f"{certificate.state:<5} {certificate.name:<18} {certificate.measured:<14} {certificate.text}",
            flush=True,
        )
    seconds = time.monotonic() - began
    report_result(checks=checks, num_failed=failed, seconds=seconds)
    say(f"{failed or 'none'} failed, in {seconds:.0f} s")
    return EXIT_FAILED if failed else EXIT_DONE
