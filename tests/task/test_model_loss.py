"""A model's own mean loss becomes a sum by the count that explains it, and is refused where none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.errors import DataError, PluginError
from trainrun.task.model_loss import ModelLoss


class Own(nn.Module):
    """Logits of each token; the loss as `reduce` makes it of those of the labels."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reduce, self.table, self.dropout = reduce, nn.Embedding(9, 9), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(9)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.norm(self.dropout(self.table(input_ids)).transpose(1, 2)).transpose(1, 2)
        if self.reduce == "next_labels":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if labels.ndim == 1:
            return {"loss": cross_entropy(logits.mean(1), labels)}
        each = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        real = labels != -100
        if self.reduce == "samples":
            return {"loss": ((each * real).sum(1) / real.sum(1).clamp(min=1)).mean()}
        if self.reduce == "sum":
            return {"loss": each.sum()}
        if self.reduce == "none":
            return {"loss": each}
        return {"loss": each.sum() / real.sum()}


def batch(classes: bool = False) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(9, (2, 4, 7), generator=draws)
    labels[0, 3:] = labels[1, :2] = labels[2, 5] = -100
    return {"input_ids": ids, "labels": ids[:, 0].clone() if classes else labels, "other": torch.zeros(4)}


@pytest.mark.parametrize("rule", ["samples", "labels", "next_labels"])
@pytest.mark.parametrize("said", [False, True])
def test_the_sum_of_parts_is_that_of_the_whole(rule: str, said: bool) -> None:
    model, task, data = Own(rule), ModelLoss(rule if said else "auto"), batch()  # type: ignore[arg-type]
    model.norm.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    first = task.step(model, data)
    torch.set_rng_state(random)  # the look at the first batch drew no numbers
    assert torch.equal(task.step(model, data).loss_sum, first.loss_sum)
    assert task.rule == rule
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.eval()
    whole = task.step(model, data)
    parts = [task.step(model, {key: value[rows] for key, value in data.items()}) for rows in ([0, 1], [2, 3])]
    torch.testing.assert_close(parts[0].loss_sum + parts[1].loss_sum, whole.loss_sum)
    assert int(whole.count) == sum(int(part.count) for part in parts)


def test_a_class_a_row_is_a_mean_of_samples() -> None:
    task = ModelLoss()
    assert task.step(Own("samples").eval(), batch(classes=True)).count == 4
    assert task.rule == "samples"


@pytest.mark.parametrize(
    ("reduce", "change"),
    [
        ("sum", {}),
        ("none", {}),
        ("samples", {"labels": torch.full((4, 7), -100)}),
        ("labels", {"labels": batch()["input_ids"]}),
        ("samples", {"input_ids": torch.ones(1, 7, dtype=torch.long), "labels": torch.ones(1, dtype=torch.long)}),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(reduce: str, change: dict[str, Tensor]) -> None:
    with refused((PluginError, DataError)):
        ModelLoss().step(Own(reduce), batch() | change)


@pytest.mark.parametrize(
    ("data", "key"),
    [((torch.zeros(2), torch.zeros(2)), "task=model_loss"), ({"input_ids": torch.ones(2, 3)}, "")],
)
def test_a_batch_of_another_form_is_refused(data: Any, key: str) -> None:
    with refused((PluginError, DataError, TypeError), key):
        ModelLoss("labels").step(Own("labels"), data)


class Wrapper(nn.Module):
    """Hands on whatever it gets, as peft does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapper_gets_the_fields_that_what_it_wraps_names() -> None:
    model = Own("labels").eval()
    alone, wrapped = (ModelLoss("labels").step(one, batch()).loss_sum for one in (model, Wrapper(model)))
    assert torch.equal(alone, wrapped)
