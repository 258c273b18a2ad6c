"""`data.train.stream=shuffled|in_order`: read shards one after the other, for data that is larger than the disk.

what: the training samples as an IterableDataset. Each rank, and each of its workers, reads shards of its own. A shard
    of an object store is downloaded when its turn comes. Afterwards the limit of the cache may remove it. `shuffled`:
    each epoch has another order of the shards, and of the samples inside each. A resume continues at the same shard
    and sample.
when: the shards do not fit on the disk, or an epoch is not read to its end. when not: all other data. Without
    `stream`, each epoch shuffles over all samples, and the batches do not depend on ranks and workers.
source: https://github.com/webdataset/webdataset reads shards in this way. gain: with a cache for half of the shards,
    a shuffle over all samples would download a shard for every second sample. A stream downloads each shard once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from trainrun.data.cache.stored_files import borrow_file, list_urls
from trainrun.data.engines.generators import build_generator
from trainrun.data.readers.parts import SplitFiles, SplitRequest, sort_files_by_split
from trainrun.data.readers.paths import list_brace_names, list_files
from trainrun.data.readers.reader_protocol import Info, ReaderDataset, ReadFiles
from trainrun.data.tensor_dataset import Splits
from trainrun.errors import DataError
from trainrun.limits import StreamOrder, is_url

SHARD_ORDER, SAMPLE_ORDER = 0, 1  # kinds of orders that one seed gives
HOLDS_NOTHING_OUT = "data.train.stream holds no samples out"
ReadShards = Callable[[tuple[Path, ...]], ReadFiles]


class ShardStream(IterableDataset[Any]):
    """The samples of shards, one shard after the other.

    shards: the bytes of each, by path or URL. read: reads local files of the format. numbers: the numbers of these
        shards among all. The order of their samples does not depend on how shards are divided. info: facts of the
        first shard, if it names the classes of all.
    """

    source_class_name = "a stream of shards"

    def __init__(
        self, shards: Mapping[str, int], read: ReadShards, order: StreamOrder, seed: int,
        numbers: Sequence[int] | None = None, info: Info | None = None,
    ) -> None:  # fmt: skip
        self.file_sizes = dict(shards)  # of which the fingerprint of a checkpoint is made
        self._shards, self._read, self._order, self._seed = list(shards), read, order, seed
        self._numbers = list(range(len(shards)) if numbers is None else numbers)
        self._info = info
        self.class_names = () if info is None else info.class_names
        self.num_classes = None if info is None else info.num_classes
        self.unused_arguments = describe_unread_settings("train", order)
        self._epoch = 0
        self._position, self._num_read, self._shard = 0, 0, ""  # where the last sample was read

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def shard(self, num_shards: int, index: int) -> ShardStream:
        """Return a part of the shards. It is the same in each epoch, so that a machine has its shards in its cache."""
        chosen = slice(index, None, num_shards)
        shards = {shard: self.file_sizes[shard] for shard in self._shards[chosen]}
        return ShardStream(shards, self._read, self._order, self._seed, self._numbers[chosen], self._info)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "num_read": self._num_read, "shard": self._shard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position, self._num_read, self._shard = state["position"], state["num_read"], state["shard"]

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples that follow the loaded state. Raise DataError if the shard has moved."""
        order = self._numbers_in_order(len(self._shards), SHARD_ORDER)[self._position :]
        name = os.path.basename(self._shard)  # the folder may be another one, on another machine
        if name and (not order or os.path.basename(self._shards[order[0]]) != name):
            raise DataError(f"data.path: {self._shard} was being read, and the shards are now others")
        for shard in order:
            self._shard = self._shards[shard]
            with borrow_file(self._shard, "data.path") as file:
                samples = ReaderDataset(self._read((file,)).reader)
                numbers = self._numbers_in_order(len(samples), SAMPLE_ORDER, self._numbers[shard])
                for number in numbers[self._num_read :]:
                    self._num_read += 1
                    yield samples[number]
            self._position, self._num_read, self._shard = self._position + 1, 0, ""
        self._position = 0

    def _numbers_in_order(self, count: int, *kind: int) -> list[int]:
        if self._order == "in_order":
            return list(range(count))
        numbers: list[int] = torch.randperm(
            count, generator=build_generator(self._seed, self._epoch, *kind)
        ).tolist()
        return numbers


def build_stream_splits(
    request: SplitRequest,
    endings: Sequence[str],
    read: ReadShards,
    order: StreamOrder,
    info: Info | None = None,
) -> Splits:
    """Return a stream of the training shards, and the other splits by index. Raise DataError without validation data.

    read, info: see `ShardStream`.
    """
    shards = list_shards(request.path, "data.path", endings)
    by_name = sort_files_by_split([Path(shard) for shard in shards])
    shard_of_path = {Path(shard): shard for shard in shards}

    def build(split: str) -> Any:
        named = [shard_of_path[path] for path in by_name[split]]
        if split == "train":
            sizes = {shard: shards[shard] for shard in named}
            return ShardStream(sizes, read, order, request.seed, info=info)
        key = f"data.train.{split}_path"
        path = request.val_path if split == "val" else request.test_path
        if path is not None:
            named, key = [path], key
        if not named and split == "test":
            return None
        if not named:
            raise DataError(
                f"data.train.stream={order}: holds no samples out; name {key}=..., or set data.val=null"
            )
        files = tuple(file for name in named for file in list_files(name, key, endings))
        samples = read(files)
        return samples.build(
            ReaderDataset(samples.reader, unused_arguments=describe_unread_settings(split, order))
        )

    return Splits(build)


def describe_unread_settings(split: str, order: StreamOrder) -> dict[str, str]:
    """Return the settings that a split does not read, each with the reason."""
    unused = dict.fromkeys(("val_fraction", "val_by"), HOLDS_NOTHING_OUT)
    for other in ("val", "test"):
        if split != other:
            unused[f"{other}_path"] = f"this run has no data.{other} that reads it"
    if split != "train" or order == "in_order":
        unused["seed"] = "only data.train.stream=shuffled draws an order"
    if split != "train":
        unused["stream"] = "validation and test data are read by index"
    return unused


def find_first_shard(request: SplitRequest, endings: Sequence[str]) -> SplitFiles:
    """Return a local copy of the first training shard as the only file."""
    shards = list_shards(request.path, "data.path", endings)
    first = sort_files_by_split([Path(shard) for shard in shards])["train"][0]
    name = next(shard for shard in shards if Path(shard) == first)
    return SplitFiles(request, {"train": list_files(name, "data.path", endings), "val": (), "test": ()})


def list_shards(path: str | None, key: str, endings: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each shard of a path or URL, in the order of their names. Nothing is downloaded."""
    if path is not None and is_url(path):
        return list_urls(path, list_brace_names(path), key, endings)
    return {str(file): file.stat().st_size for file in list_files(path, key, endings)}
