"""Validation and test: sums over one split, divided once at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.data.batch import map_leaves
from trainrun.data.same_samples import check_same_digests
from trainrun.errors import PluginError
from trainrun.interfaces import Batches, MicroBatch, Parallel
from trainrun.sums import (
    LOSS,
    add_flat_sums,
    check_metric_names,
    compute_metrics,
    flatten_sums,
    gather_rank_rows,
    sum_all_ranks,
)
from trainrun.timing.phases import LOGGING
from trainrun.train_state import TrainState
from trainrun.training.components import Components

WITHOUT_GRAPH = "does not require grad and does not have a grad_fn"  # torch, where nothing was recorded


def validate(run: Components, state: TrainState) -> None:
    """Run one validation, and inform early stopping, plateau schedules, hooks and monitors.

    If a signal interrupts it, nothing is recorded, and a resume repeats it.
    """
    metrics: dict[str, float] = {}
    for split in run.validation:
        values = evaluate(run, split)
        if not values:
            state.stop_request = run.parallel.agree(0, run.triggers.stop_request(), 0).stop
            return
        metrics |= values
    scheduled = run.triggers.record_validation(state, metrics)
    if scheduled:
        run.hooks.on_validation_end(run, state, metrics)
    run.phases.open(LOGGING)
    run.monitors.on_eval(state, metrics, scheduled)


def evaluate(run: Components, split: str) -> dict[str, float]:
    """Return loss and metrics of the averaged model over one split. Each sample counts once over all ranks.

    The result is empty on all ranks if a signal stopped one of them before the last batch.
    """
    batches = run.splits()[split]
    task = run.task
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    items, started, problem = 0, perf_counter(), ""
    with run.evaluating() as model:
        run.task_calls.start_evaluation(model, split)
        try:
            for number, batch in enumerate(
                iterate_even_batches(run.parallel, batches, run.triggers.is_interrupted), start=1
            ):
                run.monitors.on_validation_batch(number, batches.num_batches)
                problem = problem or batch.whole
                run.task_calls.draw_first_batch(model, batch.data)
                for piece_sums, piece_rows, late in run.retry.compute_in_pieces(
                    batch, lambda piece: compute_sums(run, model, piece)
                ):
                    add_flat_sums(sums, piece_sums, task, counts=batch.real)
                    for name, values in piece_rows.items() if batch.real else ():
                        rows.setdefault(name, []).append(values)
                    items = items + late * batch.real
                items = items + batch.count_items(task)
        except EvaluationStopped:
            return {}
        run.task_calls.end_evaluation(model)
    answers = run.parallel.gather((list(rows), problem))
    if len({problem for _, problem in answers}) > 1:
        check_same_digests([problem for _, problem in answers], f"data.{split.replace('/', '.')}")
    totals, (count,) = sum_all_ranks(run.parallel, sums, [float(items)])  # waits for the device
    joined = gather_rank_rows(
        run.parallel, rows, list(dict.fromkeys(chain(*(names for names, _ in answers))))
    )
    metrics = {
        f"{split}/{name}": value for name, value in compute_metrics(totals, count, task, joined).items()
    }
    return metrics | {f"{split}/seconds": perf_counter() - started}


class EvaluationStopped(Exception):
    """The exception that a signal stopped a rank during an evaluation."""


def iterate_even_batches(
    parallel: Parallel, stream: Batches, is_stopped: Callable[[], bool] | None = None
) -> Iterator[MicroBatch]:
    """Yield the batches of an evaluation. If forwards are collective, every rank gets the same number.

    A rank without a batch then gets a filler (`real=False`). Before each batch the ranks agree whether one of them
    has another batch, and whether one of them is stopped. Raise EvaluationStopped on all ranks at the same batch.
    Without `is_stopped`, ranks agree only if forwards are collective.
    """
    batches = iter(stream.epoch(0))
    if is_stopped is None and not parallel.forward_is_collective:
        yield from batches
        return
    filler: MicroBatch | None = None
    while True:
        batch = next(batches, None)
        stopped = is_stopped is not None and is_stopped()
        agreed = parallel.agree(int(batch is not None), int(stopped), 0)
        if agreed.stop:
            raise EvaluationStopped
        if not agreed.items:
            return
        if parallel.forward_is_collective:
            if filler is None:
                filler = batch if agreed.items == 1 else share_first_batch(parallel, batch)
            batch = filler._replace(real=False) if batch is None and filler is not None else batch
        if batch is not None:
            yield batch


def share_first_batch(parallel: Parallel, batch: MicroBatch | None) -> MicroBatch:
    """Return the batch of the first rank that has one, on this rank's device. All ranks call it together."""
    on_host = batch and batch._replace(data=move_to_device(batch.data, "cpu"))
    batches: list[MicroBatch | None] = parallel.gather(on_host)
    first = next(each for each in batches if each is not None)
    return first._replace(data=move_to_device(first.data, parallel.device))


def move_to_device(data: Any, device: torch.device | str) -> Any:
    return map_leaves(data, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)


def compute_sums(
    run: Components, model: nn.Module, batch: MicroBatch
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Return the sums of one validation batch, its rows on the host, and the item count that only the output has."""
    try:
        with run.precision.autocast():
            out = run.task.step(model, batch.data)
    except RuntimeError as error:
        if WITHOUT_GRAPH not in str(error):
            raise
        raise PluginError(
            f"task: {type(run.task).__name__}.step() computes a gradient in a validation, where torch records none; "
            "put the computation inside `with torch.enable_grad():`"
        ) from error
    check_metric_names(out.sums, run.task)
    rows = {name: values.detach().cpu() for name, values in getattr(out, "rows", {}).items()}
    return flatten_sums({LOSS: out.loss_sum, **out.sums}, run.task), rows, run.counting.read_output_count(out)
