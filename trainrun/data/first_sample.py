"""What can only be learnt by reading a sample: the shape and the kind of an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from trainrun.data.batch import Preparation, is_integer, map_leaves, of_numbers
from trainrun.data.engines.batch_reader import FILLERS_TRIED, BatchReader, Recipe
from trainrun.data.tensor_dataset import columns_of, length_of
from trainrun.errors import DataError
from trainrun.interfaces import TARGET_KEYS, input_key
from trainrun.seeding import kept_random_state


def kind_of_input(source: Any, key: str, transform: Callable[..., Any] | None) -> str:
    """`floats`, `integers` or another type, of the first sample; "" if it cannot be read, which others say."""
    if isinstance(source, IterableDataset):
        return ""
    columns = columns_of(source, key)
    try:
        found = first_input(source if columns is None else columns, key, transform)
    except DataError:
        return ""
    if not isinstance(found, Tensor | np.ndarray):
        return f"a {type(found).__name__}"
    return "integers" if is_integer(found) else "floats"


def first_input(source: Any, key: str, transform: Callable[..., Any] | None, skips: bool = False) -> Any:
    """skips: what cannot be read is left out."""
    if (count := length_of(source, key)) == 0:
        raise DataError(f"{key}: the data set is empty")
    reader = BatchReader(source, Recipe(Preparation(), 0, key, transform)).copy()
    last = min(count, FILLERS_TRIED) - 1 if skips else 0
    with kept_random_state():
        for index in range(last + 1):
            try:
                sample = reader.sample(0, index)
                break
            except DataError:
                if index == last:
                    raise
    sample = map_leaves(sample, lambda leaf: leaf, of_numbers)
    while isinstance(sample, tuple | list | dict) and sample:
        fields = sample if isinstance(sample, dict) else dict(enumerate(sample))
        others = [name for name in fields if name not in TARGET_KEYS]
        sample = fields[input_key(fields) or next(iter(others or fields))]
    return sample
