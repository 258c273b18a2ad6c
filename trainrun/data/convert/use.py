"""The words with which a run reads what was written; they are also how it is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainrun.data.convert.npy import NpyTarget
from trainrun.data.convert.parquet import Tables, tables_of
from trainrun.data.convert.records import LmdbTarget, write_tfrecord
from trainrun.data.convert.samples import Samples
from trainrun.data.convert.shards import ShardTarget
from trainrun.data.convert.target import Target
from trainrun.data.convert.webdataset import Form, form_of
from trainrun.data.readers.targets import TARGET_NAMES

GROUPS = {
    "npy": "arrays", "parquet": "parquet", "lmdb": "lmdb", "tfrecord": "tfrecord", "webdataset": "webdataset",
}  # fmt: skip
SHARDED = ("parquet", "tfrecord", "webdataset")
DEST = "{dest}"


@dataclass(frozen=True)
class Conversion:
    """Of all parts. words: what a run needs besides the paths. exact: containers come back as they were."""

    targets: Mapping[str, Target]
    words: list[str]
    exact: bool


def conversion_of(to: str, dest: Path, parts: Mapping[str, Samples], shard_size: int | None) -> Conversion:
    """DataError: a part does not fit into the format, or its parts differ."""
    targets: dict[str, Target] = {}
    words: list[list[str]] = []
    for split, samples in parts.items():
        if to == "npy":
            npy = NpyTarget(dest, split, samples)
            targets[split] = npy
            words.append(([] if npy.layout.target else ["data.train.target=null"]) + _classes(samples, False))
        elif to == "lmdb":
            targets[split] = LmdbTarget(dest, split, samples)
            words.append([])
        elif to == "tfrecord":
            targets[split] = ShardTarget(dest, split, samples, ".tfrecord", write_tfrecord, shard_size, True)
            words.append([])
        elif to == "parquet":
            tables = tables_of(samples)
            targets[split] = ShardTarget(dest, split, samples, ".parquet", tables.write, shard_size, False)
            words.append(_parquet_words(tables, samples) + _classes(samples, bool(tables.names)))
        else:
            form = form_of(samples)
            targets[split] = ShardTarget(dest, split, samples, ".tar", form.write, shard_size, True)
            words.append(_tar_words(form, samples))
    return Conversion(targets, words[0], to in ("lmdb", "tfrecord"))


def paths_in(to: str, splits: Sequence[str]) -> list[str]:
    """The words that name the parts; without `train`, the first part stands for it."""
    if to == "npy":
        return [f"data.path={DEST}", *([] if "val" in splits else ["data.val=null"])]
    ending = ".lmdb" if to == "lmdb" else ""
    train = "train" if "train" in splits else splits[0]
    alone = ["data.val=null", "data.train.val_fraction=0"]
    own = [f"data.train.val_path={DEST}/val{ending}"] if "val" in splits and train != "val" else alone
    return [f"data.path={DEST}/{train}{ending}", *own]


def node_of(to: str, train: Mapping[str, Any], dest: str, split: str) -> dict[str, Any]:
    """The node of a part that is neither `train` nor `val` of these words. train: the node data.train."""
    ending = ".lmdb" if to == "lmdb" else ""
    node = {**train, "split": split}
    return node if to == "npy" else {**node, f"{split}_path": f"{dest}/{split}{ending}"}


def _classes(samples: Samples, known: bool) -> list[str]:
    """For formats that do not keep how many there are."""
    return [] if known or samples.num_classes is None else [f"data.num_classes={samples.num_classes}"]


def _parquet_words(tables: Tables, samples: Samples) -> list[str]:
    layout = tables.layout
    inputs, target = layout.inputs, layout.target
    if samples.pictures:
        words = _picture_words(samples)
    else:
        words = [f"data.train.dtype={name}" for name in _input_dtype(tables) if name != "float32"]
        if not layout.named and len(inputs[0].shape) > 1:
            words.append(f"data.shape={_listed(inputs[0].shape)}")
    columns = [*(leaf.name for leaf in inputs), *tables.targets]
    if target is None:
        return [*words, "data.train.target=none"]
    if len(tables.targets) > 1:
        words.append(f"data.train.target=[{','.join(tables.targets)}]")
    elif sum(name.lower() in TARGET_NAMES for name in columns) != 1:
        words.append(f"data.train.target={target.name}")
    if target.numpy == "float64" and (target.single or len(tables.targets) > 1):
        words.append("data.train.target_dtype=float64")
    return words


def _input_dtype(tables: Tables) -> list[str]:
    """What the numbers become: the widest real type, or that of whole numbers where there is no other."""
    leaves = list(tables.layout.inputs)
    target = tables.layout.target
    if target is not None and not target.single and len(tables.targets) == 1:
        leaves.append(target)  # a list is read in the type of the inputs
    types = [leaf.numpy for leaf in leaves]
    if any(type_ == "float64" for type_ in types):
        return ["float64"]
    if any(type_.kind == "f" for type_ in types) or any(type_.kind == "b" for type_ in types):
        return ["float32"]
    if all(type_ == "uint8" for type_ in types):
        return ["uint8"]
    return ["int64"] if all(leaf.single for leaf in leaves) else ["float32"]


def _tar_words(form: Form, samples: Samples) -> list[str]:
    words = _picture_words(samples) if form.pictures else []
    if form.columns and form.columns != ("jpg;jpeg;png", "cls"):
        words.append(f"data.train.columns=[{','.join(form.columns)}]")
    return words


def _picture_words(samples: Samples) -> list[str]:
    """Pictures are decoded when they are read, as the source decodes them."""
    form = samples.source.form
    words = [f"data.shape={_listed(form.shape)}" if form.shape is not None else "data.shape=null"]
    words += [f"data.train.dtype={form.dtype}"] if form.dtype != "float32" else []
    words += [f"data.train.fit={form.fit}"] if form.fit != "crop" else []
    return words + ([] if form.draft else ["data.train.draft=false"])


def _listed(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
