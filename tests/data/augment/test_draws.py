"""The numbers are the published generator's, depend on what they may depend on, and are random."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from trainrun.data.augment.draws import Draws, compute_beta_quantiles
from trainrun.seeding import derive_seed

N = 1 << 16
MASK = (1 << 64) - 1


def draws(indices: Tensor | None = None, seed: int = 1, epoch: int = 0) -> Draws:
    return Draws(seed, epoch, torch.arange(N) if indices is None else indices)


def splitmix64(state: int) -> int:
    """The finalizer in Python's whole numbers, as published."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def chi_square(values: Tensor, cells: int) -> float:
    """Of counts against equal ones, as a normal deviate (0 is what one expects, 5 is out of the question)."""
    counts = torch.bincount(values.flatten(), minlength=cells).double()
    assert len(counts) == cells
    expected = values.numel() / cells
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))


def test_the_bits_are_those_of_splitmix64_in_whole_numbers() -> None:
    indices = torch.tensor(
        [0, 1, 2, 3, 63, 64, 12_345_678, 2**31, 2**40 + 7, 2**63 - 1, 5, 6, 7, 8, 9, 10, 11]
    )
    found = draws(indices, seed=7, epoch=3).bits("crop", 2)
    stream = int.from_bytes(b"crop", "big")
    for i, j in itertools.product(range(len(indices)), range(2)):
        state = int(indices[i]) * 0x9E3779B97F4A7C15 + derive_seed(7, 3, stream, j)
        assert int(found[i, j]) & MASK == splitmix64(state)


def test_known_numbers_stay_what_they_are() -> None:
    """A change of them would change every run that augments."""
    few = draws(torch.tensor([0, 1, 70_000]), seed=42, epoch=5).derive("data.augment.crop")
    assert few.integers("place", 0, 9, n=2).tolist() == [[4, 3], [3, 7], [3, 6]]
    assert few.bits("place").flatten().tolist() == [
        8275238473484070708,
        7021000742559662697,
        7881464873944142176,
    ]


def test_a_sample_has_its_numbers_in_any_batch() -> None:
    every = draws().uniform("flip", 3)
    chosen = torch.tensor([40_000, 3, 3, 65_535])
    assert torch.equal(draws(chosen).uniform("flip", 3), every[chosen])
    assert torch.equal(draws(chosen[1:2]).uniform("flip", 2), every[3:4, :2])
    assert torch.equal(draws(chosen).integers("flip", -3, 5), draws().integers("flip", -3, 5)[chosen])
    assert torch.equal(draws(chosen).beta("flip", 0.2), draws().beta("flip", 0.2)[chosen])


@pytest.mark.parametrize("cells", [2, 9, 64, 1000])
def test_numbers_are_uniform(cells: int) -> None:
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (2**31, 99)):
        numbers = draws(seed=seed, epoch=epoch)
        uniform = numbers.uniform("u", 2)
        assert uniform.dtype is torch.float32
        assert 0 <= float(uniform.min()) < 1e-4
        assert 1 - 1e-4 < float(uniform.max()) < 1
        assert abs(chi_square((uniform * cells).long(), cells)) < 4.5
        whole = numbers.integers("i", -5, cells - 5, 2)
        assert abs(chi_square(whole + 5, cells)) < 4.5


def test_what_holds_in_every_epoch_depends_on_the_seed_alone() -> None:
    fixed = draws(epoch=4).ignore_epoch().uniform("side")
    assert torch.equal(fixed, draws(epoch=9).ignore_epoch().uniform("side"))
    assert not torch.equal(fixed, draws(seed=2, epoch=4).ignore_epoch().uniform("side"))
    assert not torch.equal(fixed, draws(epoch=4).uniform("side"))


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 3.0, 8.0])
def test_beta_has_the_distribution_of_beta(alpha: float) -> None:
    special = pytest.importorskip("scipy.special")
    wanted = special.betaincinv(alpha, alpha, torch.linspace(0, 1, 4097, dtype=torch.float64).numpy())
    assert abs(compute_beta_quantiles(alpha) - wanted).max() < 2e-3
    numbers = draws().beta("weight", alpha).double()
    lower = numbers[numbers < 0.5]  # the mass behind numbers near 1 is too fine for float32
    assert abs(len(lower) - N / 2) / math.sqrt(N / 4) < 4.5
    mass = torch.from_numpy(special.betainc(alpha, alpha, lower.numpy()))
    assert abs(chi_square((mass * 32).long().clamp(max=15), 16)) < 4.5
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) <= 1


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    there, here = draws(torch.arange(N, device=device)), draws()
    moved = Draws(1, 0, torch.arange(N), device)
    assert torch.equal(there.bits("x", 3).cpu(), here.bits("x", 3))
    for other in (there, moved):
        assert other.uniform("x", 2).device.type == "cuda"
        assert torch.equal(other.uniform("x", 2).cpu(), here.uniform("x", 2))
        assert torch.equal(other.integers("x", 3, 77).cpu(), here.integers("x", 3, 77))
