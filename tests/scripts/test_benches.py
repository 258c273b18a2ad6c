"""The benches against hand-written loops take a device, and both sides compute there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHES = {
    "bench_overhead.py": (["--rounds", "1", "--epochs", "2"], "runner / hand "),
    "bench_checkpoint.py": (
        ["--rounds", "1", "--layers", "1", "--width", "64", "--only", "trainrun"], "medians of 1 rounds",
    ),
}  # fmt: skip


def bench(name: str, device: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words, _ = BENCHES[name]
    paths = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])
    )  # of a pretended GPU first
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *words, "--device", device], cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", BENCHES)
def test_on_the_cpu(name: str, tmp_path: Path) -> None:
    done = bench(name, "cpu", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert BENCHES[name][1] in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there_is_not_the_cpu(tmp_path: Path) -> None:
    done = bench("bench_overhead.py", "cuda", tmp_path)
    assert done.returncode != 0
    assert "parallel.accelerator=cuda: " in done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", BENCHES)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    done = bench(name, "cuda", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert BENCHES[name][1] in done.stdout
