"""From the parts of a source to a folder that is complete and checked."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from trainrun.config.compose import compose_run
from trainrun.config.schema import DataConfig
from trainrun.convert.folder import Journal, check_folder, locked, writing_to
from trainrun.convert.part_samples import Samples, leaves_of
from trainrun.convert.source import DEST, filled
from trainrun.convert.usage import EXACT, node_of, paths_in, target_of
from trainrun.convert.write import write_parts
from trainrun.data.cache.fingerprint import own_fingerprint
from trainrun.errors import ConfigError, DataError
from trainrun.instantiate import bind_faults, build

SPLITS = ("train", "val", "test")
PLAIN = re.compile(r"[\w./{}-]*")


def convert(
    to: str, dest: Path, parts_of: Callable[[], tuple[str, dict[str, Samples]]], arguments: list[str],
    size: int | None, num_workers: int, say: Callable[[str], None], source: str = "the source is",
) -> None:  # fmt: skip
    """Write DEST or what is missing of it, check it, and say how it is used.

    parts_of: what tells the parts from others, and the parts. arguments: those that change DEST. size: samples a file.
    """
    check_folder(dest, arguments)
    with locked(dest):
        journal = check_folder(dest, arguments)
        identity, parts = parts_of()
        if journal is not None and journal.identity != identity:
            fault = f"{source} not what it was when this conversion began"
            raise ConfigError(f"{dest}: {fault}; delete {dest} and write it again, or name another folder")
        found = {name: target_of(to, dest, name, samples, size) for name, samples in parts.items()}
        targets = {name: target for name, (target, _) in found.items()}
        use = [
            f"data={'arrays' if to == 'npy' else to}",
            *paths_in(to, list(parts)),
            *next(iter(found.values()))[1],
        ]
        if journal is None:
            with writing_to(dest):
                Journal(arguments, identity, use=use).write(dest)
        write_parts(dest, targets, parts, num_workers, Console(highlight=False), say)
        test, count = _checked(to, dest, parts, use)
        files = [file for target in targets.values() for file in target.files]
        sizes = {str(file.relative_to(dest)): file.stat().st_size for file in files}
        with writing_to(dest):
            Journal(arguments, identity, True, use, test, sizes).write(dest)
    total = sum(sizes.values()) / 1e6
    say(f"{dest}: {len(sizes)} files, {total:,.1f} MB; {count} samples read back are the same")
    say(f"use it with: {shlex.join(filled(use, dest))}")
    if test:
        say(f"with test data: {shlex.join(filled(test, dest))}")


def parts_of(config: DataConfig) -> tuple[str, dict[str, Samples]]:
    """The parts of the source, and what tells them from others: files by size and time of change, or the content."""
    nodes = {name: node for name in SPLITS if (node := getattr(config, name))}
    errors = [error for name, node in nodes.items() for error in bind_faults(node, f"data.{name}")]
    if errors:
        raise ConfigError(*errors)
    digest, parts = hashlib.sha256(), {}
    for name, node in nodes.items():
        source = build(node, f"data.{name}")
        if source is None:  # there is no test data
            continue
        digest.update(f"{name} {node} {own_fingerprint(source)}".encode())
        parts[name] = samples = Samples(source, f"data.{name}")
        digest.update(f"{len(samples)} {samples.class_names}".encode())
        for path, leaf in (leaf for sample in samples.probes for leaf in leaves_of(sample)):
            content = leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()
            digest.update(f"{path} {getattr(leaf, 'dtype', '')} {len(content)} ".encode() + content)
    return digest.hexdigest(), parts


def _checked(to: str, dest: Path, parts: dict[str, Samples], use: list[str]) -> tuple[list[str], int]:
    """The settings of the test data, and how many samples a run reads as the source gives them.

    DataError: one is another one.
    """
    config, count = compose_run(filled(use, dest)).config.data, 0
    test = node_of(to, config.train, DEST, "test")
    for split, samples in parts.items():
        node = config.val if split == "val" else config.train
        if to == "npy" or split == "test":
            node = node_of(to, config.train, str(dest), split)
        try:
            written = Samples(build(node, f"data.{split}"), f"data.{split}")
        except DataError as error:
            raise DataError(f"{dest}: cannot be read back: {error}") from error
        count += _compare(samples, written, to in EXACT)
    settings = [f"data.test.{key}={_quoted(value)}" for key, value in test.items() if value is not None]
    return settings if "test" in parts else [], count


def _quoted(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    escaped = value.replace("'", "\\'")
    return value if PLAIN.fullmatch(value) else f"'{escaped}'"


def _compare(source: Samples, written: Samples, exact: bool) -> int:
    """The number of samples compared: the first, the last, and some between. exact: in the same containers too."""
    if len(written) != len(source):
        raise DataError(f"{source.key}: {len(source)} samples, but {len(written)} are read back")
    between = np.random.default_rng(len(source)).permutation(np.arange(1, len(source) - 1))[
        : source.num_probes - 2
    ]
    numbers = sorted({0, len(source) - 1, *between.tolist()})
    if source.sequential:
        numbers = list(range(len(numbers)))
    for number, sample, found in zip(numbers, source.chosen(numbers), written.chosen(numbers), strict=True):
        error = _difference(sample, found, exact, source.tolerance)
        if not error:
            continue
        if not source.sequential and _difference(sample, source.chosen([number])[0], True, source.tolerance):
            raise DataError(
                f"{source.describe(number)}: is another one whenever it is read; convert needs a source that "
                "gives the same each time: what is random belongs into data.transform or data.augment"
            )
        raise DataError(
            f"{source.describe(number)}: {error} when it is read back ({written.describe(number)}); another "
            "format may keep it, lmdb keeps every sample"
        )
    return len(numbers)


def _difference(sample: Any, found: Any, exact: bool, tolerance: float) -> str:
    """What is not the same; "" if all is. Another type that holds the same values is equal, and (1,) is like ()."""
    if exact and _container(sample) != _container(found):
        return f"{_container(sample)} becomes {_container(found)}"
    leaves, others = ([leaf for _, leaf in leaves_of(one)] for one in (sample, found))
    if len(leaves) != len(others):
        return f"{len(leaves)} arrays become {len(others)}"
    wrong = (
        number for number, pair in enumerate(zip(leaves, others, strict=True)) if not _same(*pair, tolerance)
    )
    number = next(wrong, None)
    return "" if number is None else f"array {number} becomes another"


def _container(sample: Any) -> str:
    if isinstance(sample, dict):
        return f"dict({', '.join(map(str, sample))})"
    return type(sample).__name__ if isinstance(sample, tuple | list) else "array"


def _same(one: Any, other: Any, tolerance: float) -> bool:
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        if type(one) is type(other) and hasattr(one, "equal"):  # bfloat16
            return bool(one.dtype == other.dtype and one.equal(other))
        return bool(type(one) is type(other) and one == other)
    if one.shape != other.shape and {one.shape, other.shape} != {(), (1,)}:
        return False
    if tolerance and one.dtype.kind == "f":  # computed again, perhaps by other threads
        near = tolerance * float(np.abs(one).max(initial=1))
        return np.allclose(one, other.reshape(one.shape), rtol=0, atol=near, equal_nan=True)
    cast = one.astype(other.dtype)
    return cast.tobytes() == other.tobytes() and cast.astype(one.dtype).tobytes() == one.tobytes()
