"""Validation and test: sums over one split, divided once."""

from __future__ import annotations

from itertools import chain
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from trainrun.errors import PluginError
from trainrun.interfaces import MicroBatch
from trainrun.sums import LOSS, add_flat_sums, check_names, flat_sums, metrics_of, over_ranks, rows_over_ranks
from trainrun.timing.phases import LOGGING
from trainrun.train_state import TrainState
from trainrun.training.components import Components

WITHOUT_GRAPH = "does not require grad and does not have a grad_fn"  # torch, where nothing was recorded


def validate(run: Components, state: TrainState) -> None:
    """One validation, with what follows from it: early stopping, schedules that listen, rows.

    Where a signal cuts it short nothing of it is recorded, and a resume does it again.
    """
    metrics: dict[str, float] = {}
    for split in run.validation:
        values = evaluate(run, split)
        if not values:
            state.stop_request = run.parallel.agree(0, run.triggers.stop_request(), 0).stop
            return
        metrics |= values
    scheduled = run.triggers.note_validation(state, metrics)
    if scheduled:
        run.hooks.on_validation_end(run, state, metrics)
    run.phases.open(LOGGING)
    run.monitors.on_eval(state, metrics, scheduled)


def evaluate(run: Components, split: str) -> dict[str, float]:
    """Loss and metrics of the averaged model over one split, each sample counted once over all ranks.

    Empty, on all ranks, where a signal asked one of them to stop before its last batch.
    """
    batches = run.splits()[split]
    task = run.task
    sums: dict[str, Tensor] = {}
    rows: dict[str, list[Tensor]] = {}
    items, started, stopped, problem = 0, perf_counter(), False, ""
    with run.evaluating() as model:
        run.task_calls.evaluation_starts(model, split)
        for number, batch in enumerate(batches.epoch(0), start=1):
            run.monitors.on_validation_batch(number, batches.num_batches)
            if stopped := run.triggers.interrupted():
                break
            problem = problem or batch.whole
            run.task_calls.evaluation_sees(model, batch.data)
            for found, kept, late in run.retry.compute_in_pieces(
                batch, lambda piece: sums_of(run, model, piece)
            ):
                add_flat_sums(sums, found, task)
                for name, values in kept.items():
                    rows.setdefault(name, []).append(values)
                items = items + late
            items = items + batch.counted_by(task)
        else:
            run.task_calls.evaluation_ends(model)
    answers = run.parallel.gather((list(rows), stopped, problem))
    if len({problem for *_, problem in answers}) > 1:
        from trainrun.data.same_samples import check_same

        check_same([problem for *_, problem in answers], f"data.{split.replace('/', '.')}")
    if any(stopped for _, stopped, _ in answers):
        return {}
    totals, (count,) = over_ranks(run.parallel, sums, [float(items)])  # waits for the device
    joined = rows_over_ranks(
        run.parallel, rows, list(dict.fromkeys(chain(*(names for names, *_ in answers))))
    )
    metrics = {f"{split}/{name}": value for name, value in metrics_of(totals, count, task, joined).items()}
    return metrics | {f"{split}/seconds": perf_counter() - started}


def sums_of(
    run: Components, model: nn.Module, batch: MicroBatch
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Return the sums of one validation batch, its rows on the host, and the number of items that only the
    output tells.
    """
    try:
        with run.precision.autocast():
            out = run.task.step(model, batch.data)
    except RuntimeError as error:
        if WITHOUT_GRAPH not in str(error):
            raise
        raise PluginError(
            f"task: {type(run.task).__name__}.step() differentiates in a validation, where torch records no gradients; "
            "compute what it differentiates inside `with torch.enable_grad():`"
        ) from error
    check_names(out.sums, run.task)
    rows = {name: values.detach().cpu() for name, values in getattr(out, "rows", {}).items()}
    return flat_sums({LOSS: out.loss_sum, **out.sums}, run.task), rows, run.counting.late(out)
