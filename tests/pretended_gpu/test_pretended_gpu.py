"""The tests that need a GPU, on one that is none: the code for it runs on every machine with a compiler.

The device keeps its tensors apart from the host's and computes with the CPU's kernels. It shows a tensor on the wrong
device, a wait that should not be, a stream that does not wait for another, memory used again too early, and every
mistake of Python; it does not show how fast anything is, nor what real kernels round. Of cases that take the same
branches of the code one is run here (the others are marked `slow`), and all with `--whole`.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SOURCES = ("device", "kernels", "layers")
SHORT = ("trainer.max_steps=3", "trainer.limit_val_batches=1", "monitor.plots=false")
EQUAL = "tests/runs/test_gpu_equals.py"
LEAST = {"equal": 18, "others": 41}  # how many tests pass


def files_with_tests_of_a_gpu() -> list[str]:
    """Collecting all of tests/ would take longer than running these."""
    files = sorted(HERE.parent.rglob("test_*.py"))
    return [
        str(path.relative_to(HERE.parents[1]))
        for path in files
        if "pytest.mark.gpu" in path.read_text("utf-8")
    ]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built device; of several processes the first one builds it."""
    if sys.platform != "linux" or torch.version.cuda is not None or torch.cuda.is_available():
        pytest.skip("for Linux, and a torch without CUDA")
    if shutil.which("g++") is None or shutil.which("gcc") is None:
        pytest.skip("no compiler")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # the same in all its processes
    folder = tmp_path_factory.getbasetemp().parent / f"pretended-gpu-{run}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "libgpu.so").exists():
            build(folder)
    return folder


def build(folder: Path) -> None:
    place = Path(torch.__file__).parent
    include = [f"-I{place / 'include'}", f"-I{place / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{place / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{place / 'lib'}"]
    words = [
        "g++",
        "-O1",
        "-fPIC",
        "-std=c++20",
        "-shared",
        *include,
        f"-I{HERE}",
        "-x",
        "c++",
        "-",
        *libraries,
    ]
    once = "".join(
        f'#include "{name}.cpp"\n' for name in SOURCES
    )  # the headers of torch take most of the time
    subprocess.run([*words, "-o", str(folder / "part.so")], input=once, text=True, check=True)
    words = ["gcc", "-shared", "-fPIC", str(HERE / "nvml.c"), "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run(words, check=True)
    (folder / "part.so").rename(folder / "libgpu.so")


def environment(library: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(HERE / "site"), str(HERE.parents[1]), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "LD_LIBRARY_PATH": os.pathsep.join([str(library), *filter(None, [kept.get("LD_LIBRARY_PATH")])]),
        "PRETENDED_GPU": str(library / "libgpu.so"),
        "PRETENDED_GPUS": "2",
    }


@pytest.mark.parametrize("suite", LEAST)
def test_what_needs_a_gpu_passes_on_one_that_is_none(
    suite: str, library: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    paths = [EQUAL] if suite == "equal" else [path for path in files_with_tests_of_a_gpu() if path != EQUAL]
    which = "gpu" if pytestconfig.getoption("--whole") else "gpu and not slow"
    words = ["-q", "-m", which, "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *paths],
        cwd=HERE.parents[1], env=environment(library), capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    found = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert found is not None
    assert int(found.group(1)) >= LEAST[suite]


def test_every_rank_of_somebody_else_may_be_shown_one_gpu(library: Path, tmp_path: Path) -> None:
    """As Slurm's --gpus-per-task=1 does it: the second rank of the machine has LOCAL_RANK 1 and sees GPU 0 alone."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["-m", "trainrun", "parallel=ddp", *SHORT]
    done = subprocess.run(
        [sys.executable, *launcher, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=environment(library) | {"PRETENDED_GPUS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on cuda:0" in done.stdout
    assert "x 2 ranks =" in done.stdout


def test_autotune_forks_before_anybody_asked_torch_for_gpus(library: Path, tmp_path: Path) -> None:
    words = ["batch", "--budget", "5"]
    small = ["data=synthetic", "data.train.num_samples=64", "data.val=null", "monitor.hardware=false"]
    done = subprocess.run(
        [sys.executable, "-m", "trainrun", "autotune", *words, *small],
        cwd=tmp_path, env=environment(library), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest that fits" in done.stdout
