"""`launch=ray`: ranks on two nodes of a Ray cluster on this machine. Skipped where the package `ray` is missing."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from quiet_runs import weights

from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir, read_identity, read_json

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="no package ray: pip install 'trainrun[ray]'"
)
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
WORDS = ["launch=ray", "launch.nodes=2", "parallel.accelerator=cpu", "parallel.devices=1", "data.batch_size=8",
         "monitor.plots=false", "monitor.progress_bar=false", "seed=3"]  # fmt: skip
STEPS = 400
LONG = [f"trainer.max_steps={STEPS}", "trainer.max_epochs=null", "checkpoint.every_n_train_steps=20"]
START_SECONDS, END_SECONDS = 400, 400  # a machine may be busy; only a run that hangs takes so long


def test_without_ray_a_line_says_what_to_install(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["launch=ray", "output_dir=run"]) == 2
    assert "trainrun[ray]" in capsys.readouterr().err
    assert main(["launch=ray", "launch.time=10", "output_dir=run"]) == 2
    assert "launch.time=10" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        del os.environ["RAY_ADDRESS"]
        cluster.shutdown()


def start(*words: str) -> subprocess.Popen[bytes]:
    with open("output.txt", "ab") as output:
        command = [sys.executable, "-m", "trainrun", *WORDS, *LONG, *words]
        return subprocess.Popen(command, stdout=output, stderr=output)


def wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, Path("output.txt").read_text()
        time.sleep(0.1)


def newest_checkpoint() -> str:
    return max((path.name for path in RunDir(Path("run")).checkpoints.glob("step-*")), default="")


def processes_of(folder: Path) -> list[psutil.Process]:
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if f"output_dir={folder}" in (one.info["cmdline"] or [])
    ]


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_stop_and_a_lost_node_are_continued_with_the_same_bits(cluster: Any, workdir: Path) -> None:
    node = cluster.add_node(**NODE)
    run = RunDir(workdir / "run")
    words = ["output_dir=run", "parallel.max_restarts=1"]
    with start(*words) as driver:
        wait_until(lambda: newest_checkpoint() != "", START_SECONDS)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(END_SECONDS) == 75, Path("output.txt").read_text()
    assert read_json(run.status)["state"] == "stopped"
    first = newest_checkpoint()

    with start(*words) as driver:
        wait_until(lambda: newest_checkpoint() > first, START_SECONDS)
        cluster.remove_node(node, allow_graceful=False)
        node = cluster.add_node(**NODE)
        assert driver.wait(START_SECONDS) == 0, Path("output.txt").read_text()
    status = read_json(run.status)
    assert (status["state"], status["step"]) == ("done", STEPS)
    assert read_identity(run)["batch"]["ranks"] == 2
    assert "1 of 1 restarts" in Path("output.txt").read_text()

    local = [word for word in WORDS if not word.startswith(("launch", "parallel.devices"))]
    assert main([*local, *LONG, "parallel=ddp", "parallel.devices=2", "output_dir=local"]) == 0
    left, right = weights("run"), weights("local")
    assert all(torch.equal(value, right[name]) for name, value in left.items())
    cluster.remove_node(node)


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_without_restarts_a_lost_node_ends_the_run_and_leaves_no_process(cluster: Any, workdir: Path) -> None:
    node = cluster.add_node(**NODE)
    with start("output_dir=run") as driver:
        wait_until(lambda: newest_checkpoint() != "", START_SECONDS)
        cluster.remove_node(node, allow_graceful=False)
        assert driver.wait(END_SECONDS) == 1, Path("output.txt").read_text()
    assert newest_checkpoint()
    wait_until(lambda: not processes_of(workdir / "run"), END_SECONDS)
