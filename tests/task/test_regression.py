from functools import partial
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.nn.functional import huber_loss, l1_loss, mse_loss

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.task.regression import Regression

MODEL = nn.Identity()
TORCHS = {"mse": mse_loss, "mae": l1_loss, "huber": huber_loss}


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return 3 * torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3), (7, 2, 4)])
def test_the_sum_over_samples_is_that_of_each_samples_own_mean(loss: str, shape: tuple[int, ...]) -> None:
    x, y = pair(*shape)
    task = Regression(loss)
    out = task.step(MODEL, (x, y))
    wanted = TORCHS[loss](x, y, reduction="none").reshape(7, -1).mean(1).sum()
    torch.testing.assert_close(out.loss_sum, wanted)
    assert task.count((x, y)) == 7
    mae = out.sums["mae"]
    assert callable(mae)
    torch.testing.assert_close(mae(), (x - y).abs().reshape(7, -1).mean(1).sum())


def per_sample(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().flatten(1).mean(1)


def summed(x: Tensor, y: Tensor) -> Tensor:
    return per_sample(x, y).sum()


summed.reduction = "sum"  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [nn.MSELoss(), partial(mse_loss, reduction="mean"), per_sample, summed])
def test_a_loss_of_ones_own_gives_the_same_sum(loss: Any) -> None:
    x, y = pair(7, 3)
    own, builtin = Regression(loss).step(MODEL, (x, y)), Regression("mse").step(MODEL, (x, y))
    torch.testing.assert_close(own.loss_sum, builtin.loss_sum)


def test_one_number_that_may_be_a_mean_is_refused() -> None:
    with refused(PluginError):
        Regression(lambda x, y: mse_loss(x, y)).step(MODEL, pair(7, 3))


@pytest.mark.parametrize("loss", ["mse", nn.MSELoss()])
def test_one_number_a_sample_meets_an_output_of_one_column(loss: Any) -> None:
    x, y = pair(7)
    wanted = Regression(loss).step(MODEL, (x, y))
    found = Regression(loss).step(MODEL, (x[:, None], y))
    torch.testing.assert_close(found.loss_sum, wanted.loss_sum)
    assert found.sums["mae"]() == wanted.sums["mae"]()  # type: ignore[operator]


@pytest.mark.parametrize(("output", "target"), [((7,), (7, 1)), ((7, 3), (7, 2))])
def test_shapes_that_torch_would_broadcast_are_refused_in_every_batch(
    output: tuple[int, ...], target: tuple[int, ...]
) -> None:
    task = Regression()
    task.step(MODEL, pair(7))  # a first batch that is right does not blind it
    with refused(PluginError) as caught:
        task.step(MODEL, (torch.zeros(output), torch.zeros(target)))
    assert f"shape {output}" in str(caught.value)
    assert f"needs {target}" in str(caught.value)


def test_targets_take_the_number_type_of_the_output() -> None:
    x, y = pair(7)
    out = Regression().step(MODEL, (x, (10 * y).to(torch.int32)))
    assert out.loss_sum.dtype is torch.float32
    assert Regression().step(MODEL, (x, y.double())).loss_sum.dtype is torch.float32
    assert Regression().step(MODEL, (x.bfloat16(), y)).loss_sum.dtype is torch.float32


def test_wrong_options_and_data_are_refused() -> None:
    with refused(ConfigError, "task.loss"):
        Regression("mes")
    with refused(DataError):
        Regression().step(MODEL, (torch.zeros(2), torch.zeros(2, dtype=torch.complex64)))


class TakesSegments(nn.Module):
    def forward(self, x: Tensor, segment_ids: Tensor) -> Tensor:
        return x


def test_targets_that_cannot_be_told_from_padding_are_refused() -> None:
    mask = torch.ones(2, 4, dtype=torch.bool)
    batch = {"x": torch.ones(2, 2), "y": torch.tensor([[1, 2], [1, -100]]), "attention_mask": mask}
    with refused(DataError):
        Regression().step(MODEL, batch)
    task = Regression()
    task.step(MODEL, {"x": torch.ones(2, 1), "y": torch.ones(2, 1).long(), "attention_mask": mask})
    with refused(DataError):  # another length than before
        task.step(MODEL, batch)


def test_what_nothing_says_is_padding_is_a_number() -> None:
    mask = torch.ones(2, 4, dtype=torch.bool)
    batch = {"x": torch.ones(2, 2), "y": torch.tensor([[1, 2], [1, 3]]), "attention_mask": mask}
    task = Regression()
    assert task.step(MODEL, batch).loss_sum == 2.5
    assert task.step(MODEL, batch | {"y": torch.tensor([[1, 2], [1, -100]])}).loss_sum == 0.5 + 101**2 / 2


def test_segment_ids_may_be_a_field_of_the_data() -> None:
    batch = {"x": torch.ones(2), "y": torch.zeros(2), "segment_ids": torch.ones(2, 4).long()}
    assert Regression().step(TakesSegments(), batch).loss_sum == 2
