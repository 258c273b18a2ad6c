"""Epochs in which samples occur more or less often than once: balanced classes, weights, mixtures of sources.

what: an epoch keeps its length N, and a sample of weight w occurs floor or ceil of N w / (sum of all weights) times.
    For this, N points at equal distances are put on the line of all weights. Their offset moves with the epoch by the
    golden ratio. The samples are then shuffled. So counts are exact to one in every epoch, and over several epochs
    samples of equal weight occur almost equally often. Any position is found in O(log N). Each weight takes 8 bytes.
when: rare classes, sources of unequal size. when not: the model has to learn the frequencies of the classes.
source: systematic resampling (Carpenter, Clifford and Fearnhead, IEE Proc. Radar 146, 1999); the additive recurrence.
gain: torch's WeightedRandomSampler draws independently, so an epoch omits 37 % of samples of equal weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from trainrun.data.tensor_dataset import find_attribute, find_columns
from trainrun.errors import DataError
from trainrun.seeding import derive_seed

GOLDEN = 0.6180339887498949
ROUNDING = 3e-7  # below the distance of two offsets: two visits that are 1 apart are never counted as one
FINE = 2**20  # offsets are multiples of 1 / FINE, so that whole weights add up exactly
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class WeightedSamples:
    """Groups of samples, each with its share of an epoch. All samples of a group occur equally often.

    ends: (groups + 1,) float64, the sum of the shares before each group. begins: (groups + 1,) int64, the first
        position of each group in `members`.
    members: sample numbers; None for all samples in their order. told: one line for the start of a run.
    """

    ends: Array
    begins: Array
    members: Array | None
    told: str

    @property
    def mark(self) -> str:
        """Return a text that changes with the shares and with the samples of each share."""
        parts = [self.ends, self.begins, *([] if self.members is None else [self.members])]
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:8]

    @property
    def number(self) -> int:
        """Return the number of samples."""
        return int(self.begins[-1])

    def samples(self, slots: Tensor, count: int, seed: int, epoch: int) -> Tensor:
        """Return the samples at these positions of an unshuffled epoch of `count`, both int64 and of one shape.

        For each repetition of a sample in the epoch, `number` is added, so its augmentation differs.
        """
        offset = int((derive_seed(seed, 3) % FINE / FINE + epoch * GOLDEN) % 1 * FINE) / FINE
        spacing = self.ends[-1] / count
        points = (slots.numpy() + offset) * spacing
        points = np.minimum(points, np.nextafter(self.ends[-1], 0))
        groups = np.searchsorted(self.ends, points, side="right") - 1  # never one without a share
        sizes = self.begins[groups + 1] - self.begins[groups]
        each = (self.ends[groups + 1] - self.ends[groups]) / sizes  # of the line, to a member
        beyond = points - self.ends[groups]
        within = np.minimum((beyond / each).astype(np.int64), sizes - 1)
        again = np.maximum((beyond - within * each) / spacing + ROUNDING, 0).astype(np.int64)
        places = self.begins[groups] + within
        return torch.from_numpy(
            (places if self.members is None else self.members[places]) + again * self.number
        )


def build_group_plan(shares: Array, sizes: Array, members: Array | None, told: str) -> WeightedSamples:
    begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return WeightedSamples(
        np.concatenate([[0.0], np.cumsum(shares, dtype=np.float64)]), begins, members, told
    )


def draw_classes_equally(source: Any) -> WeightedSamples:
    """Draw every class of the training data equally often."""
    labels, way = find_class_labels(source), "use weights instead: data.sampling=weighted data.weights=..."
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iub":
        why = "has no labels in memory" if labels is None else "has no single class for each sample"
        advice = (
            "give your data set an attribute `targets`, a class for each sample, or "
            if labels is None
            else ""
        )
        raise DataError(f"data.sampling=balanced: data.train {why}; {advice}{way}")
    classes, counts = np.unique(labels, return_counts=True)
    if classes[0] < 0:
        raise DataError(
            f"data.sampling=balanced: data.train has label {classes[0]}, which is no class; {way}"
        )
    text = (
        f"data.sampling=balanced: {len(classes)} classes of {counts.min():,} to {counts.max():,} samples, about "
        f"{len(labels) / len(classes):,.0f} of each in an epoch of {len(labels):,}"
    )
    return build_group_plan(np.ones(len(classes)), counts, np.argsort(labels, kind="stable"), text)


def draw_by_weights(
    named: Mapping[str, Any], given: Any, number: int, rows: Tensor | None = None
) -> WeightedSamples:
    """Draw each sample in proportion to its weight.

    named: the sources, one after the other. given: the value of `data.weights`. number: of all samples. rows: the
        training samples; None for all.
    """
    weights, where = find_weights(named, given)
    if weights.ndim != 1 or weights.dtype.kind not in "iufb":
        shape = list(weights.shape)
        raise DataError(
            f"data.weights={where}: must be one number a sample; it is {weights.dtype} of shape {shape}"
        )
    if len(weights) != number:
        raise DataError(f"data.weights={where}: holds {len(weights):,} weights, and data.train {number:,} samples; "
                        "give one per sample, in the order of the training part")  # fmt: skip
    weights = weights.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise DataError(
            f"data.weights={where}: sample {wrong[0]} has weight {weights[wrong[0]]:g}; must be 0 or more"
        )
    if rows is not None:
        weights = weights[rows.numpy()]
    if not weights.any():
        raise DataError(f"data.weights={where}: all weights are 0; at least one must be greater")
    text = (
        f"data.sampling=weighted: in an epoch of {len(weights):,} a sample comes up to "
        f"{weights.max() / weights.mean():.3g} times on average; {int((weights == 0).sum()):,} never"
    )
    return build_group_plan(weights, np.ones(len(weights)), None, text)


def draw_by_shares(shares: Mapping[str, float], sizes: Mapping[str, int]) -> WeightedSamples:
    """Draw named sources in these shares, which need not add up to 1. sizes: the number of samples of each source."""
    if empty := [name for name, size in sizes.items() if not size]:
        raise DataError(f"data.mix: data.train.{empty[0]} is empty; leave it out")
    number, total = sum(sizes.values()), sum(shares.values())
    parts = {name: share / total * number for name, share in shares.items()}
    each = (f"{name} {part / number:.3g} ({part / sizes[name]:.3g} times)" for name, part in parts.items())
    text = f"data.mix: in an epoch of {number:,}: {', '.join(each)}"
    return build_group_plan(
        np.array([parts[n] / number for n in sizes]), np.array(list(sizes.values())), None, text
    )


def find_class_labels(source: Any) -> Array | None:
    """Return the class of each sample, (N,), without reading a sample; None if the data set does not provide it."""
    columns = find_columns(source, "data.train")
    labels = columns.target() if columns is not None else find_attribute(source, "targets")
    if labels is None and columns is None:
        labels = find_attribute(source, "labels")
    return None if labels is None else np.asarray(labels)


def find_weights(named: Mapping[str, Any], given: Any) -> tuple[Array, str]:
    """Return the weights, and their name for messages. They are a list, a column, an attribute or a file."""
    if isinstance(given, list):
        return np.asarray(given), f"[{', '.join(map(str, given[:3]))}{', ...' if len(given) > 3 else ''}]"
    try:
        columns_of = {name: find_sample_column(source, given) for name, source in named.items()}
    except DataError as error:
        raise DataError(f"data.weights={given}: must be a column of numbers; {error}") from error
    present = {name: column for name, column in columns_of.items() if column is not None}
    if 0 < len(present) < len(columns_of):
        has, lacks = next(iter(present)), next(name for name in columns_of if name not in present)
        raise DataError(f"data.weights={given}: data.train.{lacks} has none, and data.train.{has} has")
    if present:
        columns = list(present.values())
        return columns[0] if len(columns) == 1 else np.concatenate([np.ravel(one) for one in columns]), given
    path = Path(given).expanduser()
    if not path.is_file():
        raise DataError(
            f"data.weights={given}: data.train has no column or attribute of this name, and there is no such file; "
            "name one, or a .npy file, or a text file with one number per line"
        )
    try:
        return np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(
            path, ndmin=1
        ), given
    except (OSError, ValueError) as error:
        raise DataError(f"data.weights={given}: cannot be read as numbers: {error}") from error


def find_sample_column(source: Any, name: str) -> Array | None:
    """Return a column of the table or arrays, or an attribute, with a value for each sample; None if there is none."""
    if type(source) is Subset:
        values = find_sample_column(source.dataset, name)
        return None if values is None else values[np.asarray(source.indices)]
    columns = find_columns(source, "data.train")
    if columns is not None and name in columns.names:
        return np.asarray(columns.values[columns.names.index(name)])
    of_table = find_attribute(source, "column")
    column = (
        of_table(name)
        if callable(of_table)
        else find_attribute(source, name)
        if name.isidentifier()
        else None
    )
    return None if column is None else np.asarray(column)
