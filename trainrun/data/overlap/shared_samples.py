"""Find samples of validation or test data that are also training samples. A child process reads both and compares
hashes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from trainrun.data.engines.batch_reader import BatchReader
from trainrun.data.facts import SharedRows
from trainrun.data.look import build_recipe, uses_fork
from trainrun.data.same_samples import hash_samples
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import find_columns
from trainrun.errors import DataError
from trainrun.runtime.child_process import ChildError, run_in_child

MOST_SAMPLES, READ_SECONDS = 4096, 0.5  # of each of two sources, and of both together
CHILD_SECONDS = 10.0  # for a sample that stands still


def count_shared_samples(
    train: Any, other: Any, train_options: StreamOptions, other_options: StreamOptions
) -> SharedRows | None:
    """Count the samples of another split that are also training samples, in a child process that reads both.

    The splits have different seeds, so random samples are not equal. None: no child process can read them.
    """
    readers = []
    for place, (source, options) in enumerate(((train, train_options), (other, other_options))):
        if isinstance(source, IterableDataset) or not uses_fork(options):
            return None
        columns = find_columns(source, options.key)
        recipe = build_recipe(replace(options, seed=options.seed + place))
        readers.append(BatchReader(source if columns is None else columns, recipe))
    try:
        return run_in_child(partial(compare_sample_hashes, *readers), CHILD_SECONDS, computes=False)
    except (ChildError, DataError):  # the training reads them too, and reports what is wrong
        return None


def compare_sample_hashes(train: BatchReader, other: BatchReader) -> SharedRows:
    """Compare hashes of samples. Both splits are read alternately, so that equally many samples of each are read."""
    counts: dict[str, int] = {}
    digests = []
    rows, other_rows = choose_likely_rows(train.number), choose_likely_rows(other.number)
    end = perf_counter() + READ_SECONDS
    for place in range(max(len(rows), len(other_rows))):
        if place < len(rows):
            digest = hash_samples([train.read_sample(0, rows[place])])
            counts[digest] = counts.get(digest, 0) + 1
        if place < len(other_rows):
            digests.append(hash_samples([other.read_sample(0, other_rows[place])]))
        if perf_counter() > end:
            break
    shared = sum(digest in counts for digest in digests)
    once = sum(count == 1 for count in counts.values())
    number = sum(counts.values())
    return SharedRows(shared, len(digests), 1 - once / number, number == train.number)


def choose_likely_rows(number: int) -> list[int]:
    """Return row numbers at which two sources probably agree if one is a part of the other.

    They alternate between the first rows, the last rows, and random rows. Sources of equal length get the same random
    rows.
    """
    if number <= MOST_SAMPLES:
        drawn = np.random.default_rng(0).permutation(number)
    else:
        drawn = np.random.default_rng(0).integers(0, number, MOST_SAMPLES)
    first = np.arange(len(drawn))
    turns = np.stack([first, number - 1 - first, drawn], axis=1)
    rows: list[int] = list(dict.fromkeys(turns.reshape(-1).tolist()))
    return rows[:MOST_SAMPLES]
