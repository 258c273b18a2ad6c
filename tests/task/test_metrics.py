"""Metrics by name against scikit-learn's, on random and on odd inputs, however an evaluation is cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused
from things import LateModule
from torch import Tensor, nn

from trainrun.errors import ConfigError
from trainrun.sums import add_sums, compute_metrics, flatten_sums
from trainrun.task.classification import Classification
from trainrun.task.metrics.by_name import OF_CLASSES, OF_LABELS, OF_NUMBERS
from trainrun.task.multilabel import MultiLabel
from trainrun.task.regression import Regression

sk = LateModule("sklearn.metrics")


def evaluated(task: Any, outputs: Tensor, target: Tensor, *cuts: int) -> dict[str, float]:
    """As an evaluation adds up the batches between the cuts."""
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    count = 0
    for batch in zip(outputs.tensor_split(cuts), target.tensor_split(cuts), strict=True):
        with torch.no_grad():
            out = task.step(nn.Identity(), batch)
        add_sums(sums, flatten_sums({"loss": out.loss_sum, **out.sums}, task), task)
        for name, values in out.rows.items():
            rows.setdefault(name, []).append(values)
        count += task.count(batch)
    return compute_metrics(sums, float(count), task, {name: torch.cat(parts) for name, parts in rows.items()})


def of_classes(seed: int, items: int = 60, classes: int = 4) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    target = torch.randint(classes, (items,), generator=draws)
    logits = torch.randn(items, classes, generator=draws) + torch.nn.functional.one_hot(target, classes)
    return logits.mul(4).round().div(4), target  # with equal scores


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_of_classes_are_those_of_scikit_learn(seed: int, classes: int) -> None:
    logits, target = of_classes(seed, classes=classes)
    names = [name for name in OF_CLASSES if name != "top5"] + (["top2"] if classes == 4 else [])
    found = evaluated(Classification(metrics=names, per_class=True), logits, target, 13, 14, 50)
    guess, scores = logits.argmax(1), logits.double().softmax(1)
    hot = torch.nn.functional.one_hot(target, classes)
    macro = {"y_true": target, "y_pred": guess, "average": "macro", "zero_division": 0.0}
    wanted = {
        "f1": sk.f1_score(**macro), "precision": sk.precision_score(**macro), "recall": sk.recall_score(**macro),
        "balanced_accuracy": sk.balanced_accuracy_score(target, guess),
        "iou": sk.jaccard_score(**macro), "auroc": sk.roc_auc_score(hot, scores, average="macro"),
        "average_precision": sk.average_precision_score(hot, scores, average="macro"),
    }  # fmt: skip
    if classes == 4:  # two classes with one score have ties between which top-k chooses as argmax does
        best_two = logits.sort(dim=1, descending=True, stable=True).indices[:, :2]
        wanted["top2"] = float((best_two == target[:, None]).any(1).double().mean())
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-12), name
    each = sk.f1_score(target, guess, average=None)
    assert [found[f"f1/{i}"] for i in range(classes)] == pytest.approx(each.tolist())
    plain = evaluated(Classification(), logits, target)
    assert (found["acc"], found["loss"]) == pytest.approx((plain["acc"], plain["loss"]))


def test_a_class_that_does_not_occur_is_in_no_mean() -> None:
    logits, target = of_classes(3)
    logits[:, 3], target = -9.0, target % 3
    found = evaluated(Classification(metrics=["f1", "auroc"], per_class=True), logits, target)
    guess = logits.argmax(1)
    assert found["f1"] == pytest.approx(sk.f1_score(target, guess, average="macro"))
    assert math.isnan(found["f1/3"])
    assert math.isnan(found["auroc/3"])
    assert not math.isnan(found["auroc"])


def test_ignored_targets_count_nothing() -> None:
    draws = torch.Generator().manual_seed(4)
    logits, target = torch.randn(3, 5, 8, generator=draws), torch.randint(5, (3, 8), generator=draws)
    target[:, 5:] = -100
    found = evaluated(Classification(metrics=["f1", "top3"]), logits, target, 1)
    guess, real = logits.argmax(1)[:, :5].flatten(), target[:, :5].flatten()
    wanted = sk.f1_score(real, guess, average="macro")
    assert found["f1"] == pytest.approx(wanted)
    in_three = (logits.topk(3, 1).indices == target[:, None]).any(1)[:, :5]
    assert found["top3"] == pytest.approx(float(in_three.double().mean()))


def test_one_class_alone_has_no_auroc() -> None:
    logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    assert math.isnan(evaluated(Classification(metrics=["auroc"]), logits, torch.ones(6).long())["auroc"])


@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_of_labels_are_those_of_scikit_learn(seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    labels = (torch.rand(50, 3, generator=draws) < 0.4).float()
    logits = torch.randn(50, 3, generator=draws) + labels
    found = evaluated(MultiLabel(metrics=list(OF_LABELS), per_class=True), logits, labels, 7, 30)
    guess = (logits > 0).int()
    wanted = {
        "exact_match": sk.accuracy_score(labels, guess),
        "auroc": sk.roc_auc_score(labels, logits), "average_precision": sk.average_precision_score(labels, logits),
    }  # fmt: skip
    for name, score in (("f1", sk.f1_score), ("precision", sk.precision_score), ("recall", sk.recall_score)):
        wanted[name] = score(labels, guess, average="micro")
        wanted[f"{name}_macro"] = score(labels, guess, average="macro", zero_division=0.0)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-7), name
    assert found["auroc/1"] == pytest.approx(sk.roc_auc_score(labels[:, 1], logits[:, 1]))


@pytest.mark.parametrize("mean", [0.0, 3000.0])
def test_metrics_of_numbers_are_those_of_scikit_learn(mean: float) -> None:
    draws = torch.Generator().manual_seed(0)
    target = torch.randn(80, 2, generator=draws) * torch.tensor([1.0, 5.0]) + mean
    output = target + torch.randn(80, 2, generator=draws)
    found = evaluated(Regression(metrics=list(OF_NUMBERS)), output, target, 3, 50)
    exact = np.asarray(target.double()), np.asarray(output.double())
    assert found["r2"] == pytest.approx(sk.r2_score(*exact), rel=1e-7)
    assert found["rmse"] == pytest.approx(math.sqrt(sk.mean_squared_error(*exact)), rel=1e-9)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(*exact), rel=1e-5)


def test_training_steps_measure_none() -> None:
    logits, target = of_classes(0)
    out = Classification(metrics=["f1", "auroc"]).step(nn.Identity(), (logits, target))
    assert (list(out.sums), dict(out.rows)) == (["acc"], {})


@pytest.mark.parametrize(
    ("task", "keywords"),
    [
        (Classification, {"metrics": ["aroc"]}),
        (Classification, {"metrics": "rmse"}),
        (Classification, {"metrics": ["top0"]}),
        (Classification, {"per_class": True}),
        (MultiLabel, {"metrics": ["top5"]}),
        (Regression, {"metrics": ["rsme"]}),
    ],
)
def test_unknown_names_are_refused(task: Any, keywords: dict[str, Any]) -> None:
    with refused(ConfigError):
        task(**keywords)


def test_a_top_of_all_classes_is_refused() -> None:
    with refused(ConfigError):
        evaluated(Classification(metrics=["top5"]), *of_classes(0))
