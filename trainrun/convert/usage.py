"""How each format is written, and the settings of a run that reads it; they are also how it is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainrun.convert.array_files import ArrayFiles
from trainrun.convert.layout import SampleLayout
from trainrun.convert.parquet_shards import Tables, tables_of
from trainrun.convert.part_samples import Samples
from trainrun.convert.record_files import PICTURE, Lmdb, ShardWriter, tar_columns, write_tar, write_tfrecord
from trainrun.convert.source import DEST
from trainrun.convert.write import Target
from trainrun.data.readers.records.webdataset import WHOLE
from trainrun.interfaces import TARGET_KEYS

ENDINGS = {"lmdb": ".lmdb", "hdf5": ".h5"}  # one file a part; else a folder
EXACT = ("lmdb", "tfrecord")  # formats that keep tuples, lists and dicts as they are


def target_of(
    to: str, dest: Path, split: str, samples: Samples, size: int | None
) -> tuple[Target, list[str]]:
    """What writes the part, and the settings a run needs besides the paths. DataError: the part does not fit."""
    if to in ("npy", "hdf5"):
        arrays = ArrayFiles(to, dest, split, samples, size)
        return arrays, _array_settings(to, arrays.layout) + _classes(samples)
    if to == "lmdb":
        return Lmdb(dest, split, samples), []
    if to == "tfrecord":
        return ShardWriter(dest, split, samples, ".tfrecord", write_tfrecord, size), []
    if to == "parquet":
        tables = tables_of(samples)
        settings = _parquet_settings(tables, samples) + ([] if tables.class_names else _classes(samples))
        return ShardWriter(dest, split, samples, ".parquet", tables.write, size, facts=False), settings
    columns = tar_columns(samples)
    settings = _picture_settings(samples) if samples.pictures else []
    if columns not in ([WHOLE], [PICTURE, "cls"]):
        settings.append(f"data.train.columns=[{','.join(columns)}]")
    return ShardWriter(dest, split, samples, ".tar", write_tar, size), settings


OF_HELD_OUT_DATA = ("val_path", "val_fraction", "val_by")  # a part with a file of its own has no use for them


def paths_in(to: str, splits: Sequence[str]) -> list[str]:
    """The settings that name the parts."""
    if to == "npy":
        return [f"data.path={DEST}", *([] if "val" in splits else ["data.val=null"])]
    ending = ENDINGS.get(to, "")
    alone = ["data.val=null", "data.train.val_fraction=0"]
    own = [f"data.train.val_path={DEST}/val{ending}"] if "val" in splits else alone
    return [f"data.path={DEST}/train{ending}", *own]


def node_of(to: str, train: Mapping[str, Any], dest: str, split: str) -> dict[str, Any]:
    """The node of a part other than `train`. train: the node data.train of these settings."""
    if to == "npy":
        return {**train, "split": split}
    kept = {name: value for name, value in train.items() if name not in OF_HELD_OUT_DATA}
    return {**kept, "split": split, f"{split}_path": f"{dest}/{split}{ENDINGS.get(to, '')}"}


def _classes(samples: Samples) -> list[str]:
    """For formats that do not keep how many there are."""
    return [] if samples.num_classes is None else [f"data.num_classes={samples.num_classes}"]


def _array_settings(to: str, layout: SampleLayout) -> list[str]:
    if layout.target is None:
        return ["data.train.target=null"]
    wide = to == "hdf5" and layout.target.single and layout.target.dtype == "float64"
    return ["data.train.target_dtype=float64"] if wide else []


def _parquet_settings(tables: Tables, samples: Samples) -> list[str]:
    inputs, target = tables.layout.inputs, tables.layout.target
    if samples.pictures:
        settings = _picture_settings(samples)
    else:
        dtype = _input_dtype(tables)
        settings = [f"data.train.dtype={dtype}"] if dtype != "float32" else []
        if not tables.layout.named and len(inputs[0].shape) > 1:
            settings.append(f"data.shape={_listed(inputs[0].shape)}")
    if target is None:
        return [*settings, "data.train.target=none"]
    if sum(leaf.name.lower() in TARGET_KEYS for leaf in tables.layout.leaves) != 1:
        settings.append(f"data.train.target={target.name}")
    wide = target.single and target.dtype == "float64"
    return [*settings, "data.train.target_dtype=float64"] if wide else settings


def _input_dtype(tables: Tables) -> str:
    """The widest real type, or that of whole numbers if there is no other."""
    target = tables.layout.target
    leaves = [*tables.layout.inputs]
    if target is not None and not target.single:  # read in the type of the inputs
        leaves.append(target)
    if any(leaf.dtype == "float64" for leaf in leaves):
        return "float64"
    if all(leaf.dtype == "uint8" for leaf in leaves):
        return "uint8"
    return "int64" if all(leaf.single and leaf.dtype.kind in "iu" for leaf in leaves) else "float32"


def _picture_settings(samples: Samples) -> list[str]:
    """Pictures are decoded when they are read, as the source decodes them."""
    form = samples.source.form
    settings = [f"data.shape={_listed(form.shape)}" if form.shape is not None else "data.shape=null"]
    settings += [f"data.train.dtype={form.dtype}"] if form.dtype != "float32" else []
    settings += [f"data.train.fit={form.fit}"] if form.fit != "crop" else []
    return settings + ([] if form.draft else ["data.train.draft=false"])


def _listed(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
