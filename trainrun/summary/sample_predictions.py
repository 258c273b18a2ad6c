"""What a finished model predicts on its validation data: for the confusion matrix and the picture grid."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainrun.data.split_batch import tensors_in
from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import Predicts
from trainrun.task.batches import join_batches
from trainrun.training.components import Components

MAX_SAMPLES = 10_000  # per rank: the pictures are for the eye
MAX_CLASSES = 100
GRID = 25
Pairs = tuple[list[int], list[int]]  # targets and predictions
Found = TypeVar("Found")


def confusion_row(run: Components, run_dir: RunDir) -> dict[str, Any] | None:
    """Return the row of the confusion matrix, and write sample predictions on rank 0. None if there are no classes."""
    if run.val is None or not isinstance(run.task, Predicts):
        return None
    own = _tried(run, lambda: _predictions(run))
    pairs = None if own is None else _class_pairs(own[0])
    found = run.parallel.gather((own is None, pairs))
    everyone = [pair for _, pair in found if pair is not None]
    if own is None or not everyone or any(fault for fault, _ in found):
        return None
    return _tried(run, lambda: _row(run, run_dir, everyone, *own))


def _tried(run: Components, call: Callable[[], Found]) -> Found | None:
    """Whatever the user's code or the disk does, a run that has finished is not lost to a picture."""
    try:
        return call()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        run.monitors.note(f"report.html shows no predictions of the validation data ({reason})")
        return None


def _row(
    run: Components, run_dir: RunDir, everyone: list[Pairs], columns: dict[str, Tensor], images: Tensor | None
) -> dict[str, Any] | None:
    class_names = run.data_facts.class_names
    target = torch.tensor([value for pair in everyone for value in pair[0]])
    prediction = torch.tensor([value for pair in everyone for value in pair[1]])
    classes = int(max(target.max(), prediction.max())) + 1
    if classes > MAX_CLASSES or target.min() < 0:
        return None
    if run.parallel.rank == 0 and images is not None:
        _save_samples(run_dir, images, columns["target"], columns["prediction"], class_names)
    counts = torch.bincount(target * classes + prediction, minlength=classes * classes).reshape(
        classes, classes
    )
    names = [class_names[i] if i < len(class_names) else str(i) for i in range(classes)]
    return {"kind": "confusion", "split": "val", "class_names": names, "matrix": counts.tolist()}


def _class_pairs(columns: dict[str, Tensor]) -> Pairs | None:
    """Return targets and predictions of this rank, if both are one class per sample."""
    if "target" not in columns or "prediction" not in columns:
        return None
    target, prediction = columns["target"], columns["prediction"]
    if target.ndim != 1 or target.is_floating_point() or prediction.is_floating_point():
        return None
    return target.tolist(), prediction.tolist()


@torch.no_grad()
def _predictions(run: Components) -> tuple[dict[str, Tensor], Tensor | None]:
    assert run.val is not None
    task = run.task
    assert isinstance(task, Predicts)
    collected: dict[str, list[Tensor]] = {}
    images: Tensor | None = None
    seen = 0
    with run.evaluating() as model:
        for batch in run.val.epoch(0):
            with run.precision.autocast():
                columns = task.predict(model, batch.data)
            for name, column in columns.items():
                collected.setdefault(name, []).append(column.cpu())
            if images is None:
                images = _images(batch.data)
            seen += len(next(iter(columns.values())))
            if seen >= MAX_SAMPLES:
                break
    return {name: join_batches(columns) for name, columns in collected.items()}, images


def _images(batch: Any) -> Tensor | None:
    """Return the first tensor of a batch if it holds pictures, (B, 1 or 3, H, W); else None."""
    inputs = next(iter(tensors_in(batch)), None)
    if inputs is None or inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
        return None
    return inputs[:GRID].detach().float().cpu()


def _save_samples(
    run_dir: RunDir, images: Tensor, target: Tensor, prediction: Tensor, class_names: tuple[str, ...]
) -> None:
    low = images.amin(dim=(1, 2, 3), keepdim=True)
    high = images.amax(dim=(1, 2, 3), keepdim=True)
    count = len(images)
    tensors = {
        "images": ((images - low) / (high - low).clamp(min=1e-12)).contiguous(),
        "target": target[:count].contiguous(),
        "prediction": prediction[:count].contiguous(),
    }
    temporary = run_dir.samples.with_suffix(".tmp")
    from safetensors.torch import save_file  # a library that a limit of memory may refuse to load

    save_file(tensors, temporary, metadata={"class_names": json.dumps(list(class_names))})
    temporary.replace(run_dir.samples)
