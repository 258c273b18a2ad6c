"""A model that is built without memory has the bits of one that was built with it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainrun.checkpoint.load import open_tensors
from trainrun.errors import ConfigError, PluginError
from trainrun.parallel import deferred_init
from trainrun.parallel.deferred_init import DeferredInit, is_deferred
from trainrun.tensors import StoredTensor


class Various(nn.Module):
    """Ways in which constructors fill their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 20, padding_idx=3), nn.Linear(20, 40, bias=False)
        self.head.weight = self.table.weight
        self.first, self.second = nn.Linear(20, 30), nn.Linear(30, 20)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.second.weight, std=0.02)
        self.scale = float(self.second.weight.detach().abs().max())
        self.conv, self.lstm, self.norm = nn.Conv2d(3, 8, 3), nn.LSTM(8, 9), nn.BatchNorm2d(8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(20, 21))
        self.attention = nn.MultiheadAttention(20, 4)
        angles = torch.arange(50)[:, None] * torch.exp(torch.arange(0, 20, 2) * -0.1)
        waves = torch.zeros(50, 20)
        waves[:, 0::2], waves[:, 1::2] = torch.sin(angles), torch.cos(angles)
        self.register_buffer("waves", waves)
        self.mask = torch.tril(torch.ones(30, 30)).bool()  # no buffer
        self.tables = {"lines": [torch.linspace(0, 1, 90)]}
        self.noise = nn.Parameter(torch.randn(33, 5) * 0.1)
        self.own = nn.Parameter(torch.randn(30, 4, generator=torch.Generator().manual_seed(5)))
        self.mixed = nn.Parameter(torch.empty(7, 40))
        nn.init.kaiming_uniform_(self.mixed)
        self.second.weight.data.mul_(2)
        with torch.no_grad():
            self.first.bias.copy_(self.first.weight.sum(1))
            self.mixed[2:4] = self.mixed[0:2] * 2
            self.noise /= self.noise.norm(dim=0, keepdim=True)
            self.noise.data = self.noise.data.t().contiguous()
            if self.mixed.mean() > 0:
                self.mixed.neg_()
            self.mixed.copy_(self.mixed[torch.randperm(7)])
            self.mixed.add_(torch.multinomial(torch.rand(7, 9), 40, replacement=True))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.double()


def named(model: Various) -> dict[str, Tensor]:
    others = {"mask": model.mask, "lines": model.tables["lines"][0]}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **others}


@pytest.fixture
def all_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_init, "LARGE_BYTES", 64)


def built_twice() -> tuple[Various, Various, DeferredInit]:
    """Return a model with memory, one without, and the recording; both were built from one random state."""
    torch.manual_seed(3)
    whole = Various()
    after = torch.rand(2)
    torch.manual_seed(3)
    recording = DeferredInit()
    with recording.record_init():
        deferred = Various()
    assert torch.equal(torch.rand(2), after)  # what is drawn next is the same too
    return whole, deferred, recording


@pytest.mark.usefixtures("all_deferred")
def test_every_tensor_has_the_bits_of_the_constructor() -> None:
    whole, deferred, recording = built_twice()
    expected, tensors = named(whole), named(deferred)
    assert sum(map(is_deferred, tensors.values())) > 20
    assert deferred.head.weight is deferred.table.weight
    assert deferred.scale == whole.scale
    for name in reversed(list(expected)):  # in another order than that of the constructor
        if is_deferred(tensors[name]):
            built = recording.build_tensor(tensors[name])
            assert torch.equal(built, expected[name])
            assert built.stride() == expected[name].stride()
            if built.dim():
                assert torch.equal(recording.build_rows(tensors[name], 1, 3), expected[name][1:3])


@pytest.mark.usefixtures("all_deferred")
def test_buffers_and_plain_attributes_get_memory() -> None:
    whole, deferred, recording = built_twice()
    recording.build_other_tensors(deferred, torch.device("cpu"))
    params = dict(deferred.named_parameters())
    for name, tensor in named(deferred).items():
        if name not in params:
            assert not is_deferred(tensor)
            assert torch.equal(tensor, named(whole)[name])


@pytest.mark.usefixtures("all_deferred")
def test_a_tensor_without_memory_is_not_computed_with_after_the_recording() -> None:
    with DeferredInit().record_init():
        weight = nn.Linear(9, 9).weight
    assert weight.detach().shape == (9, 9)
    with pytest.raises(PluginError, match=r"parallel\.meta_device=true"):
        weight + 1


@pytest.mark.usefixtures("all_deferred")
def test_a_constructor_that_reads_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.meta_device=true"), DeferredInit().record_init():
        nn.Linear(9, 9).weight.detach().numpy()


class Probed(nn.Sequential):
    """A network whose constructor runs a forward, in which batch norm writes its statistics."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self(torch.randn(2, 3, 8, 8))


class Indexed(nn.Linear):
    """A weight that is written at some positions."""

    def __init__(self) -> None:
        super().__init__(20, 20)
        nn.init.sparse_(self.weight, 0.3)
        self.weight.data[self.weight.data > 0.005] = 0.5
        self.weight.data[3, 4] = 7.0


class Other(nn.Linear):
    """A weight that was drawn with another default type."""

    def __init__(self) -> None:
        super().__init__(20, 20)
        torch.set_default_dtype(torch.float64)
        self.weight = nn.Parameter(torch.randn(20, 20))
        torch.set_default_dtype(torch.float32)


class Orthogonal(nn.Sequential):
    """A parametrization that takes another way where an operation is missing, and a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__(nn.utils.parametrizations.orthogonal(nn.Linear(20, 20)))
        self.register_buffer("positive", torch.randn(20, 20).nonzero())


class Like(nn.Linear):
    """Tensors like others: those of their type, and parts of a larger operation."""

    def __init__(self) -> None:
        super().__init__(20, 20)
        self.weight.data.add_(self.weight.new_tensor([1.0] * 20)).add_(self.weight.new_tensor(2))
        self.drawn = nn.Parameter(self.weight.new(30, 4).normal_())
        self.register_buffer("numbers", nn.functional.one_hot(torch.arange(20), 30))
        self.register_buffer("classes", nn.functional.one_hot(torch.randint(9, (50,))))
        self.parts = nn.Parameter(torch.block_diag(torch.randn(5, 5), torch.randn(6, 6)))


@pytest.mark.usefixtures("all_deferred")
@pytest.mark.parametrize("kind", [Probed, Indexed, Other, Orthogonal, Like])
def test_rare_operations_have_the_bits_of_the_constructor(kind: type[nn.Module]) -> None:
    torch.manual_seed(3)
    expected = kind().state_dict()
    torch.manual_seed(3)
    recording = DeferredInit()
    with recording.record_init():
        tensors = kind().state_dict(keep_vars=True)
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        built = recording.build_tensor(tensor) if is_deferred(tensor) else tensor
        assert built.dtype == expected[name].dtype
        assert torch.equal(built, expected[name])


@pytest.mark.usefixtures("all_deferred")
def test_memory_that_numpy_writes_again_is_refused() -> None:
    values = np.ones((9, 9), np.float32)
    recording = DeferredInit()
    with recording.record_init():
        weight = nn.Linear(9, 9).weight
        weight.data.copy_(torch.from_numpy(values))
    values[:] = 2
    with pytest.raises(ConfigError, match=r"parallel\.meta_device=true"):
        recording.build_tensor(weight)


def assign_data() -> None:
    nn.Linear(9, 9).weight.data = torch.from_numpy(np.ones((9, 9), np.float32))


def copy_by_pickle() -> None:
    pickle.dumps(nn.Linear(9, 9))


@pytest.mark.usefixtures("all_deferred")
@pytest.mark.parametrize("construct", [assign_data, copy_by_pickle])
def test_values_that_are_not_recorded_are_refused(construct: Callable[[], None]) -> None:
    refusal = pytest.raises((ConfigError, PluginError), match=r"parallel\.meta_device=true")
    with refusal, DeferredInit().record_init():
        construct()


def test_small_tensors_are_ordinary_ones() -> None:
    with DeferredInit().record_init():
        assert not is_deferred(nn.Linear(9, 9).weight)


@pytest.mark.usefixtures("all_deferred")
def test_of_a_loaded_weight_its_rows_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"weight": torch.randn(10, 8), "bias": torch.randn(10)}
    save_file(weights, tmp_path / "model.safetensors")
    stored = open_tensors([tmp_path / "model.safetensors"])
    ranges: list[Any] = []
    read = StoredTensor.read
    monkeypatch.setattr(
        StoredTensor, "read", lambda tensor, *rows: ranges.append(rows) or read(tensor, *rows)
    )
    recording = DeferredInit()
    with recording.record_init():
        model = nn.Linear(8, 10).double()
        model.load_state_dict(dict(stored))
    ranges.clear()
    rows = recording.build_rows(model.weight, 3, 7)
    assert torch.equal(rows, weights["weight"][3:7].double())
    assert ranges == [(3, 7)]
