"""Two nodes of a real Slurm on this machine. Skipped unless SLURM_ROOT names what scripts/unpack_slurm.sh unpacked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
WORDS = ["launch=slurm", "launch.nodes=2", "parallel.accelerator=cpu", "parallel.devices=1", "output_dir=run"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


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
            subprocess.run(["slurmd-wlm", "-N", node, "-d", f"{ROOT}/usr/sbin/slurmstepd-wlm"], check=True)
        yield
    finally:
        subprocess.run(["scancel", "--user=root"], check=False)
        for process in (folder / "n1/slurmd.pid", folder / "n2/slurmd.pid", folder / "slurmctld.pid"):
            if process.exists():
                os.kill(int(process.read_text()), signal.SIGTERM)


def jobs() -> list[str]:
    command = ["squeue", "--noheader", "--format=%i %T"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def wait_until(is_so) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until, Path("run/slurm.log").read_text()
        time.sleep(0.2)


def test_a_job_trains_over_two_nodes(cluster: None, workdir: Path) -> None:
    assert main([*WORDS, "trainer.max_steps=4"]) == 0
    wait_until(lambda: not jobs())
    run = RunDir(workdir / "run")
    assert read_json(run.status)["state"] == "done", (run.root / "slurm.log").read_text()
    assert read_identity(run)["batch"]["ranks"] == 2


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
