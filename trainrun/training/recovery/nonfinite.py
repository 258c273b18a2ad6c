"""A step with gradients that are not finite: its data is saved, then `trainer.nan_policy` decides.

what: the update is skipped on all ranks at the same step (gradients are equal on all of them). Samples, losses, loss
    scale and the batch itself are saved in `nonfinite/step-N/` in the run folder, for each rank. `stop` ends the
    run. `skip` continues without the step, and ends the run after MAX_SKIPS_IN_A_ROW, or if more than
    MAX_SKIPPED_SHARE of the steps were skipped. `rollback` returns to the newest checkpoint and continues with the
    data after the bad step: the data between the two is skipped, as in PaLM's training.
when: always, except with `ignore`. With float16 an overflow is no fault: the loss scale falls and the step is
    skipped; a fault is a scale that falls again and again. when not: a loss that is not finite while its gradients
    are finite is only logged.
source: Chowdhery et al. 2022 (arXiv:2204.02311), section 5.1, for going back and skipping data.
gain: nothing is lost but the step. It adds no time to other steps: whether an update was skipped is known anyway.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.checkpoint.files import FileLayer
from trainrun.checkpoint.save import iterate_safetensors_bytes
from trainrun.errors import TrainingError
from trainrun.folder.run_folder import write_json
from trainrun.interfaces import IGNORED, Batches, Parallel, Precision
from trainrun.output import format_count
from trainrun.train_state import BadStep, RollBack, TrainState
from trainrun.training.recovery.oom import OomRetry, read_stored_values

MAX_WRITTEN = 8  # steps of a run that are written down; they can be deleted after a look
MAX_SKIPPED_SHARE = 0.1
LATE = (
    "It was this step or one shortly before: on a GPU this policy reads the check only where the host waits anyway. "
    "trainer.nan_policy=skip and rollback read it in every step and save the batch"
)
MAX_ROLLBACKS = 3
LEAST_STEPS = 1000  # before a share means anything
MOST_BATCHES = 64  # of a validation that are looked at


class NonfiniteStepHandler:
    """The reaction to a skipped update: stop, skip or roll back (`trainer.nan_policy`).

    folder: where bad batches are saved. note: prints what was done.
    """

    def __init__(
        self,
        policy: str,
        folder: Path,
        parallel: Parallel,
        precision: Precision,
        retry: OomRetry,
        note: Callable[[str], None],
    ) -> None:
        self._policy, self._folder = policy, folder
        self._parallel, self._precision, self._retry, self._note = parallel, precision, retry, note
        self._told = False

    def __call__(self, state: TrainState, failure: str) -> None:
        """Handle a skipped step, on all ranks. Raise TrainingError or RollBack. failure: "" if the run may continue."""
        bad, state.bad = state.bad, None
        scaler = self._precision.state_dict()["scaler"]
        about = ""
        if bad is not None and (scaler is None or failure):
            about = self._save_step(state, bad, scaler)
        elif failure and bad is None:
            about = LATE
        if self._policy == "rollback" and (failure or scaler is None):
            self._roll_back(state, failure, about)
        if failure:
            raise TrainingError(f"step {state.step}: {failure}{about and f'. {about}'}")
        self._skip_step(state, about)

    def _roll_back(self, state: TrainState, failure: str, about: str) -> None:
        reason = failure or "a gradient was NaN or infinite"
        if state.rollbacks >= MAX_ROLLBACKS:
            raise TrainingError(
                f"step {state.step}: {reason}. The run returned to a checkpoint {MAX_ROLLBACKS} times already. "
                f"Lower optimizer.lr or set trainer.gradient_clip_val=1. {about}"
            )
        self._note(
            f"step {state.step}: {reason}. The run returns to the newest checkpoint and skips the data up to this "
            f"step ({state.rollbacks + 1} of at most {MAX_ROLLBACKS} times). {about}"
        )
        raise RollBack(state)

    def _skip_step(self, state: TrainState, about: str) -> None:
        if state.step >= LEAST_STEPS and state.skipped_steps > MAX_SKIPPED_SHARE * state.step:
            raise TrainingError(
                f"step {state.step}: a gradient was NaN or infinite in {state.skipped_steps} steps, more than "
                f"{MAX_SKIPPED_SHARE:.0%} of all. Lower optimizer.lr or set trainer.gradient_clip_val=1. {about}"
            )
        if reason := self._retry.repair_buffers():
            raise TrainingError(
                f"step {state.step}: {reason}, so validations and checkpoints would hold NaN too. Resume from the "
                f"newest checkpoint with trainer.nan_policy=rollback. {about}"
            )
        if about and not self._told:
            self._told = True
            self._note(
                f"step {state.step}: a gradient was NaN or infinite; the step is skipped (trainer.nan_policy=skip). "
                f"The run ends if more than {MAX_SKIPPED_SHARE:.0%} of the steps are skipped. {about}"
            )

    def _save_step(self, state: TrainState, bad: BadStep, scaler: Mapping[str, Any] | None) -> str:
        """Save the part of this rank. Return the same description of the step on all ranks."""
        losses = [float(loss) for loss in bad.losses]
        place = self._folder / f"step-{state.step:08d}"
        wrong = sum(facts["nonfinite"] for row in _describe_batches(bad) for facts in row["tensors"].values())
        room = place.exists() or len(list(self._folder.glob("step-*"))) < MAX_WRITTEN
        gathered = self._parallel.gather((all(map(math.isfinite, losses)), wrong, room))
        causes = [
            (rank, describe_nonfinite_cause(finite, wrong))
            for rank, (finite, wrong, _) in enumerate(gathered)
        ]
        several = self._parallel.world_size > 1
        about = "; ".join(f"rank {rank}: {cause}" if several else cause for rank, cause in causes if cause)
        about = f"Cause: {about or 'unknown; the losses and batches of all ranks are finite'}"
        if not gathered[0][2]:
            return f"{about}. The batch is not saved: {self._folder} has {MAX_WRITTEN} such batches already"
        fault = ""
        try:
            self._write_part(place, state, bad, losses, scaler)
        except (OSError, KeyError, ValueError) as error:  # the run's own way must not depend on it
            fault = f"{type(error).__name__}: {error}"
        faults = [text for text in self._parallel.gather(fault) if text]
        if faults:
            return f"{about}. The batch could not be saved to {place}: {faults[0]}"
        return f"{about}. The batch is saved in {place}: sample numbers as .json, tensors as .safetensors"

    def _write_part(
        self,
        place: Path,
        state: TrainState,
        bad: BadStep,
        losses: list[float],
        scaler: Mapping[str, Any] | None,
    ) -> None:
        rank, files = self._parallel.rank, FileLayer()
        for folder in (self._folder, place):  # the run itself is not made again where it is gone
            folder.mkdir(exist_ok=True)
        rows = _describe_batches(bad)
        for row, loss in zip(rows, losses, strict=True):
            row["loss_sum"] = loss if math.isfinite(loss) else str(loss)
        tensors = {
            name: leaf.detach().cpu().contiguous()
            for number, batch in enumerate(bad.window)
            for name, leaf in iterate_batch_tensors(batch.data, str(number))
        }
        temporary = place / f".rank-{rank:05d}.{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            files.write(temporary, iterate_safetensors_bytes(tensors))
            files.rename(temporary, place / f"rank-{rank:05d}.safetensors")
        finally:
            temporary.unlink(missing_ok=True)
        write_json(
            place / f"rank-{rank:05d}.json",
            {
                "step": state.step, "epoch": bad.epoch, "first_batch": bad.batches, "rank": rank,
                "world_size": self._parallel.world_size, "nan_policy": self._policy,
                "loss_scale": None if scaler is None else dict(scaler), "batches": rows,
            },
        )  # fmt: skip


def describe_nonfinite_cause(is_finite: bool, num_values: int) -> str:
    """Return what was not finite in a rank's step, or "". num_values: the number of such values in its batch."""
    loss = "" if is_finite else "the loss"
    values = f"{format_count(num_values, 'value')} of the batch" if num_values else ""
    if not loss and not values:
        return ""
    verb = "were" if num_values > 1 or (loss and values) else "was"
    return f"{' and '.join(filter(None, (loss, values)))} {verb} NaN or infinite"


def _describe_batches(bad: BadStep) -> list[dict[str, Any]]:
    """Describe each micro-batch: its samples, and how many values of each tensor are not finite."""
    return [
        {
            "samples": None if batch.indices is None else batch.indices.tolist(),
            "counts": batch.real,
            "tensors": {
                name: {"shape": list(leaf.shape), "nonfinite": count_nonfinite(leaf)}
                for name, leaf in iterate_batch_tensors(batch.data, str(number))
            },
        }
        for number, batch in enumerate(bad.window)
    ]


def iterate_batch_tensors(data: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a batch with its path: `0.inputs`, `0.1`."""
    if isinstance(data, Tensor):
        yield name, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from iterate_batch_tensors(value, f"{name}.{key}")
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from iterate_batch_tensors(value, f"{name}.{number}")


def count_nonfinite(tensor: Tensor) -> int:
    """Count the values that are not finite. The host waits for the device, so call this only after a bad step."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return int((~torch.isfinite(read_stored_values(tensor))).sum()) if floating else 0


def find_likely_cause(model: nn.Module, batches: Batches) -> str:
    """Return why a validation's loss is not finite, without another forward; "" if unknown.

    Weights, buffers, inputs and targets are checked in this order; the first one that is not finite is named.
    """
    for kind, tensors in (("weight", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if count_nonfinite(tensor):
                return f"the model's {kind} {name} is not finite"
    ignored = []
    for batch in islice(batches.epoch(0), MOST_BATCHES):
        leaves = [leaf for _, leaf in iterate_batch_tensors(batch.data, "")]
        for leaf in leaves:
            if count_nonfinite(leaf):
                return f"the data is not finite{_describe_sample(leaf, batch.indices)}"
        ignored.append(any(bool((leaf == IGNORED).all()) for leaf in leaves))
    if all(ignored):
        return f"every target is {IGNORED}, which counts nothing"
    return (
        "weights and data are finite, so a number became too large for its type, or the model or the task divides "
        "by 0 or takes the logarithm of 0 where it evaluates"
    )


def _describe_sample(tensor: Tensor, indices: Tensor | None) -> str:
    """Return `: sample 12` for the first bad row; "" if rows are not samples."""
    if indices is None or tensor.ndim == 0 or len(tensor) != len(indices):
        return ""
    rows = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(1).cpu()
    return f": sample {int(indices[rows][0])} holds NaN or infinity"
