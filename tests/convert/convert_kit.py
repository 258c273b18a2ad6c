"""Small sources of every kind, and reading back what a conversion has written."""

from __future__ import annotations

import shlex
import struct
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainrun.assemble.assemble import build_sources
from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.convert.split_samples import Samples, iterate_sample_leaves

N = 24
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (N, 6, 5), dtype=np.uint8)
VALUES = RNG.standard_normal((N, 3)).astype(np.float32)
LABELS = np.arange(N) % 3


def csv(folder: Path) -> list[str]:
    rows = [f"{a},{b},{c},{['red', 'green', 'blue'][y]}" for (a, b, c), y in zip(VALUES, LABELS, strict=True)]
    (folder / "t.csv").write_text("\n".join(["a,b,c,label", *rows]) + "\n")
    return ["t.csv"]


def csv_regression(folder: Path) -> list[str]:
    rows = [f"{a},{b},{c},{a * 2.5}" for a, b, c in VALUES]
    (folder / "r.csv").write_text("\n".join(["a,b,c,y", *rows]) + "\n")
    return ["r.csv", "data.train.dtype=float64", "data.train.target_dtype=float64"]


def csv_many_targets(folder: Path) -> list[str]:
    csv_regression(folder)
    return ["r.csv", "data.train.inputs=[a]", "data.train.target=[b,c]"]


def parquet_inputs_by_name(folder: Path) -> list[str]:
    tokens = [list(range(i % 5 + 1)) for i in range(N)]
    pq.write_table(pa.table({"tokens": tokens, "age": VALUES[:, 0], "y": LABELS}), folder / "d.parquet")
    return ["d.parquet"]


def pictures(folder: Path) -> list[str]:
    for i in range(N):
        (folder / "pics" / ["cat", "dog"][i % 2]).mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(np.stack([IMAGES[i]] * 3, -1))
        picture.save(folder / "pics" / ["cat", "dog"][i % 2] / f"{i:02}.{'jpg' if i % 3 else 'png'}")
    return ["pics", "data.shape=[3,4,4]"]


def pictures_as_bytes(folder: Path) -> list[str]:
    return [*pictures(folder), "data.train.dtype=uint8", "data.train.fit=stretch", "data.train.draft=false"]


def parquet_pictures(folder: Path) -> list[str]:
    pictures(folder)
    files = [{"bytes": path.read_bytes(), "path": path.name} for path in sorted(folder.glob("pics/*/*"))]
    pq.write_table(pa.table({"image": files, "label": LABELS}), folder / "p.parquet")
    return ["p.parquet", "data.shape=[1,4,4]"]


def hdf5(folder: Path) -> list[str]:
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"], file["y"] = VALUES, LABELS
    return ["a.h5", "data.train.in_memory=false"]


def idx(folder: Path) -> list[str]:
    for name, array in (
        ("train-images-idx3-ubyte", IMAGES),
        ("train-labels-idx1-ubyte", LABELS.astype(np.uint8)),
    ):
        header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
        (folder / "ubytes").mkdir(exist_ok=True)
        (folder / "ubytes" / name).write_bytes(header + array.tobytes())
    return ["ubytes", "data.train.dtype=stored"]


def npz(folder: Path) -> list[str]:
    np.savez(folder / "a.npz", x_train=VALUES, y_train=LABELS, x_val=VALUES[:5], y_val=LABELS[:5],
             x_test=VALUES[5:9], y_test=LABELS[5:9])  # fmt: skip
    return [
        "a.npz",
        "data.test._target_=trainrun.data.readers.arrays.numpy_files.load",
        "data.test.path=a.npz",
    ]


def half_precision(folder: Path) -> list[str]:
    np.savez(folder / "h.npz", x_train=VALUES.astype(np.float16), x_val=VALUES[:5].astype(np.float16))
    return ["h.npz", "data.train.target=null"]


def text_lines(folder: Path) -> list[str]:
    (folder / "b.txt").write_text("".join("word " * (i % 4 + 1) + "\n" for i in range(N)))
    return ["b.txt", "data.train.kind=lines", f"data.train.cache_dir={folder}/tokens"]


def text_blocks(folder: Path) -> list[str]:
    text_lines(folder)
    return ["b.txt", "data.train.block_size=8", f"data.train.cache_dir={folder}/tokens"]


def hugging_face(folder: Path) -> list[str]:
    datasets = pytest.importorskip("datasets", reason="needs the extra datasets")

    table = {"tokens": [list(range(i % 5 + 1)) for i in range(N)], "label": LABELS.tolist()}
    datasets.Dataset.from_dict(table).save_to_disk(str(folder / "hf"))
    return ["hf", "data.train.columns=[tokens,label]"]


def own_map_style(folder: Path) -> list[str]:
    return ["custom", "data.train._target_=own_sources.Points", "data.train.count=24"]


def own_iterable(folder: Path) -> list[str]:
    return ["custom", "data.train._target_=own_sources.Stream", "data.train.count=24"]


def digits(folder: Path) -> list[str]:
    return ["digits", "data.train.val_fraction=0.9"]


SOURCES = {
    maker.__name__: maker
    for maker in (
        csv, csv_regression, csv_many_targets, parquet_inputs_by_name, pictures, pictures_as_bytes,
        parquet_pictures, hdf5, idx, npz, half_precision, text_lines, text_blocks, hugging_face, own_map_style,
        own_iterable, digits,
    )
}  # fmt: skip
FORMATS = ("npy", "hdf5", "parquet", "lmdb", "tfrecord", "webdataset")
LENGTHS_DIFFER = ("text_lines", "hugging_face")


def convert(*words: str) -> int:
    return main(["convert", *words])


def use_of(out: str) -> list[str]:
    """The words after `use it with:`, and those of the test data."""
    lines = [
        line.partition(": ")[2]
        for line in out.splitlines()
        if line.startswith(("use it with:", "with test data:"))
    ]
    return shlex.split(" ".join(lines))


def sources_of(words: list[str]) -> dict[str, Samples]:
    sources, _ = build_sources(compose_run(words).config, [])
    return {name: Samples(source, name) for name, source in sources.items() if source is not None}


def source_words(words: list[str]) -> list[str]:
    """The words with which a run reads a source directly."""
    kinds = {"csv": "csv", "parquet": "parquet", "h5": "hdf5", "npz": "arrays", "txt": "text"}
    folders = {"pics": "image_folder", "ubytes": "idx", "hf": "datasets"}
    source, *rest = words
    kind = folders.get(source) or kinds.get(source.rpartition(".")[2])
    return [f"data={kind}", f"data.path={source}", *rest] if kind else [f"data={source}", *rest]


def arrays_in(samples: Samples) -> list[list[np.ndarray]]:
    return [
        [leaf for _, leaf in iterate_sample_leaves(sample)] for sample in samples.read(range(len(samples)))
    ]


def assert_same(source: Samples, found: Samples, exact: bool) -> None:
    """Equal values in every sample; with `exact` of the same types."""
    first, second = arrays_in(source), arrays_in(found)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(a.reshape(b.shape) if a.size == 1 else a, b)
            assert not exact or a.dtype == b.dtype
