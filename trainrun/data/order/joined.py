"""Several sources as one, and a part of one: in memory where they are, else by torch's ConcatDataset and Subset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from trainrun.data.tensor_dataset import Arrays, Column, Columns, columns_of, is_mapped, length_of, rows, said
from trainrun.errors import DataError


def sized(source: Any, key: str, asked: str) -> int:
    """The number of samples. DataError: it cannot be known, and `asked` needs it."""
    if isinstance(source, IterableDataset):
        raise DataError(
            f"{asked}: {key} is an IterableDataset, whose samples cannot be chosen by number; leave it out"
        )
    columns = columns_of(source, key)
    return length_of(source if columns is None else columns, key)


def joined(sources: Mapping[str, Any], key: str) -> Any:
    """All samples of the sources, one after the other. DataError: their classes differ."""
    for name, source in sources.items():
        sized(source, f"{key}.{name}", f"{key} by name")
    names = {
        name: tuple(said(one, "class_names") or said(one, "classes") or ()) for name, one in sources.items()
    }
    known = {name: classes for name, classes in names.items() if classes}
    first = next(iter(known), "")
    for name, classes in known.items():
        if classes != known[first]:
            raise DataError(
                f"{key}.{name}: its classes ({', '.join(classes[:4])}, ...) are not those of {key}.{first} "
                f"({', '.join(known[first][:4])}, ...): one number would mean two things; give them one list of classes"
            )
    found = {name: columns_of(one, f"{key}.{name}") for name, one in sources.items()}
    columns = [one for one in found.values() if one is not None]
    if len(columns) == len(found) and len({_form(one) for one in columns}) == 1:
        return _packed(next(iter(sources.values())), columns[0],
                       [_cat(values) for values in zip(*(one.values for one in columns), strict=True)])  # fmt: skip
    parts: list[Any] = [sources[name] if one is None else one for name, one in found.items()]
    return ConcatDataset(parts)


def taken(source: Any, indices: torch.Tensor, key: str) -> Any:
    """The samples of these numbers, in their order."""
    columns = columns_of(source, key)
    if columns is None or any(is_mapped(value) for value in columns.values):
        whole: Any = source if columns is None else columns
        return Subset(whole, indices.tolist())
    return _packed(source, columns, [rows(value, indices.tolist()) for value in columns.values])


def _packed(source: Any, columns: Columns, values: list[Any]) -> Any:
    """Other rows in the container of a source."""
    if isinstance(source, Arrays):
        return replace(source, tensors=tuple(values), describe=None, column=None)
    return columns.pack(values)


def _form(columns: Columns) -> Any:
    """What must be alike for rows to stand below one another; of mapped files, which are not copied, nothing is."""
    if any(is_mapped(value) for value in columns.values):
        return object()
    values = tuple((type(value), tuple(value.shape[1:]), value.dtype) for value in columns.values)
    return columns.names, values, columns.scale, columns.int_dtype


def _cat(values: tuple[Column, ...]) -> Column:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return torch.cat(tensors) if tensors else np.concatenate(values)
