"""Checks of one step: its result must not depend on how its samples are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from trainrun.config.schema import RunConfig, replace_values
from trainrun.data.batch import map_leaves
from trainrun.errors import TrainrunError
from trainrun.instantiate import named_nodes
from trainrun.interfaces import batch_fields, has_count_method
from trainrun.seeding import read_random_state
from trainrun.training.components import Components
from trainrun.training.recovery.oom import BATCH_NORMS
from trainrun.verify.certificate import (
    FAIL,
    PASS,
    Certificate,
    NotApplicable,
    certify_difference,
    different_leaves,
    largest_difference,
)
from trainrun.verify.subject_changes import Float64ByDefault, first_samples_node
from trainrun.verify.trials import Outcome, Trials, build_float64_config

MICRO = 2  # samples of the smallest micro-batch
BOUND = 1e-9  # of a weight, in float64
UPDATES = 3  # the first makes the optimizer's state
UPDATE_BOUND = 1e-3  # of a change of a weight, in float32: Adam divides tiny gradients by their size
MODE = "in float64, without dropout and batch statistics"  # which depend on the parts
NO_DOUBLES = "the trial in float64 on a CPU failed"


def check_accumulation(trials: Trials) -> Certificate:
    """Check that two micro-batches of 4 samples, four of 2 and one of 8 give the same weights after two steps."""
    text = f"1, 2 and 4 micro-batches per step give the same weights, {MODE}"
    return certify_difference("accumulation", _difference_between_batch_sizes(trials, 2), BOUND, text)


def check_partial_window(trials: Trials) -> Certificate:
    """Check that the samples of a shorter last step of an epoch have the same weight as the others."""
    worst = _difference_between_batch_sizes(trials, 3, samples=2 * 4 * MICRO + 2 * MICRO)
    text = f"a short last step does not depend on the number of its micro-batches, {MODE}"
    return certify_difference("partial window", worst, BOUND, text)


def _difference_between_batch_sizes(trials: Trials, steps: int, samples: int | None = None) -> float:
    undivided, *divided = (
        _train_weights(trials, f"{k} micro-batches a step", steps, 4 * MICRO // k, k, samples=samples)
        for k in (1, 2, 4)
    )
    return max(largest_difference(undivided, parts) for parts in divided)


def check_learning_rates(trials: Trials) -> Certificate:
    """Check that the schedule advances once per step, not once per micro-batch."""
    traces = [
        [row["lr"] for row in _run_exact(trials, f"rates with {k} micro-batches", 3, 4 * MICRO // k, k).rows]
        for k in (1, 4)
    ]
    moved = sum(a != b for a, b in zip(*traces, strict=True)) if len(traces[0]) == len(traces[1]) else 3
    state = FAIL if moved else PASS
    return Certificate(
        "learning rate", state, f"{moved} of 3", "steps have another learning rate with gradient accumulation"
    )


def check_ranks(trials: Trials) -> Certificate:
    """Check that two processes with half of each batch give the same weights as one process."""
    weights_of_one = _train_weights(trials, "one rank", 2, 2 * MICRO, 1)
    weights_of_two = _train_weights(trials, "two ranks", 2, MICRO, 1, num_ranks=2)
    return certify_difference(
        "ranks",
        largest_difference(weights_of_one, weights_of_two),
        BOUND,
        f"two ranks give the same weights as one, {MODE}",
    )


def _train_weights(trials: Trials, about: str, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = _run_exact(trials, about, *args, **kwargs).shared["model"]
    return model


def _run_exact(
    trials: Trials, about: str, steps: int, batch_size: int, accumulate: int,
    samples: int | None = None, num_ranks: int = 1,
) -> Outcome:  # fmt: skip
    def change(config: RunConfig) -> RunConfig:
        config = build_float64_config(config, steps, batch_size, accumulate)
        if samples is not None:
            source = next(iter(named_nodes(config.data.train).values()), config.data.train)
            config = replace_values(config, {"data.train": first_samples_node(source, samples, "train")})
        if num_ranks > 1:
            mode = "ddp" if config.parallel.mode == "single" else config.parallel.mode
            config = replace_values(config, {"parallel.mode": mode, "parallel.devices": num_ranks})
        return config

    try:
        return trials.run(about, change)
    except TrainrunError as error:
        raise NotApplicable(f"{NO_DOUBLES}: {error}") from error


def check_sums(components: Components, batch: Any) -> Certificate:
    """Check that loss and count of a batch are the sums over its halves, also in training mode if possible."""
    size = _num_rows(batch)
    if size < 2:
        raise NotApplicable("the batch has one sample")
    halves = [
        map_leaves(batch, partial(_select_rows, size, slice(a, b)))
        for a, b in ((0, size // 2), (size // 2, size))
    ]
    modes = [False, True] if _is_additive_in_training(components, batch) else [False]
    differences = []
    for training in modes:
        total, items = _compute_step(components, batch, training)
        of_halves = [_compute_step(components, half, training) for half in halves]
        if items != sum(count for _, count in of_halves):
            text = "the task's count of a batch is not the sum over its halves"
            return Certificate("sum of losses", FAIL, f"{items}", text)
        differences.append(abs(total - sum(loss for loss, _ in of_halves)) / max(abs(total), 1e-12))
    return certify_difference(
        "sum of losses", max(differences), 1e-9, "task.step is a sum over samples, not a mean, in float64"
    )


def uses_random_numbers(components: Components, batch: Any) -> bool:
    """Return whether a step draws random numbers even in evaluation mode."""
    before = read_random_state()
    _compute_step(components, batch)
    return bool(different_leaves(before, read_random_state()))


def _is_additive_in_training(components: Components, batch: Any) -> bool:
    """Return whether the loss of each sample is independent of the others in training mode: no random numbers, no
    batch statistics.
    """
    if any(isinstance(module, BATCH_NORMS) for module in components.model.modules()):
        return False
    before = torch.get_rng_state()
    repeats = [
        _compute_step(components, batch, training=True) for _ in range(2)
    ]  # a layer may count, or keep its own statistics
    return torch.equal(before, torch.get_rng_state()) and repeats[0] == repeats[1]


def check_padding_effect(components: Components, batch: Any) -> Certificate:
    """Check that the loss stays the same if the values at padded positions change."""
    mask = batch_fields(batch).get("attention_mask")
    if mask is None:
        raise NotApplicable("the data has no padding")
    if bool(mask.all()):
        raise NotApplicable("no sample of the first batch is shorter than the longest")
    hidden = ~mask

    def poisoned(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.shape[: mask.ndim] != mask.shape or leaf is mask:
            return leaf
        where = hidden.reshape(hidden.shape + (1,) * (leaf.ndim - mask.ndim))
        if leaf.is_floating_point():
            return torch.where(where, torch.full_like(leaf, 1e6), leaf)
        other = leaf.flatten()[0] if leaf.dtype != torch.bool else leaf
        keep = (leaf < 0) | ~where  # a target that counts nothing stays so
        return torch.where(keep, leaf, other)

    clean, _ = _compute_step(components, batch)
    dirty, _ = _compute_step(components, map_leaves(batch, poisoned))
    difference = abs(clean - dirty) / max(abs(clean), 1e-12)
    return certify_difference(
        "padding", difference, 1e-10, "the values at padding do not reach the loss, in float64"
    )


def _compute_step(components: Components, batch: Any, training: bool = False) -> tuple[float, float]:
    components.wrapped.train(training)
    with torch.no_grad(), Float64ByDefault(), components.precision.autocast():
        out = components.task.step(components.wrapped, batch)
    count = (
        components.task.count(batch)
        if has_count_method(components.task)
        else float(components.counting.read_output_count(out))
    )
    return float(out.loss_sum), count


def _num_rows(batch: Any) -> int:
    sizes: list[int] = []
    map_leaves(batch, lambda leaf: sizes.append(len(leaf)) if getattr(leaf, "ndim", 0) else None)
    return sizes[0] if sizes and len(set(sizes)) == 1 else 1


def _select_rows(size: int, rows: slice, leaf: Any) -> Any:
    return leaf[rows] if getattr(leaf, "ndim", 0) and len(leaf) == size else leaf


def check_all_parameters_change(
    components: Components,
    fit: Callable[[Components], None],
    measure_gradients: Callable[[], dict[str, float]],
) -> Certificate:
    """Check that a few training steps change every parameter. measure_gradients: called if one does not change.

    A parameter without effect on the loss, such as a bias before BatchNorm, only has gradients from rounding errors.
    """
    before = {name: p.detach().clone() for name, p in components.model.named_parameters() if p.requires_grad}
    fit(components)
    after = dict(components.model.named_parameters())
    unchanged = [name for name, value in before.items() if not different_leaves(value, after[name].detach())]
    largest: dict[str, float] = {}
    with suppress(NotApplicable, RuntimeError):  # where the model has no float64
        largest = measure_gradients() if unchanged else {}
    idle = [name for name in unchanged if 0 < largest.get(name, 0) < BOUND * max(largest.values())]
    unchanged = [name for name in unchanged if name not in idle]
    text = (
        f"do not change: {', '.join(unchanged[:5])}"
        if unchanged
        else "all parameters that can be trained change"
    )
    if idle:
        text += f"; without effect on the loss (no fault): {', '.join(idle[:5])}"
    return Certificate("parameters", FAIL if unchanged else PASS, f"{len(unchanged)} of {len(before)}", text)


def check_update(components: Components, batch: Any) -> Certificate:
    """Compare a few optimizer updates with those of torch's plain loops on contiguous copies of the weights.

    They differ if a kernel ignores strides or writes outside a weight's memory.
    """
    model, optimizer = components.model, components.optimizer
    if components.optimizers:
        raise NotApplicable("there are several optimizers")
    copies: dict[torch.Tensor, nn.Parameter] = {
        param: nn.Parameter(_make_contiguous(param), param.requires_grad) for param in model.parameters()
    }
    reference = _unfused_optimizer(optimizer, copies)
    before = {name: _make_contiguous(param) for name, param in model.named_parameters()}
    for number in range(UPDATES):
        components.wrapped.train()
        out = components.task.step(components.wrapped, batch)
        components.precision.backward(out.loss_sum, 1 / max(1, _num_rows(batch)))
        for param, copy in copies.items():
            copy.grad = None if param.grad is None else _make_contiguous(param.grad)
        torch.manual_seed(number)  # some optimizers draw random numbers
        components.precision.optimizer_step(optimizer, want_norm=False)
        torch.manual_seed(number)
        if isinstance(reference, LBFGS):
            reference.step(lambda: 0.0)  # type: ignore[no-untyped-call]
        else:
            reference.step()
    expected_updates = {
        name: _make_contiguous(copies[p]) - before[name] for name, p in model.named_parameters()
    }
    updates = {name: _make_contiguous(param) - before[name] for name, param in model.named_parameters()}
    text = f"{UPDATES} updates are the same as with contiguous copies of the parameters, in float32"
    return certify_difference("update", largest_difference(expected_updates, updates), UPDATE_BOUND, text)


def _make_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.clone() if tensor.is_sparse else tensor.clone(memory_format=torch.contiguous_format)


def _unfused_optimizer(optimizer: Optimizer, copies: Mapping[torch.Tensor, nn.Parameter]) -> Optimizer:
    """Return a copy of the optimizer that updates copies of the weights without fused or batched kernels."""
    memo = {id(param): copy for param, copy in copies.items()}
    unfused: Optimizer = object.__new__(
        type(optimizer)
    )  # torch's own way leaves out attributes of subclasses
    try:
        vars(unfused).update(deepcopy(vars(optimizer), memo))
    except Exception as error:  # of the user's class
        raise NotApplicable(f"the optimizer cannot be copied: {error}") from error
    for group in unfused.param_groups:
        group.update({name: False for name in ("fused", "foreach") if name in group})
    for param, state in unfused.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                state[name] = _make_contiguous(value)
    return unfused


def gradient_sizes(components: Components, batch: Any) -> dict[str, float]:
    """Return the largest absolute value in each parameter's gradient, in float64 and training mode."""
    components.wrapped.train()
    with Float64ByDefault(), components.precision.autocast():
        components.task.step(components.wrapped, batch).loss_sum.backward()  # type: ignore[no-untyped-call]
    named = components.model.named_parameters()
    return {name: float(p.grad.to_dense().abs().max()) for name, p in named if p.grad is not None}
