import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.transform.channels_last import channels_last, guard_convolutions

CHECKER = next(map(str, Path("/usr/lib").glob("*/libc_malloc_debug.so.0")), "")  # of glibc


def two_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 10),
    ).double()  # fmt: skip
    return plain, channels_last(copy.deepcopy(plain))


def trained(model: nn.Module, num_steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(num_steps):
        x, y = torch.randn(16, 3, 8, 8, dtype=torch.float64), torch.randint(10, (16,))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


class Layouts(nn.Module):
    """Notes whether its inputs lie channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1, 1, 1))
        self.seen: list[bool] = []

    def forward(self, *inputs: Tensor) -> None:
        self.seen = [x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) for x in inputs]


def test_weights_float_pictures_and_nothing_else_change_their_layout() -> None:
    _, on = two_models()
    assert on[0].weight.is_contiguous(memory_format=torch.channels_last)
    model, x = Layouts(), torch.zeros(2, 3, 4, 4)
    channels_last(model)(x, x.to(torch.uint8), x[0], torch.zeros(2))
    assert model.seen == [True, False, False, False]


def test_training_equals_plain_and_every_parameter_changes() -> None:
    plain, on = two_models()
    before = [parameter.detach().clone() for parameter in on.parameters()]
    after = trained(on)
    torch.testing.assert_close(after, trained(plain), rtol=1e-9, atol=1e-12)
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_narrow_strided_1x1_convolution_keeps_its_layout_and_computes_the_same() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 1, stride=2), nn.Conv2d(8, 8, 1, stride=2)
    )
    on = channels_last(copy.deepcopy(plain))
    guard_convolutions(on)  # a second time adds nothing
    x = torch.randn(4, 3, 8, 8)
    seen: list[tuple[int, ...]] = []
    on[1].register_forward_hook(lambda module, args, out: seen.append(args[0].stride()))
    torch.testing.assert_close(on(x), plain(x))
    assert on[1].weight.stride() == (4, 1, 1, 1)
    assert on[2].weight.stride() == (8, 1, 8, 8)
    assert seen == [(256, 64, 8, 1)]
    assert [len(layer._forward_pre_hooks) for layer in on] == [0, 1, 0]


HEAP = """
import trainrun
trainrun.train("model=resnet", "model.width=4", "model.blocks=[1,1]", "trainer.max_steps=3",
               "trainer.limit_val_batches=1", "trainer.channels_last={last}",
               "monitor.plots=false", "monitor.hardware=false")
"""


@pytest.mark.process
@pytest.mark.skipif(not CHECKER, reason="glibc's libc_malloc_debug is not here")
@pytest.mark.parametrize("last", ["true", "false"])
def test_no_step_of_a_narrow_resnet_writes_outside_of_its_memory(workdir: Path, last: str) -> None:
    checks = {"LD_PRELOAD": CHECKER, "MALLOC_CHECK_": "3", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", HEAP.format(last=last)],
        env={**os.environ, **checks},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
