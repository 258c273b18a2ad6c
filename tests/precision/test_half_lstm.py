"""LSTMs under the autocast of a CPU are trained, and are what they were."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainrun.precision import half_lstm
from trainrun.precision.amp import prepare_model


class Net(nn.Module):
    """An LSTM that is given float32, as after an embedding."""

    def __init__(self, **words: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True, **words)
        self.out = nn.Linear(self.lstm.hidden_size * (1 + self.lstm.bidirectional), 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(input=x) if self.training else self.lstm(x)
        return self.out(states)  # type: ignore[no-any-return]


def trained(net: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        found: Tensor = net(torch.linspace(-1, 1, 24).reshape(2, 4, 3))
    found.float().square().sum().backward()
    return found


@pytest.fixture
def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_lstm, "trains_from_float32", lambda dtype: False)


@pytest.mark.parametrize("words", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("training", [True, False])
def test_an_lstm_is_trained_in_16_mixed_on_this_machine(words: dict[str, Any], training: bool) -> None:
    net = prepare_model(Net(**words), "16-mixed").train(training)
    trained(net)
    assert all(param.grad is not None and param.grad.isfinite().all() for param in net.parameters())


WITHOUT_AVX512 = """
import sys, torch
from torch import nn
from trainrun.precision.amp import prepare_model
for mode in ("bf16-mixed", "auto"):
    lstm = prepare_model(nn.LSTM(3, 5, num_layers=2, bidirectional=True), mode)
    with torch.autocast("cpu", torch.bfloat16):
        states, _ = lstm(torch.linspace(-1, 1, 24).reshape(2, 4, 3))
    states.float().sum().backward()
    assert states.dtype == torch.bfloat16 and lstm.weight_ih_l0.grad.abs().sum() > 0, mode
"""


def test_an_lstm_is_trained_in_bf16_mixed_on_a_cpu_without_avx512() -> None:
    environ = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_AVX512], capture_output=True, text=True, check=False,
        env=environ, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("_refused")
def test_its_input_is_rounded_under_the_autocast_and_nowhere_else() -> None:
    net, seen = prepare_model(Net(), "16-mixed"), []
    net.lstm.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input"].dtype), with_kwargs=True
    )
    again = copy.deepcopy(net)
    trained(net)
    trained(again)
    net(torch.zeros(1, 2, 3))
    assert seen == [torch.float16, torch.float16, torch.float32]
    assert type(net.lstm) is nn.LSTM
    assert pickle.loads(pickle.dumps(prepare_model(Net(), "16-mixed"))).lstm.hidden_size == 5


@pytest.mark.usefixtures("_refused")
def test_packed_sequences_come_through() -> None:
    net = prepare_model(nn.Sequential(nn.LSTM(2, 3)), "16-mixed")
    with torch.autocast("cpu", torch.float16):
        states, _ = net[0](pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]))  # type: ignore[index]
    assert isinstance(states, PackedSequence)


@pytest.mark.usefixtures("_refused")
@pytest.mark.parametrize("mode", ["32-true", "bf16-true", "64-true"])
def test_other_modes_leave_it_alone(mode: str) -> None:
    assert not prepare_model(Net(), mode).lstm._forward_pre_hooks  # type: ignore[union-attr]


def test_asking_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    half_lstm.trains_from_float32.cache_clear()
    half_lstm.trains_from_float32(torch.float16)
    assert torch.equal(before, torch.get_rng_state())
