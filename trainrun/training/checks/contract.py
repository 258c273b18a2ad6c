"""Check at the first step that a custom task returns sums. A task that returns means is refused.

what: loss and sums of some rows of the first batch are compared with those of the same rows given twice. A sum
    doubles, and a mean stays the same. A value is refused only if it clearly stays while its count doubles. These
    values are only noted: a count that stays; a loss that grows by less than half (a mean over pairs of the batch,
    a penalty without a count); and integers that stay (hits among the samples of a batch). The values are also
    compared with those of the two halves. If a loss is not the sum of both, it depends on micro-batches and ranks,
    which is noted. A metric that is not the sum of both, while the loss is, is refused: (B, 1) against (B,) is (B,
    B). A step with random numbers is repeated, and judged only if its noise allows it. All of this is a trial in
    evaluation mode without lasting effects.
when: every new run with a task that is not built in; `trainer.check_task=false` disables it. when not: batches that
    cannot be cut, or trials that fail. One line then says so, and the run continues.
source: the loss contract of `trainrun.interfaces`
gain: a mean would train at 1/batch of the gradient without notice. Cost: six forward passes of half a batch, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainrun.data.split_batch import count_rows, repeat_rows, select_rows
from trainrun.errors import PluginError
from trainrun.interfaces import Counting, has_count_method
from trainrun.sums import OWN, check_metric_names, compute_metrics, flatten_sums
from trainrun.task.model_loss import is_additive
from trainrun.tensors import HALF_TYPES
from trainrun.training.components import Components
from trainrun.training.without_trace import run_trial

MOST_ROWS = 64
LEAST_WHOLE = 4  # rows, so that no half is a single one
REPEATS = 8  # of a step that draws random numbers
SAME = 0.02  # of a value: far above rounding, also of bfloat16
ROUNDING, ROUNDING_TF32 = 1e-4, 5e-3  # of a sum of float32
LEAST = 1e-12  # values below say nothing
ERRORS = 3.0  # standard errors of a mean over the repeats
LOSS = ""  # its place among the sums
MEAN, UNCLEAR, SUM = "mean", "unclear", "sum"
SAME_TWICE = "stays the same if all rows are in the batch twice"

Pair = tuple[Tensor, Tensor]


class PassResults(NamedTuple):
    """Values and counts by name from several passes over the same rows, given once and twice.

    parts: of some rows, and of their halves. rounding: the relative difference of losses that counts as equal.
    """

    once: list[dict[str, Pair]]
    twice: list[dict[str, Pair]]
    parts: list[dict[str, Pair]]
    rounding: float


def check_task(run: Components, data: Any) -> None:
    """Raise PluginError if a task's output breaks the contract, or is a mean instead of a sum."""
    owners = (run.model, run.task, data, run.optimizer, *run.hooks.by_key.values())
    try:
        looks = run_trial(partial(compare_passes, run, data), run.parallel.device, *owners)
    except BadOutput as error:
        if run.own_step is not None:  # a step of the user's own trains: this task may only validate
            return
        raise PluginError(str(error)) from error
    # Whatever the user's code does with fewer rows or in a copy is no fault of the run.
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        run.monitors.note(f"task: whether it returns sums or means could not be checked ({reason})")
        return
    name = type(run.task).__name__
    means = [key for key in looks.once[0] if classify_value(looks, key) == MEAN]
    if hits := [key for key in means if key != LOSS and are_hits(looks, key)]:
        means = [key for key in means if key not in hits]
        run.monitors.note(
            f"task: {', '.join(hits)} of {name}.step() {SAME_TWICE}. That is right for hits among the samples of a "
            "batch (of a contrastive loss). For a mean, give the pair (sum, its count)"
        )
    way_out = "If the value is right as it is, use trainer.check_task=false"
    if LOSS in means:
        raise PluginError(
            f'task: the loss of {name}.step() is a mean: it {SAME_TWICE}. Return the sum (reduction="sum"), or '
            f"StepOutput(loss_mean=loss, count=number_of_items). {way_out}"
        )
    if means:
        names = ", ".join(f'sums["{key}"]' for key in means)
        raise PluginError(
            f"task: {names} of {name}.step() is a mean: it {SAME_TWICE}. Return the sum, or the pair (sum, its count). "
            f"{way_out}"
        )
    if find_loss_not_additive(looks) is None and (wrong := list_metrics_not_additive(looks, exempt=hits)):
        of_all, parts = (compute_metric(pairs, wrong[0]) for pairs in (looks.parts[:1], looks.parts[1:]))
        raise PluginError(
            f'task: sums["{wrong[0]}"] of {name}.step() is {of_all:.6g} per item for some rows, but {parts:.6g} for '
            "their two halves, so it depends on data.val_batch_size. Tensors of shapes (B, 1) and (B,) may have been "
            "broadcast to (B, B): give both the same shape. For a metric of the whole batch, return the pair "
            "(value, 1). A metric that needs all rows is computed by summarize() from StepOutput(rows=...). "
            f"{way_out}"
        )
    once, doubled = (float(seen[0][LOSS][1]) for seen in looks[:2])
    if 0 < once == doubled:
        run.monitors.note(
            f"task: the count of {name} is {once:g} for a batch, and also for the same rows twice, so a small last "
            "batch weighs as much as a full one. Return the number of items as count, and the sum over them as loss"
        )
    elif classify_value(looks, LOSS) == UNCLEAR:
        run.monitors.note(
            f"task: the loss of {name}.step() does not double if all rows are in the batch twice. If it is a mean (of "
            "a contrastive loss, for instance), return StepOutput(loss_mean=loss, count=number_of_items)"
        )
    elif (broken := find_loss_not_additive(looks)) is not None:
        run.monitors.note(
            f"task: the loss of {name}.step() is {broken[0]:.6g} for some rows, but {broken[1]:.6g} for their two "
            "halves, so trainer.accumulate_grad_batches, ranks and data.val_batch_size change it (`trainrun verify` "
            "shows it). Let count be the number that a mean was divided by, and multiply a penalty by the count. A "
            "contrastive loss sees the pairs of one micro-batch: with several ranks gather the embeddings"
        )


class BadOutput(Exception):
    """The exception for an output of a step that breaks the contract."""


def compare_passes(run: Components, data: Any) -> PassResults:
    count = count_rows(data)
    rows = min(max(count // 2, 1), MOST_ROWS)
    num_whole = min(max(rows, LEAST_WHOLE), count)
    look = build_inspection_step(run)
    few = select_rows(data, 0, rows, count)
    looks = PassResults([look(few)], [look(repeat_rows(few, rows))], [], choose_rounding(run))
    looks.once.append(look(few))
    if num_whole > 1:
        ends = ((0, num_whole), (0, num_whole // 2), (num_whole // 2, num_whole))
        with suppress(Exception):  # where not even fewer rows, or float32, will do: what is above decides
            looks.parts.extend([look(select_rows(data, *pair, count), exact=True) for pair in ends])
    if not all(are_close(*(seen[key][0] for seen in looks.once)) for key in looks.once[0]):
        for _ in range(REPEATS - 1):
            looks.once.append(look(few))
            looks.twice.append(look(repeat_rows(few, rows)))
    return looks


def build_inspection_step(run: Components) -> Callable[..., dict[str, Pair]]:
    """Return a function that runs a step in evaluation mode and returns its values and counts by name.

    `exact` is without autocast. The model is left in evaluation mode, so call this in a trial.
    """
    run.model.eval()

    def run_task_step(data: Any, exact: bool = False) -> dict[str, Pair]:
        with nullcontext() if exact else run.precision.autocast():
            out = run.task.step(run.model, data)
        return collect_loss_and_sums(run.task, run.counting, data, out)

    return run_task_step


def choose_rounding(run: Components) -> float:
    """Return the largest relative difference that rounding may cause between the loss of a batch and of its parts."""
    if any(parameter.dtype in HALF_TYPES for parameter in run.model.parameters()):
        return SAME
    return ROUNDING if torch.get_float32_matmul_precision() == "highest" else ROUNDING_TF32


def find_loss_not_additive(looks: PassResults) -> tuple[float, float] | None:
    """Return the loss of some rows and the sum of the losses of their halves if they clearly differ.

    Return None if they agree, or if random numbers explain the difference.
    """
    once, again = (float(seen[LOSS][0]) for seen in looks.once[:2])
    whole_loss, *halves = (float(seen[LOSS][0]) for seen in looks.parts) if looks.parts else (once, once)
    if max(map(abs, (whole_loss, *halves))) < LEAST or abs(once - again) > 0.1 * looks.rounding * abs(once):
        return None
    return None if is_additive(whole_loss, halves, looks.rounding) else (whole_loss, sum(halves))


def list_metrics_not_additive(looks: PassResults, exempt: Sequence[str]) -> list[str]:
    """Return the metrics that differ between some rows and their halves for a reason other than noise.

    A metric whose own count does not grow with the rows counts batches, and need not add up.
    """
    if len(looks.parts) < 3:
        return []
    first, again = looks.once[:2]
    names = []
    for name, (value, count) in looks.parts[0].items():
        grows = bool((count > max(part[name][1] for part in looks.parts[1:])).all())
        if name == LOSS or name in exempt or value.numel() != 1 or not grows:
            continue
        if not torch.allclose(first[name][0], again[name][0], rtol=0.1 * looks.rounding, equal_nan=True):
            continue
        ratio_whole, parts = compute_metric(looks.parts[:1], name), compute_metric(looks.parts[1:], name)
        # whole numbers count rows, of which rounding may move one from one side of a threshold to the other
        counted_rows = all(float(part[name][0]).is_integer() for part in looks.parts)
        slack = max(2 / float(count), 0.1 * max(abs(ratio_whole), abs(parts))) if counted_rows else 0.0
        if abs(ratio_whole - parts) > slack and not is_additive(ratio_whole, [parts], looks.rounding):
            names.append(name)
    return names


def compute_metric(looks: Sequence[dict[str, Pair]], name: str) -> float:
    """Return the metric over several batches: the sum of its values divided by the sum of its counts."""
    total = sum(float(look[name][0]) for look in looks)
    count = sum(float(look[name][1]) for look in looks)
    return total / count if count else 0.0


def collect_loss_and_sums(task: Any, counting: Counting, data: Any, out: Any) -> dict[str, Pair]:
    """Return the loss and all sums, each with its divisor.

    Raise BadOutput if the output breaks the contract of a task.
    """
    name, loss = type(task).__name__, getattr(out, "loss_sum", None)
    if not isinstance(loss, Tensor):
        got = type(out).__name__ if loss is None else f"loss_sum as a {type(loss).__name__}"
        raise BadOutput(
            f"task: {name}.step() gave a {got}; it must return "
            "trainrun.interfaces.StepOutput(loss_sum, {...}) with a tensor"
        )
    if loss.dim() != 0 or not (loss.requires_grad or bool(loss == 0)):
        raise BadOutput(
            f"task: {name}.step() gave a loss of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}; "
            "it must be the sum over the batch, 0-d, computed from the model's parameters"
        )
    try:
        late = counting.read_output_count(out)
        check_metric_names(out.sums, task)
        sums = flatten_sums({LOSS: loss, **out.sums}, task)
        if not callable(getattr(task, "summarize", None)):
            compute_metrics(sums, 1.0, task)
    except PluginError as error:
        raise BadOutput(str(error)) from error
    count = torch.as_tensor(task.count(data) if has_count_method(task) else late, dtype=torch.float64)
    if count.numel() != 1 or float(count) % 1:
        raise BadOutput(f"task: {name}.count(batch) gave {count.tolist()}; it must be a whole number")
    return {
        key: (value.detach().cpu(), sums.get(OWN + key, count).cpu())
        for key, value in sums.items()
        if not key.startswith(OWN)
    }


def are_hits(looks: PassResults, key: str) -> bool:
    """Return whether each number is an integer from 1 to its count, like hits among the other samples of a batch.

    Among equal samples the first one is the hit, so a batch given twice has as many hits.
    """
    pairs = [seen[key] for seen in (*looks.once, *looks.twice)]
    return all(bool(((value % 1 == 0) & (value >= 1) & (value <= count)).all()) for value, count in pairs)


def are_close(left: Tensor, right: Tensor) -> bool:
    return float((left - right).abs().sum()) <= 1e-3 * float(left.abs().sum())


def classify_value(looks: PassResults, key: str) -> str:
    """Classify a value as MEAN, UNCLEAR or SUM. A tensor counts as the sum of its numbers.

    MEAN: the value clearly stays while its count doubles. UNCLEAR: it is nearer to that than to a sum. SUM:
        otherwise.
    """
    once, twice = (torch.stack([seen[key][0] for seen in some]) for some in looks[:2])
    counts = [float(torch.stack([seen[key][1] for seen in some]).mean()) for some in looks[:2]]
    size = float(once.mean(0).abs().sum())
    if not LEAST < size < torch.inf or not counts[1] >= 1.5 * counts[0] > 0:
        return SUM
    noise = sum(float(some.std(0).sum()) / len(some) ** 0.5 for some in (once, twice) if len(some) > 1)
    unsure = SAME * size + ERRORS * noise
    moved = float((twice.mean(0) - once.mean(0)).abs().sum())
    missed = float((twice.mean(0) - 2 * once.mean(0)).abs().sum())
    if moved <= unsure and missed > 2 * unsure:
        return MEAN
    return UNCLEAR if missed - moved > 2 * unsure else SUM
