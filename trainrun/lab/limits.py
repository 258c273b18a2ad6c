"""The limits of a training: how many items a second each part of the machine would allow by itself.

what: operations against the fastest matrix product, bytes against the fastest copy, calls against the shortest
    call, each measured here and now. The lowest limit says what to make smaller.
when: `trainrun diagnose`. source: Williams and others, Roofline (2009); for the bytes of an update see `bytes_moved`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainrun.data.batch import map_leaves
from trainrun.data.sequences.useful import mask_of
from trainrun.interfaces import Batches, MicroBatch
from trainrun.lab.orders import Limits
from trainrun.parts import Parts
from trainrun.precision.amp import matmul_note
from trainrun.randomness import kept_random_state
from trainrun.start.trial import stand_ins
from trainrun.summary.flops import dtype_of, flops_per_item, peak_flops

FEW_BATCHES: Final = 8
READ_SECONDS: Final = 1.0  # after which no further batch is read for its padding
COPY_BYTES: Final = {"cpu": 1 << 27, "cuda": 1 << 30}  # far more than any cache holds
REPEATS: Final = 5  # the fastest counts: other processes take turns with this one
CALLS: Final = 2000


def limits_of(parts: Parts, train: Batches) -> Limits:
    """Measure the limits of one rank and multiply them by the number of ranks.

    A limit that cannot be measured is left out, but its reason is given.
    """
    batches = [*_first(islice(train.epoch(0), FEW_BATCHES), READ_SECONDS)]
    found: dict[str, float] = {}
    reasons: dict[str, str] = {}
    first = map_leaves(batches[0].data, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
    items = max(batches[0].counted_by(parts.task), 1)
    measures = {"compute": _compute, "memory": _memory, "dispatch": _dispatch}
    if parts.parallel.device.type != "cpu":
        measures["copy"] = _copy
    with kept_random_state():
        for name, measure in measures.items():
            try:
                seconds_per_item, reason = measure(parts, first, items)
            # What a user's model does in its copy is not known; a diagnosis without this line is one all the same.
            except Exception as error:
                reasons[name] = f"not measured: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            else:
                found[name] = parts.parallel.world_size / seconds_per_item
                reasons[name] = reason
    train.close()  # counting has read from the stream beneath it, which is no longer where it was
    return Limits(found, reasons, padding_share([batch.data for batch in batches]))


def _first(batches: Iterator[MicroBatch], seconds: float) -> Iterator[MicroBatch]:
    """Those of the first seconds, and at least one."""
    until = perf_counter() + seconds
    for batch in batches:
        yield batch
        if perf_counter() > until:
            return


def _compute(parts: Parts, batch: Any, items: int) -> tuple[float, str]:
    flops, dtype = flops_per_item(parts), dtype_of(parts)
    peak = peak_flops(parts.parallel.device, dtype)
    kind = str(dtype).removeprefix("torch.")
    told = f"{flops:.3g} operations an item, {peak / 1e9:.4g} GFLOP/s in {kind}"
    device, precision = parts.parallel.device, parts.config.precision
    if device.type == "cuda":
        note = matmul_note(precision.matmul, precision.mode, torch.cuda.get_device_capability(device))
        told += f"; {note}" if note else ""
    return flops / peak, told


def _memory(parts: Parts, batch: Any, items: int) -> tuple[float, str]:
    moved, speed = bytes_moved(parts, batch), copy_speed(parts.parallel.device)
    return moved / speed / items, f"{moved / 1e6:.3g} MB a step, {speed / 1e9:.3g} GB/s"


def _copy(parts: Parts, batch: Any, items: int) -> tuple[float, str]:
    """From pinned memory, as the stream does it on a GPU."""
    device, moved = parts.parallel.device, 0

    def on_host(leaf: Any) -> Any:
        nonlocal moved
        if not isinstance(leaf, Tensor):
            return leaf
        moved += leaf.numel() * leaf.element_size()
        return leaf.cpu().pin_memory() if device.type == "cuda" else leaf.cpu()

    host = map_leaves(batch, on_host)

    def copied() -> None:
        map_leaves(
            host, lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf
        )

    seconds = _fastest(copied, device)
    return seconds / items, f"{moved / 1e6:.3g} MB a batch, {moved / seconds / 1e9:.3g} GB/s"


def _dispatch(parts: Parts, batch: Any, items: int) -> tuple[float, str]:
    calls, seconds = num_calls(parts, batch), call_seconds(parts.parallel.device)
    return calls * seconds / items, f"{calls} operations a step, {1e6 * seconds:.2g} us each"


def bytes_moved(parts: Parts, batch: Any) -> float:
    """At least, for one micro-batch and one update: weights are read in forward and backward, gradients written and
    read, the update reads and writes weights and its state, and what the backward needs is written and read."""
    weights = sum(p.numel() * p.element_size() for p in parts.model.parameters() if p.requires_grad)
    state = sum(
        value.numel() * value.element_size()
        for entry in parts.optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    )
    return 2 * weights + 2 * weights + 2 * weights + 2 * state + 2 * saved_bytes(parts, batch)


def saved_bytes(parts: Parts, batch: Any) -> int:
    """Count the bytes that forward keeps for backward, without the weights."""
    model, task = stand_ins(parts.model, parts.task)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def packed(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = max(sizes.get(storage.data_ptr(), 0), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor), parts.precision.autocast():
        task.step(model, batch)
    return sum(sizes.values())


def copy_speed(device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(COPY_BYTES.get(device.type, 1 << 27) // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _fastest(lambda: target.copy_(source), device)


def call_seconds(device: torch.device) -> float:
    """Return the seconds of one call of the shortest operation, in a long row of calls."""
    a = torch.zeros(8, device=device)

    def calls() -> None:
        for _ in range(CALLS):
            a.add_(1)

    return _fastest(calls, device) / CALLS


def _fastest(work: Any, device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        began = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - began)
    return min(times)


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class is not typed
    """Counts what is called below autograd; views and questions about shapes are calls too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def num_calls(parts: Parts, batch: Any) -> int:
    """In forward and backward of one micro-batch; the update is one more, where it is fused."""
    model, task = stand_ins(parts.model, parts.task)
    with torch.compiler.set_stance("force_eager"), Calls() as calls:
        with parts.precision.autocast():
            out = task.step(model, batch)
        out.loss_sum.backward()
    return int(calls.number) + 1


def padding_share(batches: list[Any]) -> float:
    """Return the share of positions that are padding; 0 without masks."""
    real = total = 0
    for batch in batches:
        mask = mask_of(batch)
        if mask is not None:
            real, total = real + int(mask.count_nonzero()), total + mask.numel()
    return 1 - real / total if total else 0.0
