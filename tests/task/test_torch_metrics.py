"""Metrics of torchmetrics in tasks: as one update with all items, however an evaluation is cut."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused
from test_metrics import evaluated, of_classes
from things import LateModule
from torch import nn

from trainrun.errors import ConfigError, PluginError
from trainrun.task.classification import Classification
from trainrun.task.multilabel import MultiLabel
from trainrun.task.regression import Regression

tm = LateModule("torchmetrics")
pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="needs the extra metrics")


def many(classes: int) -> dict[str, Any]:
    return {
        "kappa": tm.CohenKappa(task="multiclass", num_classes=classes),
        "auroc": tm.AUROC(task="multiclass", num_classes=classes),
        "each": tm.classification.MulticlassF1Score(classes, average="none"),
        "calibration": tm.CalibrationError(task="multiclass", num_classes=classes),
        "mcc": tm.MatthewsCorrCoef(task="multiclass", num_classes=classes),
        "sum": tm.classification.MulticlassHingeLoss(classes) + 1.0,
    }


@pytest.mark.parametrize("cuts", [(), (13, 14, 50), tuple(range(1, 60))], ids=len)
def test_metrics_of_classes_are_those_of_one_update(cuts: tuple[int, ...]) -> None:
    logits, target = of_classes(3)
    found = evaluated(Classification(metrics=["f1", many(4)]), logits, target, *cuts)
    for name, metric in many(4).items():
        value = metric(logits.double().softmax(1), target)
        wanted = {f"{name}/{i}": one for i, one in enumerate(value)} if value.ndim else {name: value}
        assert {key: found[key] for key in wanted} == pytest.approx({k: float(v) for k, v in wanted.items()})
    assert not {name for name in found if "states" in name or "all" in name}
    assert "f1" in found


def test_two_classes_labels_and_numbers() -> None:
    logits, target = of_classes(1, classes=2)
    found = evaluated(Classification(metrics=tm.classification.BinaryAUROC()), logits, target, 20)
    assert found["auroc"] == pytest.approx(float(tm.AUROC(task="binary")(logits.softmax(1)[:, 1], target)))
    labels = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    scores = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    ranking = tm.classification.MultilabelRankingLoss(3)
    found = evaluated(MultiLabel(metrics=["exact_match", ranking]), scores, labels, 7)
    assert found["ranking_loss"] == pytest.approx(float(ranking(scores.sigmoid(), labels.long())))
    both = tm.classification.BinaryAccuracy()  # of two labels, not of the second of two classes
    found = evaluated(MultiLabel(metrics=both), scores[:, :2], labels[:, :2], 7)
    assert found["accuracy"] == pytest.approx(float(both(scores[:, :2].sigmoid(), labels[:, :2].long())))
    own = {"pearson": tm.PearsonCorrCoef(), "mape": tm.MeanAbsolutePercentageError()}
    found = evaluated(Regression(metrics=["rmse", own]), scores[:, 0], scores[:, 1] + 3, 7, 9)
    for name, metric in own.items():
        metric.reset()
        assert found[name] == pytest.approx(float(metric(scores[:, 0].double(), (scores[:, 1] + 3).double())))
    kendall = tm.KendallRankCorrCoef()
    found = evaluated(Regression(metrics=kendall), scores[:, :1], scores[:, 1], 7, 9)
    assert found["kendall_rank_corr_coef"] == pytest.approx(float(kendall(scores[:, 0], scores[:, 1])))


@pytest.mark.parametrize("name", ["R2Score", "ExplainedVariance"])
def test_states_that_grow_with_the_outputs_are_those_of_one_update(name: str) -> None:
    output, target = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0))
    for how in ("uniform_average", "raw_values"):
        metric = getattr(tm, name)(multioutput=how)
        found = evaluated(Regression(metrics=getattr(tm, name)(multioutput=how)), output, target, 7, 9)
        wanted = metric(output.double(), target.double())
        assert [found[key] for key in found if key not in ("loss", "mae")] == pytest.approx(
            wanted.flatten().tolist()
        )


def test_an_ignored_item_is_none() -> None:
    logits, target = of_classes(2)
    image, target = logits.T.reshape(1, 4, 6, 10), target.reshape(1, 6, 10).clone()
    target[0, 0, :5] = -100
    found = evaluated(
        Classification(metrics={"kappa": tm.CohenKappa(task="multiclass", num_classes=4)}), image, target
    )
    metric = tm.CohenKappa(task="multiclass", num_classes=4)
    assert found["kappa"] == pytest.approx(float(metric(logits[5:], target.flatten()[5:])))


class Curve:
    """A metric that gives no number."""

    def reset(self) -> None: ...

    def update(self, scores: torch.Tensor, target: torch.Tensor) -> None: ...

    def compute(self) -> Any:
        return torch.zeros(3), torch.zeros(3)


class Found(Curve):
    """A metric that gives this."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def compute(self) -> Any:
        return self.found


def test_numbers_of_numpy_are_numbers() -> None:
    logits, target = of_classes(0)
    given = {"a": np.float32(0.5), "b": np.int64(2), "c": np.array(3.0), "d": np.array([1, 2])}
    found = evaluated(Classification(metrics={k: Found(v) for k, v in given.items()}), logits, target)
    assert {"a": 0.5, "b": 2, "c": 3, "d/0": 1, "d/1": 2}.items() <= found.items()


@pytest.mark.parametrize(
    ("metrics", "key"),
    [
        ({"kappa": "f1"}, "task.metrics.kappa"),
        ({"acc": Curve()}, "task.metrics.acc"),
        ({"a/b": Curve()}, "task.metrics.a"),
        (["f1", {"f1": Curve()}], ""),
        (["f2", Curve()], ""),
        ([Curve()], "task.metrics.curve"),
        pytest.param(
            lambda: [tm.classification.MulticlassAccuracy(7)], "task.metrics.accuracy", id="more classes"
        ),
        pytest.param(lambda: [tm.MeanSquaredError()], "task.metrics.mean_squared_error", id="numbers"),
    ],
)
def test_a_mistake_is_named(metrics: Any, key: str) -> None:
    logits, target = of_classes(0)
    with refused((ConfigError, PluginError), key):
        Classification(metrics=metrics() if callable(metrics) else metrics).step(
            nn.Identity(), (logits, target)
        )
