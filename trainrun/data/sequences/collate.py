"""Collate samples of unequal length into one batch: padded, or several in a row.

The batch has the structure of its samples: a pair stays a pair and a dict a dict, with padded tensors instead of
sequences. Further fields are found by `trainrun.interfaces.batch_fields(batch)`. In a dict they are further entries.
For a tensor, a pair or another structure they are attached to a tensor. Padding adds
    attention_mask: (B, T) bool, False at padding of the inputs, for any order of the fields of a dict. A mask of the
        samples themselves stays.
    target_weight: (B, T) float64, for targets that are sequences of floats. It is one over the length at each real
        position, so that the loss of a sample is the mean over its positions.
A pack has, instead of attention_mask,
    segment_ids: (B, T) int64, 1, 2, .. for the sequences of a row, 0 at padding
    position_ids: (B, T) int64, from 0 in every sequence
Other values, such as a label, are (B, S), with column s for segment s + 1. Integer targets are filled with -100,
which torch's losses ignore. Everything else is filled with 0.

A model gets the inputs. It also gets attention_mask, segment_ids and position_ids as keyword arguments, if its
`forward` has these parameters (`trainrun.task.batches`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import PackedSequence, pad_sequence
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from trainrun.data.batch import (
    RaggedBatch,
    RaggedRows,
    attach_fields,
    convert_arrays_to_tensors,
    convert_numbers,
    is_numbers,
    map_leaves,
)
from trainrun.data.engines.stream import BatchesWrapper
from trainrun.data.sequences.fields import (
    INPUTS,
    Fields,
    SequenceCutter,
    describe_forms,
    find_sequence_names,
    is_target,
    last_key,
    list_fields,
    map_fields,
)
from trainrun.data.stream_options import TokenCounter
from trainrun.interfaces import IGNORED, INPUT_KEYS, Batches, MicroBatch, batch_fields


def count_tokens(batches: Batches, collate: Collate | None, tally: TokenCounter | None) -> Batches:
    """Return a stream that counts the real positions of batches with a mask."""
    says = isinstance(collate, PackCollate) or (isinstance(collate, PadCollate) and bool(collate.names))
    if tally is None or not says:
        return batches
    tally.counts = True
    return CountingBatches(batches, tally)


class CountingBatches(BatchesWrapper):
    """A stream that counts the positions of its batches. It implements `Batches`."""

    def __init__(self, batches: Batches, tally: TokenCounter) -> None:
        super().__init__(batches)
        self._tally = tally

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        for batch in self._batches.epoch(epoch, start):
            if batch.real:
                self._tally.add(count_useful_positions(batch.data))
            yield batch


def count_useful_positions(batch: Any) -> Tensor:
    """Count the positions of a padded or packed batch that are not padding, as a 0-d tensor."""
    fields = batch_fields(batch)
    mask: Tensor = fields["segment_ids"] if "segment_ids" in fields else fields["attention_mask"]
    return mask.count_nonzero()


Collate = Callable[[list[Any]], Any]
MASK = "attention_mask"

PLAIN_PARTS = frozenset((Tensor, int, float, bool, str))


def round_length(length: int, multiple: int | None) -> int:
    """Round a length up to a multiple, and to at least one position, because kernels need one."""
    length = max(length, 1)
    return length if multiple is None else -(-length // multiple) * multiple


@dataclass(frozen=True)
class PadCollate:
    """A collate function that pads the sequences of a batch to its longest, or to `width`.

    names: the sequences, if lengths are known to differ. With () they are found in each batch. A batch without
        padding stays in the user's container.
    padding_value: the value between the ends. No result may depend on it.
    """

    names: tuple[str, ...] = ()
    width: int | None = None
    multiple: int | None = None
    cut: SequenceCutter | None = None
    padding_value: float = 0

    def __call__(self, samples: list[Any]) -> Any:
        if self.cut is not None:
            samples = [self.cut(sample) for sample in samples]
        if self.names or (self.width is None and self.multiple is None):
            rows = [list_fields(sample) for sample in samples] if self.names else []
            try:
                return self._pad(samples, rows, self.names) if self.names else stack_samples(samples)
            except RuntimeError:  # so torch says that shapes differ; a look ahead would cost every batch
                rows = rows or [list_fields(sample) for sample in samples]
                names, differ = find_sequence_names([describe_forms(row) for row in rows])
                if not differ or {*names} <= {*self.names}:
                    raise
                return self._pad(samples, rows, tuple(dict.fromkeys((*self.names, *names))))
        rows = [list_fields(sample) for sample in samples]
        names = self._short_names(rows)
        return self._pad(samples, rows, names) if names else stack_samples(samples)

    def _pad(self, samples: list[Any], rows: list[Fields], names: tuple[str, ...]) -> Any:
        check_same_fields(rows)
        batch = {
            name: self._pad_column(name, [row[name] for row in rows])
            if name in names
            else collate_values([row[name] for row in rows])
            for name in rows[0]
        }
        lengths = {name: torch.tensor([len(row[name]) for row in rows]) for name in names}
        return pack_like_samples(samples, batch, build_mask_fields(batch, lengths, rows[0]))

    def pad_rows(self, rows: RaggedBatch) -> Any:
        """Return the batch for rows that are not padded yet, equal to a call with the samples. Return None if the
        samples must be read one by one.
        """
        batch: Fields = dict(rows.fields)
        lengths: dict[str, Tensor] = {}
        for name, field in rows.fields.items():
            if not isinstance(field, RaggedRows):
                continue
            if self.cut is not None and name in self.names:
                field = field.cut(self.cut.size, self.cut.left)
            fill, dtype, longest = 0.0, field.values.dtype, int(field.lengths.max())
            if name in self.names:
                empty = torch.from_numpy(np.empty(0, dtype))
                fill, (like,) = choose_padding_value(name, [empty], self.padding_value)
                dtype, longest = like.numpy().dtype, self._choose_width(longest)
                lengths[name] = torch.from_numpy(field.lengths)
            elif longest != field.lengths.min():
                return None
            batch[name] = field.copy_padded_rows(longest, fill, dtype)
        if lengths.keys() != {*self.names} or not lengths:
            return None
        first = {name: column[0] for name, column in batch.items()}
        return attach_fields(rows.pack([*batch.values()]), build_mask_fields(batch, lengths, first))

    def _short_names(self, rows: list[Fields]) -> tuple[str, ...]:
        names, differ = find_sequence_names([describe_forms(row) for row in rows])
        if differ:
            return names
        return tuple(name for name in names if len(rows[0][name]) != self._choose_width(len(rows[0][name])))

    def _choose_width(self, longest: int) -> int:
        return round_length(longest if self.width is None else max(longest, self.width), self.multiple)

    def _pad_column(self, name: str, values: list[Tensor]) -> Tensor:
        fill, values = choose_padding_value(name, values, self.padding_value)
        together = pad_sequence(values, batch_first=True, padding_value=fill)
        missing = self._choose_width(together.shape[1]) - together.shape[1]
        return pad(together, [0, 0] * (together.ndim - 2) + [0, missing], value=fill) if missing else together


@dataclass(frozen=True)
class PackCollate:
    """A collate function that puts samples into rows of `width` positions, one after the other, by `place_in_rows`.

    names: the sequences. Those of one sample are equally long.
    """

    names: tuple[str, ...]
    width: int
    cut: SequenceCutter | None = None
    padding_value: float = 0

    def __call__(self, samples: list[Any]) -> Any:
        rows = [list_fields(sample if self.cut is None else self.cut(sample)) for sample in samples]
        check_same_fields(rows)
        lengths = [len(row[self.names[0]]) for row in rows]
        for name in self.names:
            if lengths != [len(row[name]) for row in rows]:
                raise ValueError(
                    f"{name} and {self.names[0]} of one sample differ in length; pack needs equal ones"
                )
        if max(lengths) > self.width:
            raise ValueError(f"a sequence of {max(lengths)} positions is longer than a row of {self.width}")
        row, begin = torch.tensor(place_in_rows(lengths, self.width)).T.contiguous()
        size = torch.tensor(lengths)
        slot = torch.arange(len(rows)) - torch.searchsorted(row, row)  # which segment of its row, from 0
        shape = (int(row[-1]) + 1, self.width)
        inside = torch.arange(int(size.sum())) - torch.repeat_interleave(size.cumsum(0) - size, size)
        where = torch.repeat_interleave(row * self.width + begin, size) + inside
        batch: Fields = {}
        for name in rows[0]:
            values = [item[name] for item in rows]
            if name in self.names:
                fill, values = choose_padding_value(name, values, self.padding_value)
                batch[name] = scatter_values(torch.cat(values), where, shape, fill)
            else:
                batch[name] = self._pack_by_segment(name, values, row, slot)
        segment_ids = scatter_values(torch.repeat_interleave(slot + 1, size), where, shape, 0)
        beside = {"segment_ids": segment_ids, "position_ids": scatter_values(inside, where, shape, 0)}
        return pack_like_samples(samples, batch, beside)

    def _pack_by_segment(self, name: str, values: list[Any], row: Tensor, slot: Tensor) -> Any:
        together = collate_values(values)
        num_rows, num_slots = int(row[-1]) + 1, int(slot.max()) + 1
        if not isinstance(together, Tensor):
            table: list[list[Any]] = [[] for _ in range(num_rows)]
            for number, value in zip(row.tolist(), values, strict=True):
                table[number].append(value)
            return table
        fill, (together,) = choose_padding_value(name, [together], self.padding_value)
        return scatter_values(together, row * num_slots + slot, (num_rows, num_slots), fill)


def build_mask_fields(batch: Fields, lengths: dict[str, Tensor], first: Fields) -> Fields:
    """Return the mask of a padded batch, and the weights of targets that are sequences of floats.

    lengths: (samples,) of each padded field. first: the fields of the first sample.
    """
    names = tuple(lengths)
    beside = {}
    if all(last_key(name) != MASK for name in batch):
        masked = find_masked_field(first, names)
        width = batch[masked].shape[1]
        size = lengths[masked] if masked in lengths else torch.full((len(batch[masked]),), width)
        beside[MASK] = mask_positions(size, width)
    if (target := find_float_target(batch, names)) is not None:
        inside = mask_positions(lengths[target], batch[target].shape[1])
        beside["target_weight"] = inside / lengths[target][:, None].clamp(min=1).double()
    return beside


def mask_positions(lengths: Tensor, width: int) -> Tensor:
    """Return (samples, width) bool: the positions of each sample that are not padding. NumPy takes half of torch's
    time.
    """
    positions = np.arange(width, dtype=np.int32)
    return torch.from_numpy(positions < lengths.numpy().astype(np.int32)[:, None])


def check_same_fields(rows: Sequence[Any]) -> None:
    for row in rows:
        if row.keys() != rows[0].keys():
            some = ", ".join(sorted(map(str, row.keys() ^ rows[0].keys()))[:3])
            raise ValueError(f"its samples have different structures: {some} is not in every sample")


def pack_like_samples(samples: list[Any], columns: Fields, beside: Fields) -> Any:
    """Return the columns in the structure of the samples, with the attached fields."""
    return attach_fields(map_fields(samples[0], lambda name, _: columns[name]), beside)


def place_in_rows(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return row and first position of each sequence. A new row begins if a sequence does not fit into the last."""
    places, row, used = [], 0, 0
    for length in lengths:
        if used + length > width:
            row, used = row + 1, 0
        places.append((row, used))
        used += length
    return places


def scatter_values(values: Tensor, where: Tensor, shape: tuple[int, int], fill: float) -> Tensor:
    """Return a tensor of this shape, filled with `fill`, with values (n, ...) at the flat positions `where` (n,)."""
    out = values.new_full((shape[0] * shape[1], *values.shape[1:]), fill)
    out[where] = values
    return out.view(*shape, *values.shape[1:])


def choose_padding_value(
    name: str, values: Sequence[Tensor], padding_value: float
) -> tuple[float, list[Tensor]]:
    """Return the padding value of a field, and its tensors in one type that can represent it."""
    values = unify_types(values)
    first = values[0]
    if first.is_floating_point() or first.is_complex():
        return padding_value, values
    if is_target(name):
        narrow = first.dtype in (torch.uint8, torch.bool)
        return IGNORED, [value.long() for value in values] if narrow else values
    return (0 if first.dtype is torch.bool or last_key(name) == MASK else int(padding_value)), values


def find_masked_field(fields: Fields, names: tuple[str, ...]) -> str:
    """Return the field that determines `attention_mask`: the inputs, else the first sequence that is not a target."""
    forms = describe_forms(fields)
    called = [name for key in INPUT_KEYS for name in fields if last_key(name) == key]
    called += [name for name in fields if name.startswith(f"{INPUTS}.")]
    inputs = [name for name in called if name in names or (name in forms and forms[name].tokens)]
    others = [name for name in names if not is_target(name)]
    return (inputs or others or names)[0]


def find_float_target(fields: Fields, names: tuple[str, ...]) -> str | None:
    """Return the target that is a sequence of floats; None if there is none."""
    float_targets = (name for name in names if is_target(name) and fields[name].is_floating_point())
    return next(float_targets, None)


def stack_samples(samples: list[Any]) -> Any:
    """Collate samples of one shape in the user's containers. Tuples stay tuples, unlike with torch's collate."""
    columns = list_plain_columns(samples)
    if columns:
        return tuple([collate_values(column) for column in columns])
    check_same_keys(samples)
    first = samples[0]
    samples = [map_leaves(sample, convert_arrays_to_tensors, convert_numbers) for sample in samples]
    return restore_tuples(first, collate_values(samples))


def check_same_keys(samples: Sequence[Any]) -> None:
    """Raise ValueError if dicts of samples have different keys. Torch's collate keeps the keys of the first sample."""
    first, parts = samples[0], list[tuple[Any, Any]]()
    if all(isinstance(sample, Mapping) for sample in samples):
        check_same_fields(samples)
        parts = [(part, [sample[key] for sample in samples]) for key, part in first.items()]
    elif isinstance(first, tuple | list) and not is_numbers(first):
        parts = list(zip(first, zip(*samples, strict=False), strict=False))
    else:
        return
    for part, values in parts:
        if isinstance(part, Mapping | tuple | list):
            check_same_keys(values)


def list_plain_columns(samples: list[Any]) -> list[tuple[Any, ...]]:
    """Return the columns of samples that are tuples of as many tensors, numbers and texts; empty for other samples.

    Torch collates these directly. Checking whole columns takes 0.3 us per sample, and checking each sample 4.
    """
    if set(map(type, samples)) != {tuple} or len(set(map(len, samples))) > 1:
        return []
    columns = list(zip(*samples, strict=True))
    return columns if all(PLAIN_PARTS.issuperset(map(type, column)) for column in columns) else []


def restore_tuples(sample: Any, batch: Any) -> Any:
    """Return the batch with a tuple wherever a sample has one. Torch's collate turns tuples into lists."""
    if isinstance(sample, dict) and type(batch) is type(sample):
        clone = copy.copy(batch)
        clone.update({key: restore_tuples(part, batch[key]) for key, part in sample.items()})
        return clone
    parted = isinstance(sample, tuple | list) and isinstance(batch, tuple | list)
    if not parted or isinstance(sample, PackedSequence):
        return batch
    parts = [restore_tuples(part, column) for part, column in zip(sample, batch, strict=True)]
    if type(sample) is tuple:
        return tuple(parts)
    return type(batch)._make(parts) if hasattr(batch, "_make") else parts


def collate_values(values: Sequence[Any]) -> Any:
    """Collate like torch's `default_collate`, but convert tensors of several number types to the widest of them."""
    return collate(values, collate_fn_map=COLLATE_BY_TYPE)


def _stack(tensors: Sequence[Tensor], *, collate_fn_map: Any) -> Any:
    return default_collate_fn_map[Tensor](unify_types(tensors), collate_fn_map=collate_fn_map)


def unify_types(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Convert tensors to the narrowest number type that can represent all of them."""
    types = dict.fromkeys(map(DTYPE, tensors))
    wide = reduce(torch.promote_types, types)
    return [tensor.to(wide) for tensor in tensors] if len(types) > 1 else list(tensors)


DTYPE = attrgetter("dtype")
COLLATE_BY_TYPE = {**default_collate_fn_map, Tensor: _stack}
