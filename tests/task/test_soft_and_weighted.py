"""Weights of classes, as torch's own loss has them, balanced as scikit-learn has it; and probabilities as targets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused
from things import LateModule
from torch import Tensor, nn

from trainrun.data.facts import describe_source
from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.task.classification import Classification
from trainrun.task.losses import compute_balanced_weights

class_weight = LateModule("sklearn.utils.class_weight")


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_loss_is_torchs_with_weights(dtype: torch.dtype) -> None:
    logits, target = some(6, 3).to(dtype), torch.tensor([0, 1, 2, 2, 1, 0])
    found = Classification(class_weights=[0.5, 2.0, 0.0], label_smoothing=0.1).step(Same(), (logits, target))
    logits = logits.to(found.loss_sum.dtype)
    weight = torch.tensor([0.5, 2.0, 0.0], dtype=logits.dtype)
    wanted = nn.functional.cross_entropy(logits, target, weight, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(found.loss_sum, wanted)


def test_places_that_are_ignored_and_soft_targets_are_weighted_too() -> None:
    task = Classification(class_weights=[1.0, 3.0])
    logits, target = some(2, 2, 5), torch.tensor([[0, 1, -100, 1, 0], [1, -100, -100, 0, 1]])
    weight = torch.tensor([1.0, 3.0])
    wanted = nn.functional.cross_entropy(logits, target, weight, reduction="sum")
    torch.testing.assert_close(task.step(Same(), (logits, target)).loss_sum, wanted)
    assert task.count((logits, target)) == 7
    soft, probabilities = some(4, 2), some(4, 2).softmax(1)
    wanted = nn.functional.cross_entropy(soft, probabilities, weight, reduction="sum")
    torch.testing.assert_close(task.step(Same(), (soft, probabilities)).loss_sum, wanted)


@pytest.mark.parametrize("as_array", [True, False])
def test_balanced_is_scikit_learns(as_array: bool) -> None:
    labels = np.array([0, 0, 0, 1, 2, 2, 2, 2, 2, 1])
    target: Any = labels if as_array else torch.tensor(labels)
    counts = describe_source((some(10, 2), target)).class_counts
    assert counts == (3, 2, 5)
    wanted = class_weight.compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert compute_balanced_weights(counts) == pytest.approx(list(wanted))


def test_a_data_set_that_lists_its_targets_is_counted() -> None:
    class Folder(torch.utils.data.Dataset[tuple[Tensor, int]]):
        targets, classes = [0, 1, 1, 1], ["a", "b"]

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return some(2), self.targets[index]

    assert describe_source(Folder()).class_counts == (1, 3)


@pytest.mark.parametrize(
    "target", [some(4), torch.tensor([[0, 1], [1, 0]]).repeat(2, 1), torch.tensor([0, -100, 1, 1])]
)
def test_what_is_no_list_of_classes_is_not_counted(target: Tensor) -> None:
    assert describe_source((some(4, 2), target)).class_counts == ()


@pytest.mark.parametrize(
    "wrong",
    ["balance", [], [0.0, 0.0], [-1.0, 2.0], [1.0, math.nan], [1.0, math.inf], [1, "x"], 2.0, [True, 1]],
)
def test_what_is_no_weight_of_a_class_is_refused(wrong: Any) -> None:
    with refused(ConfigError, "task.class_weights"):
        Classification(class_weights=wrong)


def test_a_mistake_is_said() -> None:
    with refused(ConfigError):
        compute_balanced_weights(())
    with refused(ConfigError):
        compute_balanced_weights((3, 0, 2))
    with refused(ConfigError, "task.loss"):
        Classification(loss=nn.CrossEntropyLoss(), class_weights=[1.0, 2.0])
    with refused(ConfigError):
        Classification(class_weights=[1.0, 2.0]).step(Same(), (some(2, 3), torch.tensor([0, 1])))


def pairs(classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randn(12, classes, generator=generator, dtype=torch.float64).softmax(1)


def test_certain_probabilities_are_the_classes_themselves() -> None:
    x, _ = pairs()
    y = torch.arange(12) % 5
    soft, hard = (Classification(label_smoothing=0.1) for _ in range(2))
    left, right = soft.step(Same(), (x, nn.functional.one_hot(y, 5).double())), hard.step(Same(), (x, y))
    torch.testing.assert_close(left.loss_sum, right.loss_sum, rtol=1e-12, atol=0)
    assert int(left.sums["acc"]()) == int(right.sums["acc"]())  # type: ignore[operator]


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4, 5]))])
def test_the_loss_is_linear_in_the_target(loss: nn.Module | None) -> None:
    x, y = pairs()
    weight = torch.ones(5) if loss is None else torch.arange(1.0, 6)
    out = Classification(loss=loss).step(Same(), (x, y.float()))
    wanted = sum(
        y.float()[i, c].double() * weight[c] * nn.functional.cross_entropy(x[i], torch.tensor(c))
        for i in range(12)
        for c in range(5)
    )
    torch.testing.assert_close(out.loss_sum, wanted, rtol=1e-12, atol=0)


def test_soft_and_hard_targets_are_each_checked_at_their_first_batch() -> None:
    x, y = pairs()
    task = Classification()
    task.step(Same(), (x, torch.zeros(12, dtype=torch.long)))
    with refused(PluginError):
        task.step(Same(), (x, y[:, :4]))
    for wrong in (y * 2, -y, (y > 0.2).float()):
        with refused(DataError):
            task.step(Same(), (x, wrong))
    with refused(DataError):
        task.step(Same(), (x, y[:, 0]))
    task.step(Same(), (x, y))


def test_what_is_ignored_has_no_place_in_probabilities() -> None:
    with refused(ConfigError, "task.ignore_index"):
        Classification(ignore_index=0).step(Same(), pairs())
