"""`--to parquet`: an array is a list of fixed length in one column, a sequence a list, a picture `{bytes, path}`.

The schema names the classes as Hugging Face `datasets` reads and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.data.convert.files import whole_file
from trainrun.data.convert.layout import Layout, Leaf, fitting, layout_of
from trainrun.data.convert.samples import Samples, array_of
from trainrun.data.convert.target import Tick, Unit
from trainrun.data.readers.tables.parquet_columns import pyarrow
from trainrun.errors import DataError

GROUP_BYTES = 2**20  # of a row group, which is decoded as a whole for each sample that is not in memory
MOST_ROWS = 4096
MOST_TARGETS = 64  # numbers of a target that stand in columns of their own
WAY = "; lmdb, tfrecord and webdataset take every sample"


@dataclass(frozen=True)
class Tables:
    """rows: of a row group. targets: names of the target's columns. names: of the classes."""

    layout: Layout
    rows: int
    targets: tuple[str, ...]
    names: tuple[str, ...] = ()

    def write(self, path: Path, samples: Samples, unit: Unit, tick: Tick) -> None:
        """One shard."""
        parquet, schema = pyarrow("pyarrow.parquet"), self._schema()
        with whole_file(path) as file:
            writer = parquet.ParquetWriter(
                file, schema, compression=self._packing(), write_page_checksum=True, store_schema=True
            )
            try:
                for start, rows in self._groups(samples, unit, tick):
                    columns = self._columns(samples, start, rows)
                    writer.write_table(pyarrow().table(columns, schema=schema), row_group_size=self.rows)
            finally:
                writer.close()

    def _packing(self) -> str:
        """Pictures are packed already."""
        return "none" if any(leaf.form == "picture" for leaf in self.layout.leaves) else "snappy"

    def _groups(self, samples: Samples, unit: Unit, tick: Tick) -> Iterator[tuple[int, list[Any]]]:
        """Rows of a row group each, and the number of the first of them."""
        for begin in range(unit.begin, unit.end, self.rows):
            end = min(begin + self.rows, unit.end)
            rows: list[Any] = []
            if samples.pictures:
                for number in range(begin, end):
                    target = array_of(samples.source.target(number))
                    rows.append([_picture(samples, number), target])
                    tick(1)
            else:
                for start, block in samples.blocks(begin, end):
                    rows += [
                        fitting(samples, start + i, sample, self.layout) for i, sample in enumerate(block)
                    ]
                    tick(len(block))
            yield begin, rows

    def _columns(self, samples: Samples, start: int, rows: list[Any]) -> list[Any]:
        columns = []
        for leaf, cells in zip(self.layout.leaves, zip(*rows, strict=True), strict=True):
            if leaf is self.layout.target and len(self.targets) > 1:
                table = np.stack(cells)
                columns += [pyarrow().array(np.ascontiguousarray(table[:, i])) for i in range(table.shape[1])]
            else:
                columns.append(_column(leaf, cells))
        return columns

    def _schema(self) -> Any:
        arrow, fields, features = pyarrow(), [], {}
        for leaf in self.layout.leaves:
            several = leaf is self.layout.target and len(self.targets) > 1
            for name in self.targets if several else (leaf.name,):
                plain = Leaf(name, "array", leaf.dtype) if several else leaf
                fields.append(arrow.field(name, _type(plain), nullable=False))
                features[name] = _feature(plain, self.names if leaf is self.layout.target else ())
        noted = json.dumps({"info": {"features": features}}).encode()
        return arrow.schema(fields, metadata={b"huggingface": noted})


def tables_of(samples: Samples) -> Tables:
    """DataError: what samples consist of does not fit into columns."""
    layout = layout_of(samples, "parquet")
    if layout.named:
        _check_dict(samples, layout)
    goal, targets = layout.target, ()  # type: tuple[Leaf | None, tuple[str, ...]]
    if goal is not None:
        if len(goal.shape) > 1:
            raise DataError(f"{samples.key}: a target of shape {goal.shape} does not fit into a column{WAY}")
        if goal.name in [leaf.name for leaf in layout.inputs]:
            raise DataError(f"{samples.key}: inputs have the name {goal.name!r} of the target{WAY}")
        targets = (goal.name,)
        if goal.numpy.kind == "f" and goal.form == "array" and 1 < goal.size <= MOST_TARGETS:
            targets = tuple(f"{goal.name}{number}" for number in range(goal.size))
    whole = goal is not None and goal.shape == () and goal.numpy.kind in "iu"
    rows = max(1, min(MOST_ROWS, GROUP_BYTES // samples.sample_bytes))
    return Tables(layout, rows, targets, samples.class_names if whole else ())


def _check_dict(samples: Samples, layout: Layout) -> None:
    """A dict comes back as one where it has a sequence, and nothing that would need a shape."""
    deep = [leaf for leaf in layout.inputs if len(leaf.shape) > 1]
    if deep:
        raise DataError(
            f"{samples.key}: {deep[0].name} of shape {deep[0].shape} in a dict does not fit into a column{WAY}"
        )
    if len(layout.inputs) == 1 or all(leaf.shape == () for leaf in layout.inputs):
        raise DataError(
            f"{samples.key}: a dict of one array, or of numbers alone, would not come back as one{WAY}"
        )


def _picture(samples: Samples, number: int) -> dict[str, Any]:
    content, ending = samples.picture(number)
    return {"bytes": content, "path": f"{number:08d}.{ending}"}


def _column(leaf: Leaf, cells: tuple[Any, ...]) -> Any:
    arrow = pyarrow()
    if leaf.form == "picture":
        return arrow.array(cells, _type(leaf))
    values = np.concatenate([np.ravel(cell) for cell in cells])
    if leaf.dtype == "float16":
        values = values.astype(np.float32)
    flat = arrow.array(values)
    if leaf.form == "sequence":
        ends = np.cumsum([0, *map(len, cells)])
        return arrow.LargeListArray.from_arrays(arrow.array(ends, arrow.int64()), flat)
    return flat if leaf.single else arrow.FixedSizeListArray.from_arrays(flat, leaf.size)


def _type(leaf: Leaf) -> Any:
    arrow = pyarrow()
    if leaf.form == "picture":
        return arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    number = arrow.from_numpy_dtype(np.dtype(np.float32) if leaf.dtype == "float16" else leaf.numpy)
    if leaf.form == "sequence":
        return arrow.large_list(number)
    return number if leaf.single else arrow.list_(number, leaf.size)


def _feature(leaf: Leaf, names: tuple[str, ...]) -> dict[str, Any]:
    """As Hugging Face `datasets` describes a column."""
    if leaf.form == "picture":
        return {"_type": "Image"}
    if names:
        return {"names": list(names), "_type": "ClassLabel"}
    kind = "float32" if leaf.dtype == "float16" else leaf.dtype
    value = {"dtype": kind, "_type": "Value"}
    if leaf.form == "sequence":
        return {"feature": value, "length": -1, "_type": "Sequence"}
    return value if leaf.single else {"feature": value, "length": leaf.size, "_type": "Sequence"}
