"""One of several ranks of a run: it joins the others and trains."""

from __future__ import annotations

import os

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.config.schema import RunConfig, record_setting_reads
from trainrun.errors import EXIT_AGAIN, EXIT_INTERRUPTED
from trainrun.folder.run_folder import LaunchSpec, RunDir
from trainrun.interfaces import Parallel
from trainrun.parallel.worker import run_as_rank
from trainrun.runs.failures import end_failed_meeting, end_process, limit_stop_duration, record_stop
from trainrun.runs.rank import train_rank
from trainrun.runtime.signals import StopFlag
from trainrun.timing.phases import PhaseTimer, measure_process_start


def run_joined_rank(run_dir: RunDir, config: RunConfig, order: LaunchSpec, store: Store | None = None) -> int:
    """Run one rank of a run. Return its exit code. store: where ranks of torchrun or Slurm meet; None for trainrun's
    launcher.
    """

    def train(parallel: Parallel, flag: StopFlag) -> int:
        return train_rank(run_dir, config, order, parallel, flag, PhaseTimer(measure_process_start()))

    record_setting_reads()
    rank = int(os.environ["RANK"])
    run_dir.rank_error(rank).unlink(missing_ok=True)
    flag = StopFlag(training=False)
    code = run_as_rank(
        run_dir, config.parallel, train, store, flag, limit_stop_duration(run_dir, config, flag),
        lambda text: end_failed_meeting(run_dir, config, text), order.sees_folder,
    )  # fmt: skip
    if rank == 0 and store is not None:  # else the launcher does it
        record_stop(run_dir, config, code)
    if code in (EXIT_AGAIN, EXIT_INTERRUPTED) and not flag.training:
        end_process(code)  # nothing is lost, and Python takes seconds to take torch down
    return code
