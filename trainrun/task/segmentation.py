"""Semantic segmentation: a class for every pixel, with loss, accuracy and intersection over union (IoU).

what: `trainrun.task.classification` with targets (B, H, W), per pixel without ignored ones; mean IoU and IoU per
    class; images for the report.
when: the model returns logits (B, C, H, W). when not: classes of boxes or of single objects.
source: mean IoU as in PASCAL VOC: over all pixels of an evaluation, not a mean over images
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainrun.errors import DataError
from trainrun.interfaces import IGNORED, StepOutput
from trainrun.limits import Fraction, NotNegative
from trainrun.task.batches import describe_form, split_inputs_and_target
from trainrun.task.classification import Classification
from trainrun.task.metrics.by_name import GIVEN, OF_CLASSES, ClassMetrics, split_metric_names

SHOWN = 9  # pictures of a validation
# Of classes: Okabe and Ito's, which people with colour blindness tell apart; the first is the background.
COLORS = ((0, 0, 0), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0),
          (204, 121, 167), (153, 153, 153))  # fmt: skip


class Segmentation:
    """Pixel-wise classification. The arguments are those of `Classification`; the best checkpoint has the highest
    mean `iou`.
    """

    monitor, unit = "iou", "pixels"

    def __init__(
        self,
        loss: Any = None,
        label_smoothing: Fraction = 0.0,
        class_dim: int = 1,
        ignore_index: int | None = IGNORED,
        class_weights: Literal["balanced"] | list[NotNegative] | None = None,
        metrics: str | list[Any] | dict[str, Any] | None = "iou",
        per_class: bool = True,
    ) -> None:
        if not metrics:
            self.monitor, per_class = "acc", False
        elif metrics != "iou" and not (isinstance(metrics, list) and "iou" in metrics):
            self.monitor = "acc"
        self._pixels = Classification(loss, label_smoothing, class_dim, ignore_index, class_weights)
        self.count, self.sizes, self.predict = self._pixels.count, self._pixels.sizes, self._pixels.predict
        if metrics:
            class_metrics = ClassMetrics(
                *split_metric_names(metrics, OF_CLASSES, "segmentation", GIVEN), per_class
            )
            self._pixels.metrics, self.summarize = class_metrics, class_metrics.summarize

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and sums. Raise DataError if the targets are no maps of classes (B, H, W)."""
        target = split_inputs_and_target(batch)[1]
        if target.ndim != 3 or target.is_floating_point():
            raise DataError(
                f"data: the targets are {describe_form(target)} of {target.dtype}; task=segmentation needs a "
                "whole number "
                "for each pixel, (B, H, W); for one class per picture use task=classification"
            )
        return self._pixels.step(model, batch)

    def pictures(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, list[str]]]:
        """Return inputs, targets and predictions side by side, one colour per class, each with its IoU as caption."""
        inputs, target = split_inputs_and_target(batch)
        target, predicted = target[:SHOWN].cpu(), self.predict(model, batch)["prediction"][:SHOWN].cpu()
        valued = target != (IGNORED if self._pixels.ignore_index is None else self._pixels.ignore_index)
        maps = [color_classes(target, valued), color_classes(predicted, valued)]
        names = ["target", "prediction"]
        if isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3):
            image = inputs[:SHOWN].float().cpu().expand(-1, 3, -1, -1)
            if image.shape[2:] == target.shape[1:]:
                low, high = image.min(), image.max()
                maps.insert(0, (image - low) / (high - low).clamp(min=1e-12))
                names.insert(0, "input")
        ious = [compute_picture_iou(*picture) for picture in zip(target, predicted, valued, strict=True)]
        captions = [f"IoU {iou:.2f}" for iou in ious]
        drawn = torch.cat([pad(picture, (1, 1), value=1.0) for picture in maps], 3)
        return {
            " | ".join(names): (drawn, captions),
            "color of each class": draw_legend(target, predicted, valued),
        }


def draw_legend(target: Tensor, predicted: Tensor, valued: Tensor) -> tuple[Tensor, list[str]]:
    """Return a patch in the colour of each class that occurs, and the class numbers as captions."""
    drawn = torch.cat([target[valued], predicted.flatten()])
    classes = drawn.unique()  # type: ignore[no-untyped-call]
    patches = classes[:, None, None].expand(-1, 4, 12)
    return color_classes(patches, patches >= 0), [f"class {number}" for number in classes.tolist()]


def color_classes(classes: Tensor, valued: Tensor) -> Tensor:
    """Return classes (B, H, W) as colours (B, 3, H, W) in [0, 1]; white for ignored pixels."""
    colors = torch.tensor(COLORS)[classes.clamp(min=0) % len(COLORS)] / 255
    return torch.where(valued[..., None], colors, 1.0).movedim(3, 1)


def compute_picture_iou(target: Tensor, predicted: Tensor, valued: Tensor) -> float:
    """Return the mean IoU of the classes in one image or its prediction; NaN if there is none."""
    target, predicted = target[valued], predicted[valued]
    classes = torch.cat([target, predicted]).unique().tolist()  # type: ignore[no-untyped-call]
    both = [((target == number) & (predicted == number)).sum() for number in classes]
    either = [((target == number) | (predicted == number)).sum() for number in classes]
    return float(torch.tensor([i / u for i, u in zip(both, either, strict=True)]).mean())
