"""Under torchrun, rank 0's config and folder reach the other ranks, also after a restart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from trainrun.rundir import RunDir, read_json

RANK = """
    import os, time
    from types import SimpleNamespace
    from trainrun.parallel.external import external_ranks
    from trainrun.parallel.handshake import follow, lead
    from trainrun.parallel.worker import run_as_rank
    from trainrun.rundir import write_json

    assert external_ranks()
    rank, life = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == 0 and life == "1":
        time.sleep(1)  # what was left from the first life is there before the new answer
    meeting = lead({"run_dir": str(run.root), "life": life}) if rank == 0 else follow()

    def work(parallel, flag):
        meeting.complete.set()
        if life == "0" and rank == 1:
            os._exit(3)
        total = parallel.sum_over_ranks([rank + 1.0])
        write_json(run.root / f"seen{rank}.json", {"payload": meeting.payload, "total": total})
        return 0

    options = SimpleNamespace(
        mode="ddp", accelerator="cpu", sync_batchnorm=False, find_unused_parameters=False,
        static_graph=False, gradient_as_bucket_view=True, bucket_cap_mb=25.0, timeout_seconds=600.0,
    )
    sys.exit(run_as_rank(run, options, work, meeting.store))
"""


def test_torchrun_with_a_restart(
    script: Callable[[str], list[str]], run_dir: RunDir, rank_env: dict[str, str]
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [sys.executable, *launcher, *script(RANK)[1:]],
        env=rank_env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = {"payload": {"run_dir": str(run_dir.root), "life": "1"}, "total": [3.0]}
    assert [read_json(run_dir.root / f"seen{rank}.json") for rank in range(2)] == [wanted] * 2
