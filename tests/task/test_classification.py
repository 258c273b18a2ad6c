from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import Predicts, Sums
from trainrun.task.classification import Classification
from trainrun.task.regression import Regression


def value(sums: Sums, name: str) -> float:
    entry = sums[name]
    return float(entry() if callable(entry) else entry)


def pairs(num: int = 12, classes: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(num, classes), torch.randint(classes, (num,))


def sequences() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(5, (4, 6))
    target[0, 2:] = -100
    target[3, 5] = -100
    return torch.randn(4, 5, 6), target


MODEL = nn.Identity()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_sum_over_the_count_is_torchs_mean(smoothing: float) -> None:
    for x, y in (pairs(), sequences()):
        task = Classification(label_smoothing=smoothing)
        out = task.step(MODEL, (x, y))
        mean = cross_entropy(x, y, label_smoothing=smoothing)
        torch.testing.assert_close(out.loss_sum / task.count((x, y)), mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("ignored", [-100, 0, 255])
def test_ignored_places_count_nowhere(ignored: int) -> None:
    x, y = sequences()
    real = y != -100
    y = torch.where(real, y.clamp(min=1), ignored)
    task = Classification(ignore_index=ignored)
    out = task.step(MODEL, (x, y))
    flat = x.movedim(1, -1)[real]
    assert task.count((x, y)) == int(real.sum())
    torch.testing.assert_close(out.loss_sum, cross_entropy(flat, y[real], reduction="sum"))
    assert value(out.sums, "acc") == int((flat.argmax(1) == y[real]).sum())


@pytest.mark.parametrize("words", [
    {}, {"class_weights": [1.0, 2.0, 1.0]}, {"label_smoothing": 0.1}, {"loss": nn.CrossEntropyLoss()},
    {"ignore_index": None}, {"ignore_index": -1}, {"ignore_index": 0},
])  # fmt: skip
def test_a_target_of_a_sample_is_never_ignored(words: dict[str, Any]) -> None:
    """It would count: the mean over the others would be too small, in the first batch or any."""
    index = words.get("ignore_index")
    pieces = [(torch.eye(3), torch.tensor([first, 1, 2])) for first in (0, -100 if index is None else index)]
    task, said = Classification(**words), r"Target -1(00)? is out of bounds|of targets \(B,\) none is ignored"
    with pytest.raises((ConfigError, DataError), match=said):
        list(map(partial(task.step, MODEL), pieces))


def test_classes_may_lie_in_the_last_dimension() -> None:
    x, y = sequences()
    last, first = Classification(class_dim=-1), Classification()
    out, same = last.step(MODEL, (x.movedim(1, -1), y)), first.step(MODEL, (x, y))
    torch.testing.assert_close(out.loss_sum, same.loss_sum)
    assert value(out.sums, "acc") == value(same.sums, "acc")
    torch.testing.assert_close(last.predict(MODEL, (x.movedim(1, -1), y)), first.predict(MODEL, (x, y)))


def test_a_dimension_that_the_output_has_not_is_named() -> None:
    with refused(ConfigError, "task.class_dim"):
        Classification(class_dim=3).step(MODEL, sequences())


class OwnModule(nn.Module):
    """Per item, with a buffer that must follow the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        assert self.scale.dtype is logits.dtype
        return cross_entropy(logits, target, reduction="none") * self.scale


def own_sum(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, reduction="sum")


own_sum.reduction = "sum"  # type: ignore[attr-defined]

LOSSES: list[Callable[[], Any]] = [
    nn.CrossEntropyLoss,
    lambda: nn.CrossEntropyLoss(reduction="none"),
    lambda: partial(cross_entropy, reduction="mean"),
    lambda: partial(cross_entropy, reduction="none"),
    lambda: partial(cross_entropy, label_smoothing=0.0),
    OwnModule,
    lambda: own_sum,
    lambda: partial(own_sum),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_ones_own_becomes_a_sum(loss: Callable[[], Any]) -> None:
    x, y = pairs()
    out = Classification(loss=loss()).step(MODEL, (x.double(), y))
    torch.testing.assert_close(out.loss_sum, cross_entropy(x.double(), y, reduction="sum"))


def own_mean(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target)


class Deaf(nn.modules.loss._Loss):
    """It has torch's attribute `reduction`, and reads it too early or never."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target)


@pytest.mark.parametrize("loss", [own_mean, partial(own_mean), Deaf()])
def test_one_number_that_may_be_a_mean_is_refused(loss: Any) -> None:
    with refused(PluginError):
        Classification(loss=loss).step(MODEL, pairs())


@pytest.mark.parametrize("loss", [nn.GaussianNLLLoss(), nn.CTCLoss(), partial(ctc_loss), nn.Softmax()])
@pytest.mark.parametrize("task", [Classification, Regression])
def test_a_loss_that_is_called_otherwise_is_refused(loss: Any, task: Any) -> None:
    with refused(PluginError, "task.loss"):
        task(loss=loss)


@pytest.mark.parametrize("shape", [(12, 5, 1), (11, 5), (5, 12)])
def test_a_wrong_output_shape_is_named_with_the_right_one(shape: tuple[int, ...]) -> None:
    with pytest.raises(PluginError) as caught:
        Classification().step(MODEL, (torch.zeros(shape), torch.zeros(12, dtype=torch.long)))
    text = str(caught.value)
    assert f"output has shape {shape}" in text
    assert "(12, number of classes)" in text
    assert "\n" not in text


@pytest.mark.parametrize("target", [torch.zeros(12, 1).long(), torch.zeros(12, 3, dtype=torch.uint8)])
def test_labels_that_are_a_column_or_words_are_told(target: Tensor) -> None:
    with refused(DataError):
        Classification().step(MODEL, (pairs()[0], target))


def test_labels_outside_the_classes_are_found_in_the_first_batch_and_later() -> None:
    x, y = pairs()
    task = Classification()
    for wrong in (5, -1, -100):
        with refused(DataError, str(wrong), "5 classes"):
            task.step(MODEL, (x, torch.full_like(y, wrong)))
    task.step(MODEL, (x, y))
    with refused(DataError):
        task.step(MODEL, (x, torch.full_like(y, 7)))


def test_predictions_have_confidence_and_the_target_where_there_is_one() -> None:
    x, y = pairs()
    task = Classification()
    assert isinstance(task, Predicts)
    columns = task.predict(MODEL, (x, y))
    assert list(columns) == ["prediction", "confidence", "target"]
    assert torch.equal(columns["prediction"], x.argmax(1))
    torch.testing.assert_close(columns["confidence"], x.softmax(1).amax(1))
    assert columns["target"] is y
    assert list(task.predict(MODEL, x)) == ["prediction", "confidence"]


class Unmasked(nn.CrossEntropyLoss):
    """As the losses of segmentation_models_pytorch."""

    def __init__(self) -> None:
        super().__init__()
        self.ignore_index = None  # type: ignore[assignment]

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target, reduction=self.reduction)


def test_a_loss_that_ignores_nothing_takes_null() -> None:
    x, y = pairs()
    found = Classification(loss=Unmasked(), ignore_index=None).step(MODEL, (x, y))
    assert torch.equal(found.loss_sum, Classification().step(MODEL, (x, y)).loss_sum)


@pytest.mark.parametrize(
    "arguments",
    [
        {"label_smoothing": 0.1, "loss": own_sum},
        {"loss": nn.CrossEntropyLoss(ignore_index=0)},
        {"loss": Unmasked()},
        {"loss": Unmasked(), "ignore_index": 0},
        {"loss": 3},
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any]) -> None:
    with refused(ConfigError):
        Classification(**arguments)


def test_a_loss_with_weights_that_would_never_train_is_refused() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with refused(PluginError):
        Classification(loss=Learned())


def test_under_autocast_the_loss_is_summed_in_float32() -> None:
    x, y = pairs()
    with torch.autocast("cpu", torch.bfloat16):
        out = Classification().step(nn.Linear(5, 5), (x, y))
    assert out.loss_sum.dtype is torch.float32


@pytest.mark.parametrize(("wrong", "ignored"), [(255, -100), (-1, -100), (-100, 255)])
def test_a_mark_in_a_map_that_counts_nothing_is_named(wrong: int, ignored: int) -> None:
    target = torch.zeros(2, 3, 3, dtype=torch.int64)
    target[0, 0, 0] = wrong
    with refused(DataError):
        Classification(ignore_index=ignored).step(MODEL, (torch.randn(2, 5, 3, 3), target))
