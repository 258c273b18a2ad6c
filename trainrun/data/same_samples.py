"""Compare samples by their digests.

Ranks that divide the batches of a stream must read the same samples, or some samples are lost. And a sample must stay
as it is while the next one is read, or a batch holds one sample several times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from trainrun.data.batch import map_leaves
from trainrun.data.cache.samples import NotCacheable, flatten_sample
from trainrun.errors import DataError

DIVIDED = (
    "every rank reads the whole stream and takes its part of each batch. Let the stream return the same samples on "
    "each rank (without rank, world size or its own generator), or add shard(num_shards, index) and no __len__"
)


def hash_samples(samples: Sequence[Any]) -> str:
    """Return a digest of tensors, arrays, numbers, text and objects with `tobytes`. Other values count by their type
    only.

    An array of objects counts by its shape. Its bytes are addresses, which differ between processes.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(leaf: Any) -> Any:
        digest.update(type(leaf).__qualname__.encode())
        try:
            _, kinds, buffers = flatten_sample(leaf)
            digest.update(repr(kinds).encode())
            for buffer in buffers:
                digest.update(buffer.data)
        except NotCacheable:
            with suppress(Exception):  # what is called tobytes may be anything
                objects = getattr(getattr(leaf, "dtype", None), "hasobject", False)
                digest.update(repr(leaf.shape).encode() if objects else leaf.tobytes())
        return leaf

    map_leaves(list(samples), add)
    return digest.hexdigest()


def check_same_digests(digests: Sequence[str], key: str) -> None:
    """Raise DataError on every rank if the ranks read different samples.

    digests: of one batch, by rank; "" if a rank has no batch to compare.
    """
    if len(set(digests) - {""}) > 1:
        raise DataError(f"{key}: the ranks read different samples, so some would be lost; {DIVIDED}")


def refuse_shared_memory(samples: Iterator[Any], key: str) -> Iterator[Any]:
    """Yield samples. Raise DataError if reading the second one changes the first one."""
    for first in islice(samples, 1):
        digest = hash_samples([first])
        yield first
        for second in islice(samples, 1):
            if hash_samples([first]) != digest:
                raise build_shared_memory_error(key)
            yield second
    yield from samples


def build_shared_memory_error(key: str) -> DataError:
    return DataError(
        f"{key}: its samples share their memory, so a batch would hold one sample several times; let the data set and "
        "its transform return copies, such as x.clone() or x.copy()"
    )


def refuse_divided_source(source: Any, key: str) -> None:
    """Raise DataError for a stream that `split_dataset_by_node` has divided: the ranks would divide it again."""
    if getattr(getattr(source, "_distributed", None), "world_size", 1) > 1:
        raise DataError(
            f"{key}: split_dataset_by_node already divides the data among ranks, and trainrun divides it again, so "
            "samples would be lost; leave split_dataset_by_node out"
        )
