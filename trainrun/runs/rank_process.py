"""The entry of a rank that the launcher started: `python -m trainrun.runs.rank_process RUN_DIR ATTEMPT`."""

from __future__ import annotations

import sys
from pathlib import Path

from trainrun.config.saved_config import load_config
from trainrun.config.schema import record_reads
from trainrun.folder.lock import take_over
from trainrun.folder.run_folder import LaunchSpec, RunDir, read_json
from trainrun.interfaces import Parallel
from trainrun.output import complain
from trainrun.parallel.worker import run_as_rank
from trainrun.runs.rank import train_rank
from trainrun.runtime.signals import StopFlag
from trainrun.runtime.streams import guard_streams
from trainrun.timing.phases import PhaseTimer, process_start


def main(argv: list[str]) -> int:
    """Return the exit code of the rank."""
    guard_streams()
    sys.excepthook = complain
    take_over()
    run_dir = RunDir(Path(argv[0]))
    attempt = int(argv[1])
    job = read_json(run_dir.job)
    sys.path += [path for path in job["paths"] if path not in sys.path]
    config = load_config(run_dir.config, [])
    record_reads()

    def work(parallel: Parallel, flag: StopFlag) -> int:
        order = LaunchSpec(bool(job["resume"]) or attempt > 0, job["paths"], typed=tuple(job["typed"]))
        return train_rank(run_dir, config, order, parallel, flag, PhaseTimer(process_start()))

    return run_as_rank(run_dir, config.parallel, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
