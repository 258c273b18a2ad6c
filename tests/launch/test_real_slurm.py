"""Two nodes of a real Slurm on this machine. Skipped unless SLURM_ROOT names what scripts/unpack_slurm.sh unpacked."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from quiet_runs import QUIET, weights

from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir, read_identity, read_json

ROOT = os.environ.get("SLURM_ROOT", "")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not ROOT, reason="no SLURM_ROOT: scripts/unpack_slurm.sh unpacks a Slurm for this test"
    ),
]

CONFIG = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
OWN = """
import time
from pathlib import Path

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        if Path("pause").exists():
            time.sleep(float(Path("pause").read_text()))
        return self.linear(x.flatten(1))
"""
STEPS = 120
TRAINING = ["model=own.Net", "data.batch_size=8", "seed=3", f"trainer.max_steps={STEPS}", "trainer.max_epochs=null",
            "checkpoint.every_n_train_steps=5", "parallel.accelerator=cpu", *QUIET]  # fmt: skip
WORDS = ["launch=slurm", "launch.nodes=2", "parallel.accelerator=cpu", "parallel.devices=1", "output_dir=run"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start_node(name: str) -> None:
    subprocess.run(["slurmd-wlm", "-N", name, "-d", f"{ROOT}/usr/sbin/slurmstepd-wlm"], check=True)


@pytest.fixture
def cluster(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder, libraries = workdir / "slurm", f"{ROOT}/usr/lib/x86_64-linux-gnu"
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir(parents=True)
    plugins = f"{libraries}/slurm-wlm"
    text = CONFIG.format(host=socket.gethostname(), plugins=plugins, folder=folder, ports=free_ports(3))
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{libraries}:{plugins}")
    monkeypatch.setenv("PATH", f"{ROOT}/usr/bin:{ROOT}/usr/sbin", prepend=":")
    subprocess.run(["slurmctld-wlm", "-c"], check=True)
    try:
        for node in ("n1", "n2"):
            start_node(node)
        yield
    finally:
        subprocess.run(["scancel", "--user=root"], check=False)
        end_daemons(str(folder))


def end_daemons(folder: str) -> None:
    """End the daemons of a cluster, and the steps that they started. A daemon waits for its steps, which may hang."""
    daemons = []
    for process in psutil.process_iter(["name", "environ"]):
        environment = process.info["environ"] or {}
        if process.info["name"].startswith("slurm") and environment.get("SLURM_CONF", "").startswith(folder):
            daemons += [process, *process.children(recursive=True)]
    for process in daemons:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(daemons, timeout=5)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def jobs() -> list[str]:
    command = ["squeue", "--noheader", "--format=%i %T"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 900
    while not is_so():
        logs = [path.read_text() for path in Path().glob("*/slurm*.log")]
        assert time.monotonic() < until, (jobs(), logs)
        time.sleep(0.2)


def update_job(setting: str) -> None:
    (job,) = jobs()
    subprocess.run(["scontrol", "update", f"JobId={job.split()[0]}", setting], check=True)


def ranks_of(node: str) -> list[psutil.Process]:
    """Return the processes of the job on a node."""
    ranks = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment = process.info["environ"] or {}
        if "trainrun" in (process.info["cmdline"] or []) and environment.get("SLURMD_NODENAME") == node:
            ranks.append(process)
    return [one for one in ranks if "SLURM_STEP_ID" in one.info["environ"]]


def num_saved() -> int:
    return len(list(RunDir(Path("run")).checkpoints.glob("step-*")))


def check_bits_of_local_ranks(run: RunDir) -> None:
    """Compare a run that was interrupted with one of two ranks on this machine."""
    assert read_json(run.status)["step"] == STEPS
    assert main([*TRAINING, "parallel=ddp", "parallel.devices=2", "output_dir=local"]) == 0
    left, right = weights("run"), weights("local")
    assert left.keys() == right.keys()
    assert all(torch.equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_job_trains_over_two_nodes(devices: int, cluster: None, workdir: Path) -> None:
    words = [word.replace("devices=1", f"devices={devices}") for word in WORDS]
    assert main([*words, "trainer.max_steps=4"]) == 0
    wait_until(lambda: not jobs())
    run = RunDir(workdir / "run")
    assert read_json(run.status)["state"] == "done", (run.root / "slurm.log").read_text()
    assert read_identity(run)["batch"]["ranks"] == 2 * devices


def test_a_job_that_is_warned_saves_and_is_queued_again(cluster: None, workdir: Path) -> None:
    assert main([*WORDS, "trainer.max_steps=10000000", "trainer.max_epochs=null"]) == 0
    run = RunDir(workdir / "run")
    wait_until(lambda: run.metrics.exists() and run.metrics.stat().st_size > 0)
    (job,) = jobs()
    subprocess.run(["scancel", "--signal=USR2", job.split()[0]], check=True)
    wait_until(lambda: jobs() == [f"{job.split()[0]} PENDING"])
    status = read_json(run.status)
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert any(run.checkpoints.glob("step-*"))


def test_a_time_limit_is_followed_by_the_bits_of_a_run_without_one(cluster: None, own: Path) -> None:
    (own / "pause").write_text("0.7")
    began = time.monotonic()
    assert main([*WORDS, *TRAINING, "launch.time=60"]) == 0
    run = RunDir(own / "run")
    wait_until(lambda: num_saved() > 0)
    minutes = int(time.monotonic() - began) // 60 + 4  # so the end is nearer than the 300 s of the signal
    update_job(f"TimeLimit={minutes}")
    wait_until(lambda: run.status.exists() and read_json(run.status)["state"] == "stopped")
    assert read_json(run.status)["exit_code"] == 75
    (own / "pause").unlink()
    wait_until(lambda: [job.split()[1] for job in jobs()] == ["PENDING"])
    update_job("StartTime=now")  # Slurm itself would wait for two minutes
    wait_until(lambda: not jobs())
    assert read_json(run.status)["state"] == "done"
    check_bits_of_local_ranks(run)


def test_a_killed_rank_ends_the_job_and_the_script_goes_on(cluster: None, own: Path) -> None:
    (own / "pause").write_text("0.2")
    assert main([*WORDS, *TRAINING]) == 0
    wait_until(lambda: num_saved() > 0)
    (rank,) = ranks_of("n2")
    rank.kill()
    wait_until(lambda: not jobs())
    run = RunDir(own / "run")
    assert read_json(run.status)["state"] == "failed"
    assert not ranks_of("n1")
    (own / "pause").unlink()
    subprocess.run(["sbatch", "run/slurm.sh"], check=True)
    wait_until(lambda: not jobs())
    check_bits_of_local_ranks(run)


def test_a_node_that_is_down_has_the_job_queued_again(cluster: None, own: Path) -> None:
    (own / "pause").write_text("0.2")
    assert main([*WORDS, *TRAINING]) == 0
    wait_until(lambda: num_saved() > 0)
    for process in [psutil.Process(int((own / "slurm/n2/slurmd.pid").read_text())), *ranks_of("n2")]:
        process.kill()
    subprocess.run(["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=power"], check=True)
    wait_until(lambda: [job.split()[1] for job in jobs()] == ["PENDING"])
    wait_until(lambda: not ranks_of("n1"))
    (own / "pause").unlink()
    start_node("n2")
    # refused if the node has come back by itself
    subprocess.run(["scontrol", "update", "NodeName=n2", "State=RESUME"], check=False)
    update_job("StartTime=now")  # Slurm itself would wait for two minutes
    wait_until(lambda: not jobs())
    check_bits_of_local_ranks(RunDir(own / "run"))


def test_the_jobs_of_an_array_share_a_sweep(cluster: None, own: Path) -> None:
    words = ["--multirun", "optimizer.lr=1e-3,2e-3,3e-3,4e-3", *TRAINING, "parallel=single"]
    (own / "pause").write_text("0.05")
    assert main([*words, "launch=slurm", "launch.array=2", "output_dir=sweep"]) == 0
    wait_until(lambda: not jobs())
    saved = read_json(own / "sweep" / "sweep.json")
    assert [job["result"]["state"] for job in saved["jobs"]] == ["done"] * 4
    ended = [(own / f"sweep/slurm-{number}.log").read_text().count(": done") for number in (0, 1)]
    assert min(ended) > 0
