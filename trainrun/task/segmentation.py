"""A class for every pixel: the loss, accuracy and intersection over union of all pixels that are not ignored.

what: `trainrun.task.classification` with targets (B, H, W), per pixel; mean and single IoU; pictures for the report.
when: the model gives logits (B, C, H, W). when not: the classes of boxes or of single objects.
source: mean IoU as of PASCAL VOC: over all pixels of an evaluation, not a mean over pictures
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainrun.errors import DataError
from trainrun.interfaces import IGNORED, StepOutput
from trainrun.limits import Fraction, NotNegative
from trainrun.task.batches import form_of, inputs_and_target
from trainrun.task.classification import Classification
from trainrun.task.metrics.by_name import GIVEN, OF_CLASSES, ClassMetrics, chosen

SHOWN = 4  # pictures of a validation


class Segmentation:
    """Arguments as those of `Classification`; the best checkpoint is that of the highest mean `iou`."""

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
            class_metrics = ClassMetrics(*chosen(metrics, OF_CLASSES, "segmentation", GIVEN), per_class)
            self._pixels.metrics, self.summarize = class_metrics, class_metrics.summarize

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """DataError: the targets are no maps of classes."""
        target = inputs_and_target(batch)[1]
        if target.ndim != 3 or target.is_floating_point():
            raise DataError(
                f"data: the targets are {form_of(target)} of {target.dtype}; task=segmentation needs a whole number "
                "for each pixel, (B, H, W); for one class a picture choose task=classification"
            )
        return self._pixels.step(model, batch)

    def pictures(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Classes as grey levels: the targets on the left, what is predicted on the right."""
        target, predicted = inputs_and_target(batch)[1], self.predict(model, batch)["prediction"]
        both = torch.stack([target[:SHOWN].clamp(min=0), predicted[:SHOWN]], 2).float()  # (B, H, 2, W)
        both = pad(both / both.max().clamp(min=1), (0, 1), value=1.0)  # a white line after each
        return {"target and prediction": both.flatten(2)[:, None, :, :-1]}
