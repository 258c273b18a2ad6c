"""Find rows of validation or test data that are also training samples, and report them in one line.

what: rows in memory or mapped, and files of pictures, are compared directly. For any other source that can be
    indexed, a child process reads samples and compares their hashes, for half a second at most.
when not: a source that no child process can read. Random samples are never equal.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from trainrun.data.facts import SharedRows
from trainrun.data.map_style import choose_spread_indices
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import (
    Column,
    Columns,
    find_columns,
    find_reader_attribute,
    find_rows_in_memory,
    is_mapped,
)

MOST_ROWS, MOST_TRAINING_ROWS = 1024, 2**16
MOST_MAPPED_ROWS = 4096  # each may be a page to fetch from the disk
MOST_FILES = 5000
KEY_NUMBERS = 32  # of a row, spread over it; rows with equal keys are compared as a whole
MOST_EQUAL_KEYS = 8
Numbers = np.ndarray[Any, np.dtype[np.int64]]


def describe_shared_rows(sources: Mapping[str, Any], options: Mapping[str, StreamOptions]) -> list[str]:
    """Return a line for each validation or test set with rows that are also training samples.

    There is no line if training rows repeat as often, because then rows have few different values. options: how each
    split is read.
    """
    lines = []
    for split, source in sources.items():
        if split == "train" or split not in options or options[split].rank:
            continue
        comparison = count_shared_rows(sources["train"], source)
        if comparison is None:
            # Most data sets are compared where they lie, without what reads samples in a child process.
            from trainrun.data.overlap.shared_samples import count_shared_samples

            comparison = count_shared_samples(sources["train"], source, options["train"], options[split])
        if comparison is None or comparison.shared == 0:
            continue
        is_all = comparison.shared == comparison.compared
        if not is_all and comparison.shared <= 1.25 * comparison.repeated * comparison.compared:
            continue
        count = f"{'' if comparison.is_whole else 'at least '}{comparison.shared:,} of {comparison.compared:,} rows"
        key, name = options[split].key, split.partition("/")[0]
        lines.append(
            f"{key}: {count} that were compared are in data.train too, so {name}/ metrics are partly measured on "
            "training samples"
        )
    return lines


def count_shared_rows(train: Any, other: Any) -> SharedRows | None:
    """Count the rows of another split that are in the training data; None if no row can be compared directly."""
    if isinstance(train, IterableDataset) or isinstance(other, IterableDataset):
        return None
    numbers = count_shared_numbers(train, other)
    if numbers is not None:
        return numbers
    if all(find_reader_attribute(split, "sample_file") is not None for split in (train, other)):
        return count_shared_files(train, other)
    columns = find_comparable_columns(train), find_comparable_columns(other)
    return None if columns[0] is None or columns[1] is None else compare_columns(columns[0], columns[1])


def find_comparable_columns(source: Any) -> Columns | None:
    columns = find_columns(source, "data")
    return find_rows_in_memory(source) if columns is None else columns


def count_shared_numbers(train: Any, other: Any) -> SharedRows | None:
    """Compare the numbers of samples if both splits are parts of one data set."""
    (first, rows), (second, other_rows) = find_source_and_rows(train), find_source_and_rows(other)
    if first is not second:
        if any(find_reader_attribute(source, "row_numbers") is None for source in (first, second)):
            return None
        if first.reader.info.files != second.reader.info.files or len(first.reader) != len(second.reader):
            return None
    if rows is None or other_rows is None:
        return None
    is_in = [
        np.zeros(max(count_source_samples(rows), count_source_samples(other_rows)), np.bool_)
        for _ in range(2)
    ]
    is_in[0][rows], is_in[1][other_rows] = True, True
    return SharedRows(int(np.count_nonzero(is_in[0] & is_in[1])), len(other_rows))


def count_source_samples(rows: Numbers) -> int:
    """Return the smallest number of samples that a data set with these row numbers can have."""
    return int(rows.max(initial=-1)) + 1


def find_source_and_rows(source: Any) -> tuple[Any, Numbers | None]:
    """Return the data set behind a source, and the numbers of the samples in it."""
    if type(source) is Subset:
        return source.dataset, np.asarray(source.indices, np.int64)
    if find_reader_attribute(source, "row_numbers") is not None:
        return source, source.row_numbers()
    return source, np.arange(len(source)) if hasattr(source, "__len__") else None


def count_shared_files(train: Any, other: Any) -> SharedRows:
    """Compare files by size, and files of equal size by content."""
    paths = [other.sample_file(int(row)) for row in choose_spread_indices(len(other), MOST_ROWS)]
    sizes = {path: read_file_size(path) for path in paths}
    wanted = {size for size in sizes.values() if size}
    candidates = [train.sample_file(int(row)) for row in choose_spread_indices(len(train), MOST_FILES)]
    digests = {hash_file_content(path) for path in candidates if read_file_size(path) in wanted}
    shared = sum(hash_file_content(path) in digests for path in paths if sizes[path]) if digests else 0
    return SharedRows(shared, len(paths), is_whole=len(candidates) == len(train))


def read_file_size(path: str) -> int:
    """Return the size of a file; 0 if it cannot be read, which is reported when it is used."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def hash_file_content(path: str) -> bytes:
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).digest()
    except OSError:
        return path.encode(errors="surrogateescape")


def compare_columns(train: Columns, other: Columns) -> SharedRows | None:
    """Compare rows by a few of their numbers. Compare all numbers of the rows that agree in these."""
    forms = [
        [(tuple(value.shape[1:]), str(value.dtype)) for value in columns.values] for columns in (train, other)
    ]
    if forms[0] != forms[1] or not len(train) or not len(other):
        return None
    mapped = any(is_mapped(value) for value in (*train.values, *other.values))
    train_rows = choose_spread_indices(len(train), MOST_MAPPED_ROWS if mapped else MOST_TRAINING_ROWS)
    other_rows = choose_spread_indices(len(other), MOST_ROWS)
    keys, other_keys = compute_row_keys(train, train_rows), compute_row_keys(other, other_rows)
    order = np.argsort(keys, kind="stable")
    begins = np.searchsorted(keys[order], other_keys, "left")
    ends = np.searchsorted(keys[order], other_keys, "right")
    shared = 0
    for row, begin, end in zip(other_rows, begins, ends, strict=True):
        equal = order[begin : min(end, begin + MOST_EQUAL_KEYS)]
        shared += any(is_same_row(train, int(train_rows[place]), other, int(row)) for place in equal)
    counts = np.unique(keys, return_counts=True)[1]
    repeated = 1 - int((counts == 1).sum()) / len(keys)
    return SharedRows(shared, len(other_rows), repeated, len(train_rows) == len(train))


def compute_row_keys(columns: Columns, rows: Numbers) -> Numbers:
    """Return a key for each row, computed from a few of its numbers: (N,) int64."""
    keys = np.zeros(len(rows), np.int64)
    for value in columns.values:
        numbers = select_numbers(value, rows)
        words = np.ascontiguousarray(numbers).view(np.uint8).reshape(len(rows), -1).astype(np.int64)
        factors = np.random.default_rng(0).integers(1, 2**40, words.shape[1]) * 2 + 1
        with np.errstate(over="ignore"):
            keys = keys * 1_000_003 + words @ factors
    return keys


def select_numbers(value: Column, rows: Numbers) -> Any:
    """Return a few numbers of each row, spread over it: (N, K)."""
    tensor = value if isinstance(value, Tensor) else None
    width = int(np.prod(value.shape[1:]))
    if width == 0:
        return np.zeros((len(rows), 1), np.uint8)
    places = choose_spread_indices(width, KEY_NUMBERS)
    if tensor is None:
        flat = np.asarray(value).reshape(len(value), width)
        return flat[rows[:, None], places]
    picked = tensor.detach().reshape(len(tensor), width)[
        torch.from_numpy(rows)[:, None], torch.from_numpy(places)
    ]
    picked = picked.cpu().contiguous()
    return picked.view(torch.uint8).numpy() if picked.element_size() > 1 else picked.to(torch.uint8).numpy()


def is_same_row(train: Columns, row: int, other: Columns, other_row: int) -> bool:
    for first, second in zip(train.values, other.values, strict=True):
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            if not torch.equal(first[row].cpu(), second[other_row].cpu()):
                return False
        elif not np.array_equal(np.asarray(first[row]), np.asarray(second[other_row])):
            return False
    return True
