"""How many ranks, and which device each takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from approved import approve, refused

from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.parallel import devices
from trainrun.parallel.devices import InstalledGpus, choose_device, choose_num_devices, count_visible

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.mark.parametrize(
    ("mode", "accelerator", "wanted", "num_gpus", "count"),
    [
        ("single", "auto", "auto", 8, 1),
        ("ddp", "auto", "auto", 4, 4),
        ("ddp", "cuda", 2, 3, 2),
        ("ddp", "auto", "3", 3, 3),
        ("ddp", "cpu", 7, 3, 7),
        ("ddp", "auto", [3, 1], 4, 2),
        ("single", "auto", [3], 4, 1),
    ],
)
def test_number_of_ranks(mode: str, accelerator: str, wanted: object, num_gpus: int, count: int) -> None:
    assert choose_num_devices(mode, accelerator, wanted, num_gpus)[0] == count


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 2), (64, 2)])
def test_a_cpu_gets_two_ranks_where_it_has_the_cores(
    cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_usable_cores", lambda: cores)
    assert choose_num_devices("ddp", "cpu", "auto")[0] == count
    assert str(cores) in choose_num_devices("ddp", "auto", "auto", num_gpus=0)[1]


@pytest.mark.parametrize(
    ("mode", "accelerator", "wanted", "num_gpus"),
    [
        ("single", "auto", 2, 2),
        ("ddp", "auto", 4, 2),
        ("single", "auto", [0, 1], 2),
        ("ddp", "auto", [0, 2], 2),
        ("ddp", "cpu", [0, 1], 2),
        ("ddp", "auto", [0], 0),
        ("ddp", "cuda", "auto", 0),
        ("ddp", "mps", "auto", 0),
    ],
)
def test_what_cannot_be_names_the_key(mode: str, accelerator: str, wanted: object, num_gpus: int) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_num_devices(mode, accelerator, wanted, num_gpus)
    approve(str(caught.value))


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("", 0),
        (" 1 , 3 ", 2),
        ("0,-1,1", 1),
        ("NoDevFiles", 0),
        ("GPU-8932f937,GPU-1", 2),
        ("MIG-8932f937,MIG-1", 1),
    ],
)
def test_cuda_visible_devices(visible: str | None, count: int) -> None:
    assert count_visible(4, visible) == count
    assert count_visible(0, visible) == 0


@pytest.fixture(scope="module")
def with_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a driver's library that counts GPUs, and no GPU behind it."""
    if sys.platform != "linux" or shutil.which("gcc") is None or torch.cuda.is_available():
        pytest.skip("for Linux with a compiler and without a GPU")
    folder = tmp_path_factory.mktemp("driver")
    library, source = str(folder / "libnvidia-ml.so.1"), str(ROOT / "tests/pretended_gpu/nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return kept | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT), "PRETENDED_GPUS": "4"}


@pytest.mark.parametrize(("sliced", "count"), [(0, 4), (1, 3), (4, 1)])
def test_of_gpus_in_slices_one_slice_counts_beside_no_whole_gpu(
    sliced: int, count: int, with_driver: dict[str, str]
) -> None:
    program = (
        "from trainrun.parallel.devices import query_installed_gpus; print(*query_installed_gpus(), sep='; ')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=with_driver | {"PRETENDED_SLICED": str(sliced)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{count}; driver 535.104.05, for CUDA 12.2 at most\n"


@WITHOUT_GPU
@pytest.mark.parametrize("words", [[], ["parallel=ddp"]])
def test_gpus_that_torch_does_not_see_are_no_reason_to_train_on_the_cpu(
    words: list[str], workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = InstalledGpus(4, "driver 535.104.05, for CUDA 12.2 at most")
    monkeypatch.setattr(devices, "query_installed_gpus", lambda: installed)
    assert main([*words, "trainer.max_steps=1"]) == 2
    wanted = r"parallel\.accelerator=(auto|cuda): 4 GPU\(s\) here \(driver 535\.104\.05, for CUDA 12\.2 at most\), "
    assert re.search(
        wanted + r"but torch sees none; torch \S+ was built for .* parallel\.accelerator=cpu",
        capsys.readouterr().err,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_rank_of_slurms_takes_the_only_gpu_that_it_is_shown() -> None:
    if torch.cuda.device_count() == 1:
        assert choose_device("auto", local_rank=3, mode="ddp", external=True) == torch.device("cuda", 0)
    last = torch.cuda.device_count() - 1
    assert choose_device("auto", local_rank=last, mode="ddp", external=True) == torch.device("cuda", last)
    with pytest.raises(ConfigError, match=r"parallel\.devices: rank 99"):
        choose_device("auto", local_rank=99, mode="ddp")


@WITHOUT_GPU
def test_choice_of_device_without_a_gpu() -> None:
    assert choose_device("cpu", local_rank=3) == torch.device("cpu")
    assert choose_device("auto", mode="ddp") == torch.device("cpu")
    with refused(ConfigError, "parallel.accelerator"):
        choose_device("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_choice_of_device_with_a_gpu() -> None:
    assert choose_device("auto") == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"parallel\.devices: rank 99"):
        choose_device("cuda", local_rank=99)


def test_the_driver_imports_no_torch() -> None:
    program = (
        "import sys, trainrun.parallel.devices as d, trainrun.parallel.launch, trainrun.parallel.devices, "
        "trainrun.parallel.rank_place; d.choose_num_devices('ddp', 'auto', 'auto'); sys.exit('torch' in sys.modules)"
    )
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False).returncode == 0


def test_a_rank_takes_the_gpu_at_its_place_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for rank, number in enumerate([3, 1]):
        assert choose_device("auto", rank, "ddp", devices=[3, 1]) == torch.device("cuda", number)
    assert choose_device("auto", devices=[2]) == torch.device("cuda", 2)
    with refused(ConfigError):
        choose_device("auto", devices=[4])
    with refused(ConfigError):
        choose_device("cpu", devices=[0])
