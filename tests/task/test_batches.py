"""The forms of batches and outputs that the tasks read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn

from trainrun.errors import DataError, PluginError
from trainrun.model.cnn import Cnn
from trainrun.model.gpt import Gpt
from trainrun.model.lstm import Lstm
from trainrun.model.mlp import Mlp
from trainrun.model.resnet import ResNet
from trainrun.model.sequence_vae import SequenceVae
from trainrun.model.vae import Vae
from trainrun.task.batches import (
    extract_output_tensor,
    run_model,
    split_inputs_and_optional_target,
    split_inputs_and_target,
)
from trainrun.task.dict_batches import select_dict_arguments

X, Y = torch.zeros(3, 2), torch.tensor([0, 1, 0])


@pytest.mark.parametrize("batch", [(X, Y), [X, Y], {"x": X, "y": Y}, {"images": X, "id": 4, "labels": Y}])
def test_pairs_and_dicts_are_read(batch: Any) -> None:
    assert split_inputs_and_target(batch) == (X, Y)
    assert split_inputs_and_optional_target(batch) == (X, Y)


@pytest.mark.parametrize("batch", [X, (X,), [X], {"x": X}])
def test_without_a_target_one_can_predict_and_not_train(batch: Any) -> None:
    assert split_inputs_and_optional_target(batch) == (X, None)
    with refused(DataError):
        split_inputs_and_target(batch)


@pytest.mark.parametrize("batch", [(X, Y, Y), {"y": Y}, "xy"])
def test_other_forms_are_named(batch: Any) -> None:
    for read in (split_inputs_and_target, split_inputs_and_optional_target):
        with refused(DataError):
            read(batch)


@pytest.mark.parametrize("output", [SimpleNamespace(y=X), {"y": X}, (X, X)])
def test_other_outputs_are_named(output: Any) -> None:
    with refused(PluginError):
        extract_output_tensor(output)


def test_16_bits_become_float32_and_others_stay() -> None:
    assert extract_output_tensor(X.half()).dtype is torch.float32
    assert extract_output_tensor({"logits": X.bfloat16()}).dtype is torch.float32
    assert extract_output_tensor(X.double()).dtype is torch.float64


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Mlp([1], 10), (1, 8, 8)),
        (Mlp([4], 10), (5,)),
        (Mlp([1, 8, 8], 10), ()),
        (Cnn([3, 8, 8], 10), (1, 8, 8)),
        (Cnn([1, 16, 16], 10), (1, 8, 8)),
        (ResNet([3, 8, 8], 10), (1, 8, 8)),
        (Vae([1, 8, 8]), (1, 8, 9)),
    ],
)
def test_samples_of_another_shape_than_the_network_was_built_for(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    with refused(PluginError):
        run_model(model, torch.zeros(2, *shape), None)


@pytest.mark.parametrize(
    ("model", "token"), [(Gpt(5, width=8, heads=2, layers=1), 5), (Lstm(2, vocab_size=5, width=4), 7),
                         (SequenceVae(5, width=4, latent_dim=2), -1)],
)  # fmt: skip
def test_tokens_that_a_network_of_ours_does_not_know(model: nn.Module, token: int) -> None:
    with refused(PluginError, "model.vocab_size"):
        run_model(model, torch.tensor([[0, 1, 2, token]]), None)


def test_a_sequence_longer_than_the_context_of_a_network_of_ours() -> None:
    with refused(PluginError, "model.context"):
        run_model(Gpt(5, context=3, width=8, heads=2, layers=1), torch.zeros(1, 4, dtype=torch.int64), None)


class NoMemory(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory. A tensor of shapes cannot be multiplied.")


class Own(nn.Linear):
    """Of a user, with what ours have too."""

    in_shape = (4,)


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (NoMemory([4], 2), torch.zeros(2, 5), "CUDA out of memory"),
        (Own(4, 2), torch.zeros(2, 5), "cannot be multiplied"),
        (Mlp([1, 2, 2], 2, norm="batch"), torch.zeros(1, 4), "Expected more than 1 value per channel"),
        (Mlp([1, 2, 2], 2), torch.zeros(1, 4, dtype=torch.int64), "same dtype"),
    ],
)
def test_errors_of_other_kinds_stay_as_they_are(model: nn.Module, inputs: Tensor, said: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=said):
        run_model(model, inputs, None)


class Named(nn.Module):
    def forward(self, x: Tensor, bonus: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return x, bonus


class Two(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return left, right


class AnyNumber(nn.Module):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs


class AsOne(nn.Module):
    def forward(self, inputs: Any, scale: float = 1.0) -> Any:
        return inputs


Z = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Two(), {"left": X, "right": Z, "label": Y}),
        (Two(), {"right": Z, "number": Y, "left": X, "label": Y}),
        (Two(), ((X, Z), Y)),
        (Two(), [[X, Z], Y]),
        (Two(), ({"left": X, "right": Z}, Y)),
        (AnyNumber(), ((X, Z), Y)),
        (AsOne(), ((X, Z), Y)),
    ],
)
def test_a_model_of_several_inputs_gets_each(model: nn.Module, batch: Any) -> None:
    inputs, target = split_inputs_and_target(batch)
    left, right = run_model(model, inputs, batch)
    assert (left is X, right is Z, target is Y) == (True, True, True)


def test_the_only_field_of_a_dict_is_the_input_whatever_its_name() -> None:
    batch = {"picture": X, "label": Y}
    assert run_model(AsOne(), split_inputs_and_target(batch)[0], batch) is X


@pytest.mark.parametrize(
    "batch", [{"a": X, "b": Z, "label": Y}, {"left": X, "label": Y}, (X, Y), {"left": X, "other": Z, "y": Y}]
)
def test_inputs_that_a_forward_does_not_find_are_told(batch: Any) -> None:
    with refused(PluginError, "Two.forward"):
        run_model(Two(), split_inputs_and_target(batch)[0], batch)


class ByPlace(Named):
    def forward(self, x: Tensor, **others: Any) -> Any:
        return super().forward(x, **others)


class ByName(Named):
    def forward(self, **batch: Any) -> Any:
        return super().forward(**batch)


class OnlyByName(Named):
    def forward(self, *, x: Tensor, bonus: Tensor | None = None) -> Any:
        return super().forward(x, bonus)


class AnyHow(Named):
    def forward(self, *args: Any, **others: Any) -> Any:
        return super().forward(*args, **others)


@pytest.mark.parametrize("kind", [Named, ByPlace, ByName, OnlyByName, AnyHow])
def test_a_dict_reaches_a_forward_whole_but_for_the_target(kind: type[nn.Module]) -> None:
    batch = {
        "x": torch.ones(2),
        "bonus": torch.zeros(2),
        "label": torch.tensor([0, 1]),
        "target_weight": torch.ones(2),
    }
    if kind in (Named, OnlyByName):  # only what they name
        batch["number"] = torch.arange(2)
    x, bonus = run_model(kind(), batch["x"], batch)
    assert x is batch["x"]
    assert bonus is batch["bonus"]


class PassesOn(nn.Module):
    """It hands on all that it gets, as wrappers do."""

    def forward(self, x: Tensor, **more: Any) -> dict[str, Any]:
        return more


def test_a_forward_that_takes_any_gets_what_is_an_input() -> None:
    batch = {"x": torch.ones(2), "mask": torch.ones(2), "y": torch.ones(2), "target_weight": 1, "index": 2}
    _, named = select_dict_arguments(PassesOn(), batch["x"], batch)
    assert set(named) == {"mask"}


def test_a_model_that_shifts_its_own_labels_is_sent_to_its_own_loss() -> None:
    class Shifts(nn.Module):
        def forward(self, input_ids: Tensor, decoder_input_ids: Any = None, labels: Any = None) -> Any:
            if len(input_ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return labels.new_zeros(labels.shape) if decoder_input_ids is None else None

    tokens = torch.zeros(3, 3, dtype=torch.int64)
    with pytest.raises(torch.OutOfMemoryError):
        run_model(Shifts(), tokens, {"input_ids": tokens, "labels": tokens})
    tokens = tokens[:2]
    with refused(PluginError):
        run_model(Shifts(), tokens, {"input_ids": tokens, "labels": tokens})
