"""Under torchrun, rank 0's config and folder reach the other ranks, also after a restart."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from approved import approve
from faults.forks import ForkedCommand

from trainrun.folder.run_folder import RunDir, read_json

pytestmark = pytest.mark.process

RANK = """
    import os, time
    from trainrun.config.schema import ParallelConfig
    from trainrun.parallel.devices import is_started_by_launcher
    from trainrun.parallel.handshake import confirm_config, request_config, send_config
    from trainrun.parallel.worker import run_as_rank
    from trainrun.runs.torchrun import find_earlier_folder
    from trainrun.folder.run_folder import write_json

    assert is_started_by_launcher()
    rank, life = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == 0 and life == "1":
        time.sleep(1)  # what was left from the first life is there before the new answer
    if rank == 0:
        assert find_earlier_folder() == (str(run.root) if life == "1" else None)
        payload = {"folder": str(run.root), "life": life}
        store = send_config(payload, 60.0)
    else:
        payload, store = request_config(60.0)
        assert confirm_config(store, "", 60.0)

    def work(parallel, flag):
        if life == "0" and rank == 1:
            os._exit(3)
        total = parallel.sum_over_ranks([rank + 1.0])
        write_json(run.root / f"seen{rank}.json", {"payload": payload, "total": total})
        return 0

    options = ParallelConfig(mode="ddp", accelerator="cpu", timeout_seconds=600.0)
    sys.exit(run_as_rank(run, options, work, store))
"""


def place_of_two_ranks() -> dict[str, str]:
    """Return the variables that tell two ranks where they meet, as srun sets them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def numbers_of_rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


@pytest.mark.parametrize(
    "words",
    [
        ["parallel=ddp", "modl=mlp"],
        ["parallel=ddp", "parallel.devices=4"],
        ["parallel=single"],
        ["parallel=ddp", "parallel=fsdp"],
        ["resume", "nowhere"],
    ],
)
def test_a_mistake_that_rank_0_finds_ends_all_ranks(
    words: list[str], rank_env: dict[str, str], workdir: Path
) -> None:
    """As under srun, where nobody ends the others."""
    (workdir / "config.yaml").write_text("a folder that is no run's")
    meeting_place = place_of_two_ranks()
    ranks = [ForkedCommand(*words, env=rank_env | meeting_place | numbers_of_rank(rank)) for rank in range(2)]
    told = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    approve(told[0])
    assert "Traceback" not in told[0] + told[1]


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
    wanted = {"payload": {"folder": str(run_dir.root), "life": "1"}, "total": [3.0]}
    assert [read_json(run_dir.root / f"seen{rank}.json") for rank in range(2)] == [wanted] * 2
