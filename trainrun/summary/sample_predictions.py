"""Predictions of a finished run on its validation data for the report, by the best checkpoint if there is one.

For classes: the confusion matrix, and images of the worst and of random samples. For numbers: targets and
predictions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from trainrun.checkpoint.files import format_folder_name
from trainrun.checkpoint.load import load_on_all_ranks
from trainrun.checkpoint.weights import choose_evaluated_weights
from trainrun.data.split_batch import list_tensors
from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import Batches, Predicts
from trainrun.runtime.machine import read_host_memory
from trainrun.task.batches import join_batches
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.evaluate import iterate_even_batches

MAX_SAMPLES = 10_000  # per rank: the pictures are for the eye
MAX_CLASSES = 100
NUM_SHOWN = 9  # worst samples, and as many random ones
MAX_POINTS = 1000  # of a regression, per rank
MAX_OUTPUTS = 4  # numbers that a regression predicts for a sample
Columns = dict[str, Tensor]
Result = TypeVar("Result")


class Predictions(NamedTuple):
    """Targets and predictions: (B,) classes, or (B, outputs) numbers. worst, random: a few samples with their
    images.
    """

    target: Tensor
    prediction: Tensor
    worst: Columns
    random: Columns


def prediction_rows(run: Components, state: TrainState, run_dir: RunDir) -> list[dict[str, Any]]:
    """Return the row of the confusion matrix or regression. Rank 0 writes sample images. All ranks call it."""
    if run.val is None or not isinstance(run.task, Predicts):
        return []
    step = _choose_best_step(run, state)
    predictions = _call_or_note_error(run, lambda: _find_predictions(run, state, run_dir, step))
    pairs = (
        None
        if predictions is None
        else predictions and (predictions.target.tolist(), predictions.prediction.tolist())
    )
    gathered = run.parallel.gather((predictions is None, pairs))
    everyone = [pair for _, pair in gathered if pair]
    if not predictions or not everyone or any(failed for failed, _ in gathered):
        return []
    target, prediction = (torch.tensor([value for pair in everyone for value in pair[i]]) for i in (0, 1))
    row = _call_or_note_error(run, lambda: _prediction_row(run, run_dir, predictions, target, prediction))
    return [row | {"split": "val", "step": state.step, "weights_step": step}] if row else []


def _call_or_note_error(run: Components, call: Callable[[], Result]) -> Result | None:
    """Return the result of `call`. After an error, print a note and return None: a plot must not fail a finished
    run.
    """
    try:
        return call()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        run.monitors.note(f"report.html shows no predictions of the validation data ({reason})")
        return None


def _choose_best_step(run: Components, state: TrainState) -> int:
    """Return the step of the best checkpoint, or the last step if there is none or memory does not suffice to load
    it.

    Each rank holds the checkpoint's weights and a copy of its own in host memory. All ranks call it together.
    """
    best = run.checkpoints.best
    weights = [*run.model.parameters(), *run.model.buffers()]
    needed = 2 * sum(value.numel() * value.element_size() for value in weights)
    fits = needed < read_host_memory().free / run.parallel.local_world_size
    return best[0] if all(run.parallel.gather(fits)) and best is not None else state.step


def _find_predictions(
    run: Components, state: TrainState, run_dir: RunDir, step: int
) -> Predictions | tuple[()]:
    if step == state.step:
        with run.evaluating() as model:
            return _collect_predictions(run, model)
    with _use_checkpoint_weights(run, run_dir, step):
        return _collect_predictions(run, run.model)


@contextmanager
def _use_checkpoint_weights(run: Components, run_dir: RunDir, step: int) -> Iterator[None]:
    """Put the weights of a checkpoint into the model inside the block, in evaluation mode; restore its own
    afterwards.
    """
    own_weights = {name: value.detach().to("cpu", copy=True) for name, value in run.held.state_dict().items()}
    modes = [(module, module.training) for module in run.model.modules()]
    loaded = load_on_all_ranks(run_dir.checkpoints / format_folder_name(step), run.parallel, None)
    try:
        current = run.held.state_dict()
        run.held.load_state_dict(
            run.parallel.load_state_dict(choose_evaluated_weights(loaded, current)[0], current)
        )
        run.model.eval()
        yield
    finally:
        run.held.load_state_dict(own_weights)
        for module, training in modes:
            module.training = training


@torch.no_grad()
def _collect_predictions(run: Components, model: nn.Module) -> Predictions | tuple[()]:
    """Return targets and predictions. Return () if the task has no targets, or targets that are neither classes nor
    numbers.
    """
    assert run.val is not None
    assert isinstance(run.task, Predicts)
    collected: list[tuple[Tensor, Tensor]] = []
    worst: Columns = {}
    random: Columns = {}
    generator = torch.Generator().manual_seed(0)
    for batch in islice(iterate_even_batches(run.parallel, run.val), _max_num_batches(run, run.val)):
        with run.precision.autocast():
            columns = {name: column.cpu() for name, column in run.task.predict(model, batch.data).items()}
        pair = _target_and_prediction(columns)
        if pair is None:
            return ()
        if not batch.real:
            continue
        collected.append(pair)
        if pair[0].ndim == 1 and (images := _find_images(batch.data)) is not None:
            worst = _merge_highest(worst, images, columns, _error_scores(columns))
            random = _merge_highest(random, images, columns, torch.rand(len(images), generator=generator))
    if not collected:
        return ()
    target, prediction = (join_batches([pair[i] for pair in collected]) for i in (0, 1))
    if target.ndim > 1:
        shown = torch.randperm(len(target), generator=generator)[:MAX_POINTS]
        target, prediction = target[shown], prediction[shown]
    return Predictions(target, prediction, worst, random)


def _max_num_batches(run: Components, stream: Batches) -> int:
    """Return the number of batches that have about MAX_SAMPLES samples per rank. It is the same on every rank."""
    size: float = run.config.data.val_batch_size or run.config.data.batch_size
    if stream.num_samples and stream.num_batches:
        size = stream.num_samples / stream.num_batches / run.parallel.world_size
    return math.ceil(MAX_SAMPLES / size)


def _target_and_prediction(columns: Columns) -> tuple[Tensor, Tensor] | None:
    """Return targets and predictions, (B,) classes or (B, outputs) numbers; None for other columns."""
    if "target" not in columns or "prediction" not in columns:
        return None
    target, prediction = columns["target"], columns["prediction"]
    if not target.is_floating_point() and not prediction.is_floating_point():
        return (target, prediction) if target.ndim == 1 else None
    target, prediction = (value.float().reshape(len(value), -1) for value in (target, prediction))
    few = 0 < target.shape[1] <= MAX_OUTPUTS
    return (target, prediction) if few and target.shape == prediction.shape else None


def _error_scores(columns: Columns) -> Tensor:
    """Return 1 to 2 for wrong predictions and 0 to 1 for correct ones; a confident mistake has the highest score."""
    wrong = columns["prediction"] != columns["target"]
    confidence = columns.get("confidence", torch.ones(len(wrong)))
    return torch.where(wrong, 1 + confidence, 1 - confidence)


def _merge_highest(shown: Columns, images: Tensor, columns: Columns, score: Tensor) -> Columns:
    """Return the samples with the highest scores among those selected so far and a new batch."""
    chosen = score.topk(min(NUM_SHOWN, len(score))).indices
    names = [name for name in ("target", "prediction", "confidence") if name in columns]
    new = {name: columns[name][chosen] for name in names} | {"score": score[chosen]}
    new["images"] = images[chosen.to(images.device)].float().cpu()
    if not shown:
        return new
    if (
        shown["images"].shape[1:] != new["images"].shape[1:]
    ):  # pictures of another size: not beside each other
        return shown
    joined = {name: torch.cat([shown[name], new[name]]) for name in new}
    chosen = joined["score"].topk(min(NUM_SHOWN, len(joined["score"]))).indices
    return {name: column[chosen] for name, column in joined.items()}


def _find_images(batch: Any) -> Tensor | None:
    """Return the first tensor of a batch if it holds images (B, 1 or 3, H, W); else None."""
    inputs = next(iter(list_tensors(batch)), None)
    return inputs if inputs is not None and inputs.ndim == 4 and inputs.shape[1] in (1, 3) else None


def _prediction_row(
    run: Components, run_dir: RunDir, predictions: Predictions, target: Tensor, prediction: Tensor
) -> dict[str, Any] | None:
    if target.ndim > 1:
        is_labels = bool(((target == target.min()) | (target == target.max())).all())
        columns = {"target": target.T.tolist(), "prediction": prediction.T.tolist()}
        return None if is_labels else {"kind": "regression", **columns}
    class_names = run.data_facts.class_names
    classes = int(max(target.max(), prediction.max())) + 1
    if classes > MAX_CLASSES or target.min() < 0:
        return None
    if run.parallel.rank == 0 and predictions.worst:
        _save_samples(run_dir, predictions, class_names)
    cells = target * classes + prediction
    counts = torch.bincount(cells, minlength=classes * classes).reshape(classes, classes)
    names = [class_names[i] if i < len(class_names) else str(i) for i in range(classes)]
    return {"kind": "confusion", "class_names": names, "matrix": counts.tolist()}


def _save_samples(run_dir: RunDir, predictions: Predictions, class_names: tuple[str, ...]) -> None:
    from safetensors.torch import save_file  # a library that a limit of memory may refuse to load

    columns = {
        name: torch.cat([predictions.worst[name], predictions.random[name]]) for name in predictions.worst
    }
    images = columns["images"]
    low, high = images.amin(dim=(1, 2, 3), keepdim=True), images.amax(dim=(1, 2, 3), keepdim=True)
    columns["images"] = (255 * (images - low) / (high - low).clamp(min=1e-12)).round().to(torch.uint8)
    about = {"class_names": json.dumps(list(class_names)), "num_worst": str(len(predictions.worst["score"]))}
    temporary = run_dir.samples.with_suffix(".tmp")
    save_file({name: column.contiguous() for name, column in columns.items()}, temporary, metadata=about)
    temporary.replace(run_dir.samples)
