"""How many ranks, and which device each takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainrun.errors import ConfigError
from trainrun.parallel import devices
from trainrun.parallel.devices import choose_device, installed_gpus, num_devices, num_visible

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.mark.parametrize(
    ("mode", "accelerator", "wanted", "num_gpus", "count"),
    [
        ("single", "auto", "auto", 8, 1),
        ("single", "auto", 1, 8, 1),
        ("ddp", "auto", "auto", 4, 4),
        ("ddp", "cuda", "auto", 3, 3),
        ("ddp", "cuda", 2, 3, 2),
        ("ddp", "auto", "3", 3, 3),
        ("ddp", "cpu", 7, 3, 7),
        ("ddp", "auto", 5, 0, 5),
    ],
)
def test_number_of_ranks(mode: str, accelerator: str, wanted: object, num_gpus: int, count: int) -> None:
    assert num_devices(mode, accelerator, wanted, num_gpus)[0] == count


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 2), (64, 2)])
def test_a_cpu_gets_two_ranks_where_it_has_the_cores(
    cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_cores", lambda: cores)
    assert num_devices("ddp", "cpu", "auto")[0] == count
    assert str(cores) in num_devices("ddp", "auto", "auto", num_gpus=0)[1]


@pytest.mark.parametrize(
    ("mode", "accelerator", "wanted", "num_gpus", "message"),
    [
        ("single", "auto", 2, 2, "parallel.devices=2: parallel=single uses 1; say parallel=ddp"),
        ("ddp", "auto", 4, 2, "parallel.devices=4: 2 GPU(s) visible here; allowed are 1 to 2"),
        ("ddp", "cuda", 3, 1, "parallel.devices=3: 1 GPU(s)"),
        ("ddp", "cuda", "auto", 0, "parallel.accelerator=cuda: no NVIDIA GPU"),
        ("ddp", "mps", "auto", 0, "parallel.accelerator=mps: works with parallel=single only"),
    ],
)
def test_what_cannot_be_names_the_key(
    mode: str, accelerator: str, wanted: object, num_gpus: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        num_devices(mode, accelerator, wanted, num_gpus)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 3 ", 2),
        ("0,-1,1", 1),
        ("0,7,1", 1),
        ("NoDevFiles", 0),
        ("GPU-8932f937,MIG-1", 2),
    ],
)
def test_cuda_visible_devices(visible: str | None, count: int) -> None:
    assert num_visible(4, visible) == count
    assert num_visible(0, visible) == 0


def test_gpus_are_counted_as_torch_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if torch.version.cuda is not None or installed_gpus() == 0:
        assert installed_gpus() == torch.cuda.device_count()


@WITHOUT_GPU
def test_choice_of_device_without_a_gpu() -> None:
    assert choose_device("cpu", local_rank=3) == torch.device("cpu")
    assert choose_device("auto", mode="ddp") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"parallel\.accelerator=cuda: torch .* finds none here; .*cpu"):
        choose_device("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_choice_of_device_with_a_gpu() -> None:
    assert choose_device("auto") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"parallel\.devices: rank 99"):
        choose_device("cuda", local_rank=99)


def test_the_driver_imports_no_torch() -> None:
    program = (
        "import sys, trainrun.parallel.devices as d, trainrun.parallel.launch, trainrun.parallel.external, "
        "trainrun.parallel.rank; d.num_devices('ddp', 'auto', 'auto'); sys.exit('torch' in sys.modules)"
    )
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False).returncode == 0
