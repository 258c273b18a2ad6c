"""Build one training set from the sources of `data.train`, with its validation fold and its sampling.

Joined sources, and parts of one, stay in memory if the sources are in memory. Otherwise they are torch's
ConcatDataset and Subset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from trainrun.data.facts import find_class_names
from trainrun.data.map_style import name_kind
from trainrun.data.order.drawn import (
    WeightedSamples,
    draw_by_shares,
    draw_by_weights,
    draw_classes_equally,
    find_class_labels,
)
from trainrun.data.order.sampler import compute_epoch_order
from trainrun.data.tensor_dataset import (
    Arrays,
    Column,
    Columns,
    find_attribute,
    find_columns,
    gather_rows,
    is_mapped,
    measure_length,
)
from trainrun.errors import DataError


@dataclass(frozen=True)
class TrainingSetOptions:
    """The settings of `data` for folds, sampling and mixtures, by name."""

    sampling: str = "none"
    weights: Any = None
    mix: Mapping[str, float] | None = None
    folds: int | None = None
    fold: int | None = None
    stratified: bool = False
    groups: str | None = None


def build_training_set(
    named: Mapping[str, Any], asked: TrainingSetOptions, notes: list[str]
) -> tuple[dict[str, Any], WeightedSamples | None]:
    """Return the source of `train`, and of `val` with folds. named: one source with the name "", or several by name."""
    source = named[""] if "" in named else join_sources(named, "data.train")
    sources, train = {"train": source}, None
    if asked.folds is not None:
        train, held, note = divide_into_fold(
            source, asked.folds, asked.fold or 0, asked.stratified, asked.groups
        )
        notes.append(note)
        sources = {
            name: select_samples(source, of, "data.train") for name, of in (("train", train), ("val", held))
        }
    drawn = None
    if asked.mix:
        drawn = draw_by_shares(
            asked.mix,
            {
                name: check_has_length(sized_source, f"data.train.{name}", "data.mix")
                for name, sized_source in named.items()
            },
        )
    elif asked.sampling != "none":
        number = check_has_length(source, "data.train", f"data.sampling={asked.sampling}")
        balances = asked.sampling == "balanced"
        drawn = (
            draw_classes_equally(sources["train"])
            if balances
            else draw_by_weights(named, asked.weights, number, train)
        )
    notes += [drawn.told] if drawn is not None else []
    return sources, drawn


def divide_into_fold(
    source: Any, folds: int, fold: int, stratified: bool, groups: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return the numbers of the training samples and of the validation samples, and a line about them.

    The parts do not depend on the seed, so all runs of a sweep divide the data equally. Sizes differ by at most one
    sample.
    stratified: sizes of each class too. groups: an attribute of the source. Samples with equal values stay together.
    """
    number = check_has_length(source, "data.train", f"data.folds={folds}")
    if folds > number:
        raise DataError(
            f"data.folds={folds}: data.train has {number} samples; at most this many folds are possible"
        )
    order = compute_epoch_order(number, 0, 0, True).numpy()
    if groups is not None:
        return divide_groups_into_fold(find_groups(source, groups, number), folds, fold, stratified)
    if stratified:
        labels = find_class_labels(source)
        if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iub":
            raise DataError("data.stratified=true: data.train has no class for each sample in memory; leave it out, or "
                            "give your data set an attribute `targets`")  # fmt: skip
        order = order[
            np.argsort(labels[order], kind="stable")
        ]  # then the folds take turns, through each class
    part = np.empty(number, np.int64)
    part[order] = np.arange(number) % folds
    inside, held = (torch.from_numpy(np.flatnonzero(is_chosen)) for is_chosen in (part != fold, part == fold))
    note = (f"data.fold={fold} of {folds}{' (stratified)' if stratified else ''}: {len(inside):,} samples of "
            f"data.train train, {len(held):,} validate; data.val is not read")  # fmt: skip
    return inside, held, note


def find_groups(source: Any, name: str, number: int) -> np.ndarray[Any, Any]:
    """Return the attribute of a source as an array. Raise DataError if it has no value for each sample."""
    values = find_attribute(source, name)
    groups = np.asarray([] if values is None or callable(values) else values)
    if groups.ndim != 1 or len(groups) != number:
        raise DataError(
            f"data.fold_groups={name}: data.train has no attribute `{name}` with one number or word for each of its "
            f"{number} samples"
        )
    return groups


def divide_groups_into_fold(
    groups: np.ndarray[Any, Any], folds: int, fold: int, stratified: bool
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Divide as `divide_into_fold`, with all samples of a group in one fold.

    The largest group goes to the smallest fold.
    """
    if stratified:
        raise DataError(
            "data.stratified=true: the samples of a group stay in one fold; leave it or data.train.groups out"
        )
    places = np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(places)
    if folds > len(sizes):
        raise DataError(
            f"data.folds={folds}: data.train has {len(sizes)} groups, so at most {len(sizes)} folds are possible"
        )
    shuffled = compute_epoch_order(len(sizes), 0, 0, True).numpy()
    fold_of_group, filled = np.empty(len(sizes), np.int64), np.zeros(folds, np.int64)
    for group in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        smallest = int(filled.argmin())
        fold_of_group[group] = smallest
        filled[smallest] += sizes[group]
    part = fold_of_group[places]
    inside, held = (torch.from_numpy(np.flatnonzero(is_chosen)) for is_chosen in (part != fold, part == fold))
    note = (f"data.fold={fold} of {folds} (by {len(sizes)} groups): {len(inside):,} samples of data.train train, "
            f"{len(held):,} validate; data.val is not read")  # fmt: skip
    return inside, held, note


def check_has_length(source: Any, key: str, asked: str) -> int:
    """Return the number of samples. Raise DataError if it is unknown. asked: the setting that needs it."""
    if isinstance(source, IterableDataset):
        raise DataError(
            f"{asked}: {key} is {name_kind(source)}, whose samples cannot be chosen by number; leave it out"
        )
    columns = find_columns(source, key)
    return measure_length(source if columns is None else columns, key)


def join_sources(sources: Mapping[str, Any], key: str) -> Any:
    """Join the samples of several sources, one after the other. Raise DataError if their classes differ."""
    for name, source in sources.items():
        check_has_length(source, f"{key}.{name}", f"{key} by name")
    names = {name: find_class_names(member) for name, member in sources.items()}
    named = {name: classes for name, classes in names.items() if classes}
    first = next(iter(named), "")
    for name, classes in named.items():
        if classes != named[first]:
            raise DataError(
                f"{key}.{name}: its classes ({', '.join(classes[:4])}, ...) are not those of {key}.{first} "
                f"({', '.join(named[first][:4])}, ...): the same number would mean different classes; give both the "
                "same list of classes"
            )
    columns_of = {name: find_columns(member, f"{key}.{name}") for name, member in sources.items()}
    columns = [member for member in columns_of.values() if member is not None]
    if len(columns) == len(columns_of) and len({_describe_columns(member) for member in columns}) == 1:
        values_of_columns = zip(*(member.values for member in columns), strict=True)
        joined = [_concatenate(values) for values in values_of_columns]
        return _pack_like_source(next(iter(sources.values())), columns[0], joined)
    parts: list[Any] = [sources[name] if member is None else member for name, member in columns_of.items()]
    return ConcatDataset(parts)


def select_samples(source: Any, indices: torch.Tensor, key: str) -> Any:
    """Return the samples with these numbers, in this order."""
    columns = find_columns(source, key)
    if columns is None or any(is_mapped(value) for value in columns.values):
        samples: Any = source if columns is None else columns
        return Subset(samples, indices.tolist())
    return _pack_like_source(
        source, columns, [gather_rows(value, indices.tolist()) for value in columns.values]
    )


def _pack_like_source(source: Any, columns: Columns, values: list[Any]) -> Any:
    """Return other rows in the container of the source."""
    if isinstance(source, Arrays):
        return replace(source, tensors=tuple(values), describe=None, column=None)
    return columns.pack(values)


def _describe_columns(columns: Columns) -> Any:
    """Return facts that must be equal for rows of several sources to be joined. Mapped files are not joined."""
    if any(is_mapped(value) for value in columns.values):
        return object()
    values = tuple((type(value), tuple(value.shape[1:]), value.dtype) for value in columns.values)
    return columns.names, values, columns.scale, columns.int_dtype


def _concatenate(values: tuple[Column, ...]) -> Column:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return torch.cat(tensors) if tensors else np.concatenate(values)
