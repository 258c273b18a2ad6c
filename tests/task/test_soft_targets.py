"""Probabilities as targets: the loss, the accuracy, the count, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.task.classification import Classification

MODEL = nn.Identity()


def pairs(classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randn(12, classes, generator=generator, dtype=torch.float64).softmax(1)


def test_certain_probabilities_are_the_classes_themselves() -> None:
    x, _ = pairs()
    y = torch.arange(12) % 5
    soft, hard = (Classification(label_smoothing=0.1) for _ in range(2))
    left, right = soft.step(MODEL, (x, one_hot(y, 5).double())), hard.step(MODEL, (x, y))
    torch.testing.assert_close(left.loss_sum, right.loss_sum, rtol=1e-12, atol=0)
    assert int(left.sums["acc"]()) == int(right.sums["acc"]())  # type: ignore[operator]


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4, 5]))])
def test_the_loss_is_linear_in_the_target(loss: nn.Module | None) -> None:
    x, y = pairs()
    weight = torch.ones(5) if loss is None else torch.arange(1.0, 6)
    out = Classification(loss=loss).step(MODEL, (x, y.float()))
    wanted = sum(
        y.float()[i, c].double() * weight[c] * cross_entropy(x[i], torch.tensor(c))
        for i in range(12)
        for c in range(5)
    )
    torch.testing.assert_close(out.loss_sum, wanted, rtol=1e-12, atol=0)


def test_soft_and_hard_targets_are_each_checked_at_their_first_batch() -> None:
    x, y = pairs()
    task = Classification()
    task.step(MODEL, (x, torch.zeros(12, dtype=torch.long)))
    with pytest.raises(
        PluginError, match=r"output has shape \(12, 5\), but soft targets have shape \(12, 4\)"
    ):
        task.step(MODEL, (x, y[:, :4]))
    for wrong in (y * 2, -y, (y > 0.2).float()):
        with pytest.raises(DataError, match="no probabilities of classes"):
            task.step(MODEL, (x, wrong))
    with pytest.raises(DataError, match=r"needs integers"):
        task.step(MODEL, (x, y[:, 0]))
    task.step(MODEL, (x, y))


def test_what_is_ignored_has_no_place_in_probabilities() -> None:
    with pytest.raises(ConfigError, match=r"task\.ignore_index=0: soft targets .* task\.ignore_index=-100"):
        Classification(ignore_index=0).step(MODEL, pairs())
