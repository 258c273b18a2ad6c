"""What a finished run predicts on its validation data, as the report shows it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import trainrun as package
from trainrun.plots.prediction_pictures import read_sample_predictions, read_task_pictures
from trainrun.task.segmentation import compute_picture_iou

pytestmark = pytest.mark.usefixtures("drawn")

WORDS = ("monitor.hardware=false", "monitor.progress_bar=false", "monitor.plots=true", "trainer.num_threads=1",
         "output_dir=run")  # fmt: skip


def rows_of(run: Any, kind: str) -> list[dict[str, Any]]:
    return [row for row in run.metrics if row["kind"] == kind]


class Spoils:
    """A hook that makes the weights useless after the first epoch, so that the first one is the best."""

    def on_step_end(self, run: Any, state: Any) -> None:
        if state.step > 45:
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.mul_(0.0)


def test_confusion_matrix_and_samples_are_of_the_best_checkpoint(workdir: Path) -> None:
    hook = "hook.spoils._target_=tests.runs.test_predictions_in_report.Spoils"
    run = package.train(*WORDS, hook, "trainer.max_epochs=2")
    (row,) = rows_of(run, "confusion")
    assert row["weights_step"] == run.status["best_step"] == 45
    assert row["step"] == 90
    right = sum(row["matrix"][i][i] for i in range(10)) / sum(map(sum, row["matrix"]))
    assert right == pytest.approx(run.status["value"])
    assert right > 0.8
    last = run.load_model("last")
    assert all(not parameter.any() for parameter in last.parameters())  # the run's own weights are untouched
    samples = read_sample_predictions(run.files)
    assert samples is not None
    assert samples.images.shape == (18, 1, 8, 8)
    assert samples.confidence is not None
    worst = samples.target[:9] != samples.prediction[:9]
    confidence = samples.confidence[:9][worst].tolist()
    assert confidence == sorted(confidence, reverse=True)  # the surest mistake first
    assert worst.sum() == min(9, round((1 - right) * 359))


@pytest.mark.parametrize(("outputs", "shown"), [(1, 1), (3, 3), (7, 0)])
def test_a_regression_has_pairs_of_target_and_prediction(outputs: int, shown: int, workdir: Path) -> None:
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    target = inputs @ torch.arange(3.0 * outputs).reshape(3, outputs)
    target = target.squeeze(1) if outputs == 1 else target
    model = torch.nn.Sequential(torch.nn.Linear(3, outputs), *([torch.nn.Flatten(0)] if outputs == 1 else []))
    data = torch.utils.data.TensorDataset(inputs, target)
    words = ("task=regression", "trainer.max_steps=3", "data.batch_size=8")
    run = package.train(*WORDS, *words, model=model, data=data, val=data)
    rows = rows_of(run, "regression")
    assert len(rows) == (shown > 0)
    for row in rows:
        assert len(row["target"]) == len(row["prediction"]) == shown
        assert {len(column) for column in row["target"]} == {40}
        assert sorted(row["target"][0]) == pytest.approx(sorted(target.reshape(40, -1)[:, 0].tolist()))


def test_a_segmentation_shows_input_target_and_prediction_with_iou(workdir: Path) -> None:
    images = torch.rand(12, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    target = (images[:, 0] > 0.5).long()
    target[:, 0, 0] = -100
    data = torch.utils.data.TensorDataset(images, target)
    words = ("task=segmentation", "trainer.max_steps=2", "data.batch_size=6")
    run = package.train(*WORDS, *words, model=torch.nn.Conv2d(3, 2, 1), data=data, val=data)
    drawn = read_task_pictures(run.files)
    patches, class_names = drawn.pop("color of each class")
    assert class_names == ["class 0", "class 1"]
    assert patches[:, :, 0, 0].tolist() == [[0, 0, 0], [230, 159, 0]]
    ((name, (pictures, captions)),) = drawn.items()
    assert name == "input | target | prediction"
    assert pictures.shape == (9, 3, 4, 3 * 8)  # a white line at both sides
    assert pictures[0, :, 0, 9].tolist() == [255, 255, 255]  # no value
    ious = [float(caption.removeprefix("IoU ")) for caption in captions]
    assert len(ious) == 9
    assert all(0 <= iou <= 1 for iou in ious)
    report = (run.folder / "report.html").read_text()
    assert f"<figcaption>{captions[0]}</figcaption>" in report
    assert "<span>input</span><span>target</span><span>prediction</span>" in report


def test_iou_of_a_picture_is_the_mean_of_its_classes() -> None:
    target, predicted = torch.tensor([[0, 0, 1, 2]]), torch.tensor([[0, 1, 1, 5]])
    valued = torch.tensor([[True, True, True, False]])
    assert compute_picture_iou(target, predicted, valued) == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert math.isnan(compute_picture_iou(target, predicted, ~(valued | True)))


def test_captions_are_as_many_as_pictures(tmp_path: Path) -> None:
    from trainrun.errors import PluginError
    from trainrun.training.checks.task_pictures import save_pictures

    pictures = torch.zeros(2, 1, 3, 3)
    with pytest.raises(PluginError, match="captions"):
        save_pictures(tmp_path / "p.safetensors", {"a": (pictures, ["one"])}, "Mine")
    save_pictures(tmp_path / "p.safetensors", {"a": (pictures, ["one", "two"]), "b": pictures}, "Mine")
    assert (tmp_path / "p.safetensors").is_file()
