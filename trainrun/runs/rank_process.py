"""The entry of a rank that the launcher started: `python -m trainrun.runs.rank_process RUN_DIR ATTEMPT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.config.saved_config import load_config
from trainrun.config.schema import RunConfig, record_reads
from trainrun.errors import EXIT_AGAIN, EXIT_INTERRUPTED
from trainrun.folder.lock import hold_inherited_lock
from trainrun.folder.run_folder import LaunchSpec, RunDir, read_json
from trainrun.folder.status import read_status, write_status
from trainrun.interfaces import Parallel
from trainrun.output import complain
from trainrun.parallel.worker import run_as_rank
from trainrun.runs.failures import end_late_stops, end_meeting
from trainrun.runs.rank import train_rank
from trainrun.runtime.signals import StopFlag
from trainrun.runtime.streams import guard_streams
from trainrun.timing.phases import PhaseTimer, measure_process_start


def main(argv: list[str]) -> int:
    """Run one rank of a launched run. Return its exit code."""
    guard_streams()
    sys.excepthook = complain
    hold_inherited_lock()
    run_dir = RunDir(Path(argv[0]))
    attempt = int(argv[1])
    job = read_json(run_dir.job)
    sys.path += [path for path in job["paths"] if path not in sys.path]
    order = LaunchSpec(bool(job["resume"]) or attempt > 0, job["paths"], typed=tuple(job["typed"]))
    return run_rank_of(run_dir, load_config(run_dir.config, []), order)


def run_rank_of(run_dir: RunDir, config: RunConfig, order: LaunchSpec, store: Store | None = None) -> int:
    """Run one rank of a run. Return its exit code. store: where ranks of torchrun or Slurm meet; None for trainrun's
    launcher.
    """

    def train(parallel: Parallel, flag: StopFlag) -> int:
        return train_rank(run_dir, config, order, parallel, flag, PhaseTimer(measure_process_start()))

    record_reads()
    rank = int(os.environ["RANK"])
    run_dir.rank_error(rank).unlink(missing_ok=True)
    flag = StopFlag(training=False)
    code = run_as_rank(
        run_dir, config.parallel, train, store, flag, end_late_stops(run_dir, config, flag),
        lambda text: end_meeting(run_dir, config, text),
    )  # fmt: skip
    if (
        rank == 0
        and code in (EXIT_AGAIN, EXIT_INTERRUPTED)
        and read_status(run_dir).get("state") == "running"
    ):
        message = "stopped by a signal after another rank had ended"
        write_status(run_dir, config.run_name, state="stopped", exit_code=code, message=message)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
