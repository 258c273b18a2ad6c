"""A check before the first padded batch: whether the result of a sample depends on its padding.

what: one sample, once padded as in its batch and once cut to its own length. If loss or count differ, the model sees
    the padding, or the task counts it. One line says so, and what to do.
when: every new run with a task or model that is not built in; `trainer.check_task=false` disables it. A causal model
    with targets of -100 passes, and so does a model that masks the padding. when not: a step that draws random
    numbers, a model that takes one length only: nothing is printed.
source: `trainrun verify` shows the same in float64
gain: an LSTM read at its last position would learn from zeros. Cost: three forward passes of two rows, once.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainrun.data.batch import map_leaves
from trainrun.data.split_batch import count_rows, repeat_rows, select_rows
from trainrun.interfaces import batch_fields
from trainrun.training.checks.contract import LOSS, build_inspection_step, choose_rounding
from trainrun.training.components import Components
from trainrun.training.without_trace import run_trial

MASK = "attention_mask"


def check_padding(run: Components, data: Any) -> bool:
    """Check the loss of a padded batch, and note a difference. Return whether a rank had a padded batch. The host
    waits.
    """
    mask = batch_fields(data).get(MASK)
    mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()) else None
    if not run.parallel.sum_over_ranks([mask is not None])[0]:
        return False
    message, owners = "", (run.model, run.task, data, run.optimizer, *run.hooks.by_key.values())
    # What the user's code does with two rows, with fewer positions or in a copy is no fault of the run.
    with suppress(Exception):
        message = run_trial(partial(describe_padding_effect, run, data, mask), run.parallel.device, *owners)
    if message := next(filter(None, run.parallel.gather(message)), ""):
        run.monitors.note(message)
    return True


def describe_padding_effect(run: Components, data: Any, mask: Tensor | None) -> str:
    """Return a message if the result of a padded sample differs from the result of the sample alone; else "". The model
    is run.
    """
    row, length, filled = 0, 0, [False]
    if mask is not None:
        row, length = int(mask.sum(1).argmin()), int(mask.sum(1).min())
        if length and bool(mask[row, :length].all()):  # and not padded at its beginning
            filled = find_padded_leaves(data, mask)
    padded = repeat_rows(select_rows(data, row, row + 1, count_rows(data)), 1)
    cut = cut_padded_leaves(padded, filled, length) if any(filled) else padded
    look, rounding = build_inspection_step(run), choose_rounding(run)
    looks = [look(batch, exact=True)[LOSS] for batch in (padded, cut, padded)]
    (loss, count), (own_loss, own_count), (again, _) = ((float(a), float(b)) for a, b in looks)
    if mask is None or abs(loss - again) > 0.1 * rounding * abs(loss):  # random numbers
        return ""
    if count == own_count and not abs(loss - own_loss) > rounding * max(abs(loss), abs(own_loss)):
        return ""
    return (
        f"data: samples differ in length: the loss of one of {length} positions is {own_loss / 2:.6g} over "
        f"{own_count / 2:g} items alone, and {loss / 2:.6g} over {count / 2:g} where it is padded to {mask.shape[1]}, "
        "so data.batch_size, trainer.accumulate_grad_batches, ranks and data.val_batch_size change results (`trainrun "
        f"verify` shows it; data.padding=bucket lessens it). {MASK} (of trainrun.interfaces.batch_fields(batch)) "
        "is True at real positions: leave out the others"
    )


def find_padded_leaves(data: Any, mask: Tensor) -> list[bool]:
    """Return for each leaf of a batch whether it has padding where the mask marks padding."""
    filled: list[bool] = []
    map_leaves(data, lambda leaf: filled.append(is_padded(leaf, mask)))
    return filled


def cut_padded_leaves(data: Any, filled: list[bool], length: int) -> Any:
    """Return the batch with its padded leaves cut to `length` positions."""
    rest = iter(filled)
    return map_leaves(data, lambda leaf: leaf[:, :length].contiguous() if next(rest) else leaf)


def is_padded(leaf: Any, mask: Tensor) -> bool:
    """Return whether a tensor has the shape of the mask and one single value at all padding positions."""
    if not isinstance(leaf, Tensor) or leaf.shape[:2] != mask.shape:
        return False
    hidden = leaf[~mask]
    return torch.equal(hidden, hidden.flatten()[:1].expand_as(hidden))
