"""The entry of a rank that the launcher started: `python -m trainrun.runs.rank_process RUN_DIR ATTEMPT`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from trainrun.folder.lock import hold_inherited_lock
from trainrun.folder.run_folder import LaunchSpec, RunDir, read_json
from trainrun.output import print_uncaught_error
from trainrun.runtime.signals import exit_at_interrupt
from trainrun.runtime.streams import guard_streams


def main(argv: list[str]) -> int:
    """Run one rank of a launched run. Return its exit code. A stop signal ends it at once until its run begins."""
    exit_at_interrupt(trains=True)
    guard_streams()
    sys.excepthook = print_uncaught_error
    hold_inherited_lock()
    from trainrun.config.saved_config import load_config  # slow, as torch is: the signals come first
    from trainrun.runs.joined_rank import run_joined_rank

    run_dir = RunDir(Path(argv[0]))
    attempt = int(argv[1])
    job = read_json(run_dir.job)
    sys.path += [path for path in job["paths"] if path not in sys.path]
    config = replace(load_config(run_dir.config, []), typed=tuple(job["typed"]))
    order = LaunchSpec(bool(job["resume"]) or attempt > 0, job["paths"])
    return run_joined_rank(run_dir, config, order)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
