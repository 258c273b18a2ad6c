"""Write the splits of a source into a folder that is complete and checked."""

from __future__ import annotations

import hashlib
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainrun.config.compose import compose_run
from trainrun.config.schema import DataConfig
from trainrun.convert.folder import (
    Journal,
    check_folder,
    lock_conversion,
    open_for_writing,
    publish_file,
    temporary_path,
)
from trainrun.convert.output_formats import FORMATS, Format, Npy, encode_split_facts
from trainrun.convert.source import DEST, fill_in_dest
from trainrun.convert.split_samples import Samples, iterate_encoded_samples, iterate_sample_leaves
from trainrun.data.cache.fingerprint import fingerprint_source
from trainrun.data.readers.records.record import META_NAME
from trainrun.data.tensor_dataset import SplitBuilder
from trainrun.errors import ConfigError, DataError
from trainrun.instantiate import check_node_arguments
from trainrun.output import report_result
from trainrun.runtime.signals import StopFlag, catch_stops

SPLITS = ("train", "val", "test")
SHARD_BYTES = 128 * 2**20
HELD_OUT_SETTINGS = (
    "val_path",
    "val_fraction",
    "val_by",
)  # a split with a file of its own has no use for them
UNQUOTED = re.compile(r"[\w./{}-]*")


def convert(
    to: str, dest: Path, read_source: Callable[[], tuple[str, dict[str, Samples]]], arguments: list[str],
    shard_size: int | None, say: Callable[[str], None], source: str = "the source is",
) -> None:  # fmt: skip
    """Write DEST or its missing parts, check it, and print the settings with which a run reads it.

    read_source: returns the identity of the source and its splits. arguments: the arguments that change the content
        of DEST. shard_size: samples per file. source: the start of the message that the source has changed.
    """
    check_folder(dest, arguments)
    with lock_conversion(dest):
        journal = check_folder(dest, arguments)
        identity, splits = read_source()
        if journal is not None and journal.identity != identity:
            fault = f"{source} not what it was when this conversion began"
            raise ConfigError(f"{dest}: {fault}; delete {dest} and write it again, or name another folder")
        formats: dict[str, Format] = {name: FORMATS[to](samples) for name, samples in splits.items()}
        group = "arrays" if to == "npy" else to
        use = [
            f"data={group}",
            *path_settings(to, list(splits)),
            *next(iter(formats.values())).settings(),
        ]
        if journal is None:
            with open_for_writing(dest):
                Journal(arguments, identity, use=use).write(dest)
        files = [
            file
            for name, samples in splits.items()
            for file in write_split(dest, name, samples, formats[name], shard_size, say)
        ]
        use_test, count = check_written(to, dest, splits, use)
        sizes = {str(file.relative_to(dest)): file.stat().st_size for file in files}
        with open_for_writing(dest):
            Journal(arguments, identity, True, use, use_test, sizes).write(dest)
    total = sum(sizes.values()) / 1e6
    say(f"{dest}: wrote {len(sizes)} files ({total:,.1f} MB); checked {count} samples: identical")
    say(f"use it with: {shlex.join(fill_in_dest(use, dest))}")
    report_result(
        folder=dest, files=sizes, settings=fill_in_dest(use, dest), test_settings=fill_in_dest(use_test, dest)
    )
    if use_test:
        say(f"with test data: {shlex.join(fill_in_dest(use_test, dest))}")


def write_split(
    dest: Path, name: str, samples: Samples, output: Format, shard_size: int | None, say: Callable[[str], None]
) -> list[Path]:  # fmt: skip
    """Write the missing files of a split. Return all its files. A file gets its final name when it is complete."""
    started = time.monotonic()
    shards = plan_shards(dest, name, samples, output, shard_size)
    missing = [shard for shard in shards if not all(path.exists() for path in shard.paths)]
    ranges = [range(shard.begin, shard.end) for shard in missing]
    num_missing = sum(map(len, ranges))
    as_files = output.as_files and samples.has_files
    items = iterate_encoded_samples(samples, output.encode, as_files, ranges)
    flag = StopFlag(training=False)  # Ctrl-C raises KeyboardInterrupt
    items = show_progress(items, name, len(samples), len(samples) - num_missing, flag)
    facts = dest / name / META_NAME
    with catch_stops(flag.handle), open_for_writing(dest):
        for shard in missing:
            shard.paths[0].parent.mkdir(exist_ok=True)
            write_files(shard, output, items)
        if output.has_facts and not facts.exists():
            temporary_path(facts).write_bytes(encode_split_facts(samples) + b"\n")
            publish_file(temporary_path(facts), facts)
    were_there = len(samples) - num_missing
    before = f", {were_there:,} of them were there already" if were_there else ""
    say(f"{name}: {len(samples):,} samples{before} ({time.monotonic() - started:.1f} s)")
    return [path for shard in shards for path in shard.paths] + [facts] * output.has_facts


class Shard(NamedTuple):
    """The samples from `begin` up to `end`, in one file or in one file per array."""

    paths: list[Path]
    begin: int
    end: int

    @property
    def temporary(self) -> list[Path]:
        return [temporary_path(path) for path in self.paths]


def plan_shards(
    dest: Path, name: str, samples: Samples, output: Format, shard_size: int | None
) -> list[Shard]:
    length = len(samples)
    if not output.is_sharded:
        names = [f"{array}_{name}" for array in output.names] if isinstance(output, Npy) else [name]
        return [Shard([dest / f"{file}{output.ending}" for file in names], 0, length)]
    size = shard_size or max(1, SHARD_BYTES // samples.sample_bytes)
    begins = range(0, length, size)
    paths = [dest / name / f"{name}-{i:05d}-of-{len(begins):05d}{output.ending}" for i in range(len(begins))]
    return [
        Shard([path], begin, min(begin + size, length)) for path, begin in zip(paths, begins, strict=True)
    ]


def write_files(shard: Shard, output: Format, items: Iterator[Any]) -> None:
    """Write the files of a shard under temporary names, then rename them."""
    num_items = shard.end - shard.begin
    try:
        output.write(shard.temporary, islice(items, num_items), num_items)
    except BaseException:
        for path in shard.temporary:
            path.unlink(missing_ok=True)
        raise
    for temporary, path in zip(shard.temporary, shard.paths, strict=True):
        publish_file(temporary, path)


def show_progress(
    items: Iterator[Any], name: str, total: int, completed: int, flag: StopFlag
) -> Iterator[Any]:
    """Yield the items until a stop signal comes. On a terminal a bar shows the progress."""
    console = Console(highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total, completed=completed)
        for item in items:
            if flag.request:
                raise KeyboardInterrupt
            yield item
            progress.advance(task)


def open_splits(config: DataConfig) -> tuple[str, dict[str, Samples]]:
    """Return the splits of the source and its identity: sizes and modification times of its files, or a hash of its
    content.
    """
    nodes = {name: node for name in SPLITS if (node := getattr(config, name))}
    errors = [error for name, node in nodes.items() for error in check_node_arguments(node, f"data.{name}")]
    if errors:
        raise ConfigError(*errors)
    digest, splits, builder = hashlib.sha256(), {}, SplitBuilder()
    for name, node in nodes.items():
        source = builder.build(node, f"data.{name}", name)
        if source is None:  # there is no test data
            continue
        digest.update(f"{name} {node} {fingerprint_source(source)}".encode())
        splits[name] = samples = Samples(source, f"data.{name}")
        digest.update(f"{len(samples)} {samples.class_names}".encode())
        for path, leaf in (leaf for sample in samples.probes for leaf in iterate_sample_leaves(sample)):
            content = leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()
            digest.update(f"{path} {getattr(leaf, 'dtype', '')} {len(content)} ".encode() + content)
    return digest.hexdigest(), splits


def path_settings(to: str, splits: list[str]) -> list[str]:
    """Return the settings with the paths of the splits."""
    if to == "npy":
        return [f"data.path={DEST}", *([] if "val" in splits else ["data.val=null"])]
    no_validation = ["data.val=null", "data.train.val_fraction=0"]
    validation = [f"data.train.val_path={split_path(to, DEST, 'val')}"] if "val" in splits else no_validation
    return [f"data.path={split_path(to, DEST, 'train')}", *validation]


def split_path(to: str, dest: str, split: str) -> str:
    return f"{dest}/{split}{'' if FORMATS[to].is_sharded else FORMATS[to].ending}"


def split_node(to: str, train: Mapping[str, Any], dest: str, split: str) -> dict[str, Any]:
    """Return the config node of a split other than `train`. train: the node data.train in the printed settings."""
    if to == "npy":
        return dict(train)
    settings = {name: value for name, value in train.items() if name not in HELD_OUT_SETTINGS}
    return {**settings, f"{split}_path": split_path(to, dest, split)}


def check_written(to: str, dest: Path, splits: dict[str, Samples], use: list[str]) -> tuple[list[str], int]:
    """Compare written samples with the source. Return the settings of the test data and the number of compared
    samples.

    Raise DataError if a sample differs.
    """
    config, count = compose_run(fill_in_dest(use, dest)).config.data, 0
    test = split_node(to, config.train, DEST, "test")
    for split, samples in splits.items():
        node = config.val if split == "val" else config.train
        if to == "npy" or split == "test":
            node = split_node(to, config.train, str(dest), split)
        try:
            written = Samples(SplitBuilder().build(node, f"data.{split}", split), f"data.{split}")
        except DataError as error:
            raise DataError(f"{dest}: cannot be read back: {error}") from error
        count += compare_samples(samples, written)
    settings = [
        f"data.test.{key}={quote_for_hydra(value)}" for key, value in test.items() if value is not None
    ]
    return settings if "test" in splits else [], count


def quote_for_hydra(value: Any) -> str:
    """Return the text from which Hydra reads the value."""
    if isinstance(value, list):
        return f"[{','.join(map(quote_for_hydra, value))}]"
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    escaped = value.replace("'", "\\'")
    return value if UNQUOTED.fullmatch(value) else f"'{escaped}'"


def compare_samples(source: Samples, written: Samples) -> int:
    """Compare the first, the last, and some samples between them. Return their number. Raise DataError if one
    differs.
    """
    if len(written) != len(source):
        raise DataError(f"{source.key}: {len(source)} samples, but {len(written)} are read back")
    between = np.random.default_rng(len(source)).permutation(np.arange(1, len(source) - 1))
    numbers = sorted({0, len(source) - 1, *between[: source.num_probes - 2].tolist()})
    if source.sequential:
        numbers = list(range(len(numbers)))
    samples = source.read_single(numbers)
    for number, sample, other in zip(numbers, samples, written.read_single(numbers), strict=True):
        if is_same_sample(sample, other, source.tolerance):
            continue
        if not source.sequential and not is_same_sample(
            sample, source.read_single([number])[0], source.tolerance
        ):
            raise DataError(
                f"{source.describe(number)}: is another one whenever it is read; convert needs a source that "
                "gives the same each time: what is random belongs into data.transform or data.augment"
            )
        raise DataError(
            f"{source.describe(number)}: other values are read back ({written.describe(number)}); another "
            "format may keep it, lmdb keeps every sample"
        )
    return len(numbers)


def is_same_sample(sample: Any, other: Any, tolerance: float) -> bool:
    """Return whether two samples have equal values in the same order. Containers may differ, and (1,) equals ()."""
    values, others = ([leaf for _, leaf in iterate_sample_leaves(part)] for part in (sample, other))
    pairs = zip(values, others, strict=False)
    return len(values) == len(others) and all(is_same_value(*pair, tolerance) for pair in pairs)


def is_same_value(value: Any, other: Any, tolerance: float) -> bool:
    if not isinstance(value, np.ndarray) or not isinstance(other, np.ndarray):
        is_equal = value.equal(other) if hasattr(value, "equal") else value == other  # equal: of bfloat16
        return type(value) is type(other) and bool(is_equal)
    if value.shape != other.shape and {value.shape, other.shape} != {(), (1,)}:
        return False
    if tolerance and value.dtype.kind == "f":  # computed again, perhaps by other threads
        limit = tolerance * float(np.abs(value).max(initial=1))
        return np.allclose(value, other.reshape(value.shape), rtol=0, atol=limit, equal_nan=True)
    cast = value.astype(other.dtype)
    return cast.tobytes() == other.tobytes() and cast.astype(value.dtype).tobytes() == value.tobytes()
