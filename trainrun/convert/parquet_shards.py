"""`--to parquet`: an array is a list of fixed length in one column, a sequence a list, a picture `{bytes, path}`.

The schema names classes and pictures as Hugging Face `datasets` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainrun.convert.folder import whole_file
from trainrun.convert.layout import OTHERS, LeafLayout, SampleLayout, layout_of
from trainrun.convert.part_samples import Samples
from trainrun.convert.write import Unit
from trainrun.data.readers.tables.parquet_columns import pyarrow
from trainrun.errors import DataError

GROUP_BYTES = 2**20  # of a row group, which is decoded as a whole for each sample that is not in memory
MOST_ROWS = 4096


@dataclass(frozen=True)
class Tables:
    """layout: a column for each leaf. rows: of a row group. class_names: of the target."""

    layout: SampleLayout
    rows: int
    class_names: tuple[str, ...]

    def write(self, path: Path, samples: Samples, unit: Unit) -> None:
        """One shard."""
        packing = "none" if samples.pictures else "snappy"  # pictures are packed already
        schema = self._schema()
        with (
            whole_file(path) as file,
            pyarrow("pyarrow.parquet").ParquetWriter(
                file, schema, compression=packing, write_page_checksum=True, store_schema=True
            ) as writer,
        ):
            for begin in range(unit.begin, unit.end, self.rows):
                rows = self._rows(samples, begin, min(begin + self.rows, unit.end))
                cells = zip(self.layout.leaves, zip(*rows, strict=True), strict=True)
                table = pyarrow().table([_column(leaf, values) for leaf, values in cells], schema=schema)
                writer.write_table(table, row_group_size=self.rows)

    def _rows(self, samples: Samples, begin: int, end: int) -> Iterator[list[Any]]:
        if samples.pictures:
            for number, ending, content, target in samples.files(begin, end):
                yield [{"bytes": content, "path": f"{number:08d}.{ending}"}, target]
            return
        for number, sample in samples.read(begin, end):
            yield self.layout.values(samples, number, sample)

    def _schema(self) -> Any:
        features: dict[str, Any] = {
            leaf.name: {"_type": "Image"} for leaf in self.layout.leaves if leaf.form == "picture"
        }
        if self.class_names and self.layout.target is not None:
            features[self.layout.target.name] = {"names": list(self.class_names), "_type": "ClassLabel"}
        noted = json.dumps({"info": {"features": features}}).encode()
        fields = [pyarrow().field(leaf.name, _type(leaf), nullable=False) for leaf in self.layout.leaves]
        return pyarrow().schema(fields, metadata={b"huggingface": noted})


def tables_of(samples: Samples) -> Tables:
    """DataError: the samples do not fit into columns."""
    layout = layout_of(samples, "parquet")
    deep = next((leaf for leaf in layout.inputs if layout.named and len(leaf.shape) > 1), None)
    goal = layout.target
    error = ""
    if deep is not None:
        error = f"{deep.name} of shape {deep.shape} in a dict does not fit into a column"
    elif layout.named and (len(layout.inputs) == 1 or all(leaf.shape == () for leaf in layout.inputs)):
        error = "a dict of one array, or of numbers alone, would not come back as one"
    elif goal is not None and len(goal.shape) > 1:
        error = f"a target of shape {goal.shape} does not fit into a column"
    elif goal is not None and goal.name in [leaf.name for leaf in layout.inputs]:
        error = f"inputs have the name {goal.name!r} of the target"
    if error:
        raise DataError(f"{samples.key}: {error}; {OTHERS}")
    classes = samples.class_names if goal is not None and goal.shape == () and goal.dtype.kind in "iu" else ()
    return Tables(layout, max(1, min(MOST_ROWS, GROUP_BYTES // samples.sample_bytes)), classes)


def _column(leaf: LeafLayout, cells: tuple[Any, ...]) -> Any:
    arrow = pyarrow()
    if leaf.form == "picture":
        return arrow.array(cells, _type(leaf))
    values = np.concatenate([np.ravel(cell) for cell in cells])
    flat = arrow.array(values.astype(np.float32) if leaf.dtype == np.float16 else values)
    if leaf.form == "sequence":
        ends = np.cumsum([0, *map(len, cells)])
        return arrow.LargeListArray.from_arrays(arrow.array(ends, arrow.int64()), flat)
    return flat if leaf.single else arrow.FixedSizeListArray.from_arrays(flat, int(np.prod(leaf.shape)))


def _type(leaf: LeafLayout) -> Any:
    arrow = pyarrow()
    if leaf.form == "picture":
        return arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    number = arrow.from_numpy_dtype(np.dtype(np.float32) if leaf.dtype == np.float16 else leaf.dtype)
    if leaf.form == "sequence":
        return arrow.large_list(number)
    return number if leaf.single else arrow.list_(number, int(np.prod(leaf.shape)))
