"""Whole batches in and out of the slots of a cache: a tensor for each leaf, with a row for each sample.

What: a source that makes batches quicker than samples fills the cache with batches; of a batch that is kept in
part, the rest alone is read. No sample is taken apart, put together or collated. When: samples are flat containers
of tensors of one shape, and the source is one of `WholeBatches`. When not: anything else goes by samples.
Source: `trainrun.data.mapstyle.WholeBatches`. Gain: see `scripts/bench_data.py images`, the ways called `cached`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainrun.data.cache.slots import FIRST, IN_COLUMNS, CacheFull, Layout, Slots, read_into, write_all
from trainrun.data.cache.tree import Buffer, packed


def has_rows(layout: Layout) -> bool:
    """Whether a batch of the samples is one tensor for each leaf."""
    flat = all(part.container is None for part in layout.form.parts)
    return flat and bool(layout.starts) and all(leaf.kind == "tensor" for leaf in layout.leaves)


def leaves_of(layout: Layout, batch: Any, number: int) -> list[Tensor] | None:
    """The tensors of a batch of so many samples, in the order of the leaves; None where it is not of this layout."""
    form = layout.form
    if form.container is None:
        parts = [batch]
    elif form.container is dict:
        parts = [batch[key] for key in form.keys] if type(batch) is dict and tuple(batch) == form.keys else []
    else:
        parts = list(batch) if type(batch) is form.container else []
    fits = len(parts) == len(layout.leaves) and all(
        type(part) is Tensor and part.dtype == leaf.dtype and part.shape == (number, *leaf.shape)
        for part, leaf in zip(parts, layout.leaves, strict=True)
    )
    return parts if fits else None


def keep_rows(slots: Slots, numbers: Sequence[int], parts: Sequence[Tensor]) -> None:
    """Row i of every part becomes the sample in slot `numbers[i]`. Raises CacheFull."""
    layout, places = slots.layout, np.asarray(numbers, np.int64)
    if not len(places):
        return
    cuts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]  # neighbours go together
    try:
        for leaf, start, part in zip(layout.leaves, layout.starts, parts, strict=True):
            data, size = bytes_of(part).data, leaf.num_bytes
            for first, end in pairwise(cuts):
                write_all(slots.file.fd, data[first * size : end * size], start + numbers[first] * size)
    except OSError as error:
        raise CacheFull(error.strerror or str(error)) from error
    slots.file.words[FIRST + places] = IN_COLUMNS  # after the data


def gathered(slots: Slots, numbers: Sequence[int | None], new: Sequence[Tensor]) -> Any:
    """The batch of what is kept in these slots; where a number is None, the next row of every part of `new`."""
    layout = slots.layout
    fresh = np.array([number is None for number in numbers])
    values = []
    for i, (leaf, start) in enumerate(zip(layout.leaves, layout.starts, strict=True)):
        whole = torch.empty((len(numbers), *leaf.shape), dtype=leaf.dtype)
        view, size = bytes_of(whole).data, leaf.num_bytes
        for row, number in enumerate(numbers):
            if number is not None:
                read_into(slots.file.fd, view[row * size : (row + 1) * size], start + number * size)
        if new:
            whole[torch.from_numpy(fresh)] = new[i]
        values.append(whole)
    return values[0] if layout.form.container is None else packed(layout.form, values)


def bytes_of(part: Tensor) -> Buffer:
    """Its memory where it is contiguous, else that of a copy."""
    return part.contiguous().reshape(-1).view(torch.uint8).numpy()
