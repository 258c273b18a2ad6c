"""Find the lengths of the samples: from the source, from data in memory, or by reading all samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from trainrun.data.engines.generators import seed_globals
from trainrun.data.map_style import has_own_getitems
from trainrun.data.sequences.fields import (
    FieldForm,
    Fields,
    describe_forms,
    find_sequence_names,
    is_target,
    list_fields,
)
from trainrun.data.tensor_dataset import Columns
from trainrun.errors import DataError
from trainrun.runtime.child_process import report_progress
from trainrun.user_code import format_error_with_line

PROBES = 8  # samples that show which fields are sequences
ESTIMATE_SAMPLES = 1000
ESTIMATE_SECONDS = 0.5
AT_ONCE = 256  # samples asked of `__getitems__` in one call
FIRST_LINE_SECONDS = 1.0
LINES_APART = 4  # times as long until the next one
SIGN_SECONDS = 1.0  # between two signs of life of the child process
COMPOSED = (
    "bucket",
    "pack",
    "token_budget",
)  # values of data.padding that ask for lengths before a batch is read
Forms = Mapping[str, FieldForm]


@dataclass(frozen=True, eq=False)
class SequenceLengths:
    """The sequences of a data set and their lengths.

    names: the fields that are sequences. varies: whether lengths are known to differ.
    lengths: (N,) int64, the longest sequence of each sample; None if only some samples were read. seen: the lengths in
        the samples that were read.
    how: how the lengths were found, if samples were read. aligned: whether the sequences of each sample were equally
        long.
    real_targets: targets of floating-point numbers; () if not all lengths are needed.
    """

    names: tuple[str, ...] = ()
    varies: bool = False
    lengths: np.ndarray[Any, Any] | None = None
    seen: np.ndarray[Any, Any] | None = None
    how: str = ""
    aligned: bool = True
    real_targets: tuple[str, ...] = ()


def learn_lengths(source: Any, key: str, seed: int, needs_all: bool) -> SequenceLengths | None:
    """Read a few samples in a child process, because this runs the user's code. Return None if all samples must be
    read.
    """
    count = len(source)
    reported = read_reported_lengths(source)
    if reported is None and not needs_all and not _may_be_sequence(source, key, seed):
        return SequenceLengths()
    spread = np.unique(np.linspace(0, count - 1, PROBES).astype(np.int64)).tolist()
    if reported is not None:
        probes = {0, int(reported.argmin()), int(reported.argmax()), *spread}
        forms = _read_samples(source, sorted(probes), key, seed)
        names, varies = find_sequence_names(forms.values())
        if names and all(_measure_longest(form, names) == reported[index] for index, form in forms.items()):
            real = list_real_targets(_read_fields(source, 0, key, seed)[0]) if needs_all else ()
            return SequenceLengths(
                names, varies, reported, reported, "", have_equal_lengths(forms.values(), names), real
            )
    return None if needs_all else _estimate_lengths(source, key, seed, spread)


def list_real_targets(fields: Fields) -> tuple[str, ...]:
    """Return the names of the targets that are floating-point numbers."""
    targets = []
    for name, value in fields.items():
        numbers = isinstance(value, torch.Tensor | np.generic | float)
        if is_target(name) and numbers and torch.as_tensor(value).is_floating_point():
            targets.append(name)
    return tuple(targets)


def read_reported_lengths(source: Any) -> np.ndarray[Any, Any] | None:
    """Return the lengths that a source provides without decoding samples; None if it provides none."""
    if type(source) is Subset:
        all_lengths = read_reported_lengths(source.dataset)
        return None if all_lengths is None else all_lengths[np.asarray(source.indices)]
    lengths = getattr(source, "lengths", None)
    if not isinstance(lengths, list | tuple | np.ndarray) or len(lengths) != len(source):
        return None
    array = np.asarray(lengths)
    return array.astype(np.int64) if array.ndim == 1 and array.dtype.kind in "iu" else None


def measure_columns(columns: Columns) -> SequenceLengths:
    """Return the lengths of rows of arrays, which are all equal."""
    forms = describe_forms(list_fields(columns[0]))
    names, _ = find_sequence_names([forms])
    if not names:
        return SequenceLengths()
    lengths = np.full(len(columns), forms[names[0]].length, dtype=np.int64)
    return SequenceLengths(names, False, lengths, lengths)


def _may_be_sequence(source: Any, key: str, seed: int) -> bool:
    """Return whether sample 0 may be a sequence. A picture is not."""
    try:
        (fields,) = _read_fields(source, 0, key, seed)
    except DataError:  # it is read again in the run, and fails there by its own name
        return False
    return any(fields[name].ndim <= 2 for name in describe_forms(fields))


def _estimate_lengths(source: Any, key: str, seed: int, spread: list[int]) -> SequenceLengths:
    """Find the sequence fields from some samples, and measure the lengths of as many as the time limit allows."""
    forms = [*_read_samples(source, spread, key, seed).values()]
    names, varies = find_sequence_names(forms)
    if not varies:
        return SequenceLengths(names)
    even_indices = np.unique(np.linspace(0, len(source) - 1, ESTIMATE_SAMPLES).astype(np.int64)).tolist()
    end = perf_counter() + ESTIMATE_SECONDS
    for index in even_indices:
        forms += _read_samples(source, [index], key, seed).values()
        if perf_counter() > end:
            break
    names, _ = find_sequence_names(forms)
    seen = np.array([_measure_longest(form, names) for form in forms])
    return SequenceLengths(names, True, None, seen, f"estimated from {len(seen)} samples")


def _read_samples(source: Any, indices: list[int], key: str, seed: int) -> dict[int, Forms]:
    """Return the samples that can be read. The others fail again in the run, and `data.on_error` decides there."""
    forms = {}
    for index in indices:
        with suppress(DataError):
            forms[index] = _describe_forms(source, index, key, seed)
    return forms


def read_all_lengths(source: Any, key: str, seed: int, report: Callable[[str], None]) -> SequenceLengths:
    """Read every sample once, as in epoch 0, in a child process, because this runs the user's code."""
    started, count = perf_counter(), len(source)
    forms: list[Forms] = []
    next_line, next_sign = FIRST_LINE_SECONDS, 0.0
    for form in _describe_all_forms(source, key, seed):
        forms.append(form)
        seconds = perf_counter() - started
        if seconds > next_line:
            left = seconds / len(forms) * (count - len(forms))
            text = f"{key}: lengths of {len(forms)} of {count} samples are read, {left:.0f} s to go"
            if not report_progress(text):
                report(text)
            next_line = seconds * LINES_APART
        elif seconds > next_sign:
            report_progress()
            next_sign = seconds + SIGN_SECONDS
    names, varies = find_sequence_names(forms)
    lengths = np.array([_measure_longest(form, names) for form in forms], dtype=np.int64)
    seconds = perf_counter() - started
    how = f"measured by reading {count} samples in {seconds:.1f} s; a source with .lengths needs none"
    real = list_real_targets(_read_fields(source, 0, key, seed)[0])
    return SequenceLengths(names, varies, lengths, lengths, how, have_equal_lengths(forms, names), real)


def _describe_all_forms(source: Any, key: str, seed: int) -> Iterator[Forms]:
    count = len(source)
    if not has_own_getitems(source):
        yield from (_describe_forms(source, index, key, seed) for index in range(count))
        return
    for begin in range(0, count, AT_ONCE):
        indices = list(range(begin, min(begin + AT_ONCE, count)))
        yield from map(describe_forms, _read_fields(source, indices[0], key, seed, indices))


def _read_fields(
    source: Any, index: int, key: str, seed: int, indices: list[int] | None = None
) -> list[Fields]:
    """Return the fields of a sample, or of the samples with the given indices, with the random numbers of epoch 0."""
    seed_globals(seed, 0, index)
    try:
        samples = [source[index]] if indices is None else source.__getitems__(indices)
        return [list_fields(sample) for sample in samples]
    except Exception as error:
        raise DataError(
            f"{key}: sample {index} of {type(source).__name__} cannot be read: "
            f"{format_error_with_line(error)}"
        ) from error


def _describe_forms(source: Any, index: int, key: str, seed: int) -> Forms:
    return describe_forms(_read_fields(source, index, key, seed)[0])


def have_equal_lengths(samples: Iterable[Forms], names: tuple[str, ...]) -> bool:
    return all(len({forms[name].length for name in names}) == 1 for forms in samples)


def _measure_longest(forms: Forms, names: Iterable[str]) -> int:
    return max((forms[name].length for name in names), default=0)
