"""Torch's libraries come beside the words, in a process that will train; a mistake does not wait for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainrun.process import early_load

ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MAPPED = "print('libtorch_cpu' in open('/proc/self/maps').read(), 'torch' in sys.modules)"
Ran = subprocess.CompletedProcess[str]


def ran(*lines: str) -> Ran:
    first = "import os, sys; from trainrun.process import early_load"
    return subprocess.run(
        [sys.executable, "-c", "\n".join([first, *lines])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@LINUX
def test_the_libraries_are_there_before_torch_is_imported() -> None:
    found = ran(
        "os.sched_getaffinity = lambda pid: {0, 1}",
        "early_load.load_torch_early()",
        "early_load._threads[0].join()",
        MAPPED,
        "import torch",
        "print(torch.ones(3).sum().item())",
    )
    assert found.stdout.split() == ["True", "False", "3.0"], found.stderr


@LINUX
@pytest.mark.parametrize(
    "reason",
    [
        "os.sched_getaffinity = lambda pid: {0}",
        "import torch",
        "import importlib.util; importlib.util.find_spec = lambda name: None",
        "sys.platform = 'darwin'",
    ],
)
def test_nothing_is_opened_where_it_would_not_help(reason: str) -> None:
    found = ran(reason, "early_load.load_torch_early()", "print(len(early_load._threads))")
    assert found.stdout.split() == ["0"], found.stderr


@pytest.mark.parametrize(
    ("path", "cuda", "found"), [("/opt/cuda/lib64", True, True), ("", True, False), ("/x", False, False)]
)
def test_libraries_of_another_cuda_are_left_to_the_import(
    path: str, cuda: bool, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", path)
    if cuda:
        (tmp_path / "libtorch_cuda.so").touch()
    assert early_load.foreign_cuda(tmp_path) is found


@LINUX
def test_what_cannot_be_opened_is_left_to_the_import(tmp_path: Path) -> None:
    found = ran(
        "from pathlib import Path",
        f"early_load._open(Path({str(tmp_path)!r}))",
        MAPPED,
    )
    assert found.stdout.split() == ["False", "False"], found.stderr


@LINUX
def test_who_ends_otherwise_waits_until_all_is_opened() -> None:
    found = ran("os.sched_getaffinity = lambda pid: {0, 1}", "early_load.load_torch_early()", "sys.exit(7)")
    assert found.returncode == 7, found.stderr


def test_who_leaves_without_torch_has_said_everything() -> None:
    thread = "early_load._threads.append(None)"
    found = ran(
        thread, "print('said'); print('why', file=sys.stderr)", "early_load.leave_without_it(2)", "print(1)"
    )
    assert (found.returncode, found.stdout, found.stderr) == (2, "said\n", "why\n")
    found = ran("early_load.leave_without_it(2)", "print('goes on')")
    assert (found.returncode, found.stdout) == (0, "goes on\n")


@LINUX
def test_a_mistake_is_answered_and_a_run_trains(trainrun: Callable[..., Ran]) -> None:
    wrong = trainrun("trainer.max_epoch=3")
    assert wrong.returncode == 2
    assert "max_epochs" in wrong.stderr
    right = trainrun("trainer.max_steps=2", "monitor.plots=false")
    assert right.returncode == 0, right.stderr
