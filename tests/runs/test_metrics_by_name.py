"""Metrics by name in whole runs: as scikit-learn has them, however the evaluation is cut, and as what "best" means."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from approved import approve_error
from quiet_runs import QUIET, weights
from things import LateModule

import trainrun as package
from trainrun.cli.main import main

sk = LateModule("sklearn.metrics")
KAPPA = "{_target_: torchmetrics.CohenKappa, task: multiclass, num_classes: 10}"
RANKED = "{tm_auroc: {_target_: torchmetrics.AUROC, task: multiclass, num_classes: 10}}"
NAMES = (f"task.metrics=[f1,auroc,top3,balanced_accuracy,{KAPPA},{RANKED}]", "task.per_class=true", *QUIET)


def evaluations(run: package.RunResult) -> list[dict[str, float]]:
    """What each validation found, without its seconds."""
    rows = [row for row in run.metrics if row["kind"] == "eval"]
    return [
        {k: v for k, v in row.items() if k.startswith("val/") and k != "val/seconds"} | {"step": row["step"]}
        for row in rows
    ]


def test_an_evaluation_equals_scikit_learn_on_the_predictions(workdir: Path) -> None:
    run = package.train(*NAMES, "trainer.max_epochs=1", "checkpoint.monitor=val/f1", "output_dir=run")
    assert (run.status["monitor"], run.status["mode"]) == ("val/f1", "max")
    assert main(["evaluate", "run"]) == 0
    assert main(["predict", "run"]) == 0
    found = json.loads(Path("run/evaluation-val.json").read_text())
    assert {k: v for k, v in found.items() if k != "val/seconds"}.items() >= {
        k: pytest.approx(v) for k, v in evaluations(run)[-1].items() if k != "step"
    }.items()
    rows = list(csv.DictReader(Path("run/predictions-val.csv").read_text().splitlines()))
    wanted, said = ([int(row[name]) for row in rows] for name in ("target", "prediction"))
    assert found["val/f1"] == pytest.approx(sk.f1_score(wanted, said, average="macro")) == run.status["value"]
    each = sk.f1_score(wanted, said, average=None)
    assert [found[f"val/f1/{i}"] for i in range(10)] == pytest.approx(list(each))
    assert found["val/balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(wanted, said))
    assert found["val/acc"] < found["val/top3"] < 1
    assert 0.9 < found["val/auroc"] < 1
    assert found["val/tm_auroc"] == pytest.approx(found["val/auroc"], rel=1e-6)
    assert found["val/cohen_kappa"] == pytest.approx(sk.cohen_kappa_score(wanted, said))


@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        (("data.val_batch_size=7",), ("data.val_batch_size=359",)),
        pytest.param(
            ("parallel=ddp", "data.batch_size=25"), ("data.batch_size=50",), marks=pytest.mark.process
        ),
    ],
    ids=["batches", "ranks"],
)
def test_batches_and_ranks_change_no_metric(
    workdir: Path, fewer: tuple[str, ...], more: tuple[str, ...]
) -> None:
    words = (*NAMES, "precision=64", "trainer.max_epochs=1")
    left, right = (evaluations(package.train(*words, *cut)) for cut in (fewer, more))
    assert left == [{name: pytest.approx(value, rel=1e-9) for name, value in row.items()} for row in right]
    assert len([name for name in left[0] if name.startswith("val/auroc/")]) == 10


def test_metrics_change_no_weight(workdir: Path) -> None:
    plain = package.train(*QUIET, "trainer.max_epochs=2")
    whole = package.train(*NAMES, "trainer.max_epochs=2")
    for name, tensor in weights(str(plain.folder)).items():
        assert tensor.equal(weights(str(whole.folder))[name])


def test_a_validation_line_leaves_out_the_single_classes(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*NAMES, "trainer.max_epochs=1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch "))
    assert "val/f1" in line.split()
    assert "val/f1/3" not in line


@pytest.mark.parametrize(
    "words",
    [
        ("task.metrics=[aroc]",),
        ("task.metrics=[rmse]",),
        ("task.metrics=[top10]",),
        ("task.per_class=true",),
        (f"task.metrics=[{KAPPA}]", "checkpoint.monitor=val/kappa"),
        ("task.metrics=[{_target_: torchmetrics.Kappa}]",),
        (
            "task.metrics.k._target_=torchmetrics.ROC",
            "task.metrics.k.task=multiclass",
            "task.metrics.k.num_classes=10",
        ),
        ("task.metrics=[f1]", "checkpoint.monitor=val/auroc"),
    ],
)
def test_a_mistake_is_answered_before_the_first_step(
    workdir: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main([*words, *QUIET, "trainer.max_epochs=1"]) != 0
    approve_error(capsys.readouterr().err)
    rows = [row for path in Path().rglob("metrics.jsonl") for row in path.read_text().splitlines()]
    assert not [row for row in rows if json.loads(row)["kind"] in ("train", "eval")]
