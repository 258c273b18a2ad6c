"""`trainrun verify [settings of a run]`: certificates that this config is trained exactly."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace

from trainrun.config.compose import compose_run
from trainrun.errors import EXIT_DONE, EXIT_FAILED
from trainrun.output import redraw_line, report_result, say

USAGE = """usage: trainrun verify [group=option ...] [key=value ...]

Checks in short trials, in a temporary folder, that these settings are trained exactly. Micro-batches, ranks, engines,
resumes and padding must not change results, evaluation counts every sample once, and every parameter changes.
Results that may differ in rounding are computed in float64 on a CPU, in evaluation mode. Exit code 1 on a failure.
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
