"""Every option of every group is built and trains two steps."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import h5py
import lmdb
import numpy
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

import trainrun as package
from trainrun.config.argv import find_conf_dir, list_groups, list_options
from trainrun.data.readers.builtin.fashion_mnist import find_folder
from trainrun.data.readers.records.lmdb_file import build_key
from trainrun.data.readers.records.record import encode_sample
from trainrun.data.readers.records.tfrecord import encode_example, frame_record
from trainrun.errors import DataError

QUIET = ["trainer.max_steps=2", "trainer.limit_val_batches=1"]
EVERY_OPTION = [
    (group, option)
    for group in list_groups([find_conf_dir()])
    for option in list_options(group, [find_conf_dir()])
    if option != "custom"  # test_own_code.py
    and (group, option)
    not in (("parallel", "ddp"), ("parallel", "fsdp"), ("experiment", "lora"))  # in files of their own
]


def csv_words(workdir: Path) -> list[str]:
    rows = "".join(f"{i},{i % 7},{'ab'[i % 2]}\n" for i in range(128))
    (workdir / "table.csv").write_text(f"x,z,kind\n{rows}")
    return ["data.path=table.csv", "data.train.target=kind"]


def parquet_words(workdir: Path) -> list[str]:
    table = pyarrow.table({"x": numpy.arange(128.0), "z": numpy.arange(128) % 7, "label": ["a", "b"] * 64})
    parquet.write_table(table, workdir / "table.parquet", row_group_size=50)
    return ["data.path=table.parquet"]


def hdf5_words(workdir: Path) -> list[str]:
    with h5py.File(workdir / "file.h5", "w") as file:
        file["x"], file["y"] = numpy.ones((128, 4), numpy.float32), numpy.arange(128) % 3
    return ["data.path=file.h5", "data.train.in_memory=false"]


def image_words(workdir: Path) -> list[str]:
    for i in range(100):
        (workdir / "pictures" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 12), (i, 2 * i, 0)).save(workdir / "pictures" / "ab"[i % 2] / f"{i}.jpg")
    return ["data.path=pictures", "data.shape=[3,8,8]"]


def idx_words(workdir: Path) -> list[str]:
    for name, shape in (("train-images-idx3-ubyte", (128, 4, 4)), ("train-labels-idx1-ubyte", (128,))):
        header = bytes((0, 0, 8, len(shape))) + b"".join(size.to_bytes(4, "big") for size in shape)
        content = (numpy.arange(numpy.prod(shape)) % 3).astype(numpy.uint8).tobytes()
        (workdir / name).write_bytes(header + content)
    return ["data.path=."]


def labelled(number: int = 128) -> list[bytes]:
    return [encode_sample((numpy.full(4, i, numpy.float32), i % 3)) for i in range(number)]


def lmdb_words(workdir: Path) -> list[str]:
    with (
        lmdb.open(str(workdir / "a.lmdb"), subdir=False) as environment,
        environment.begin(write=True) as batch,
    ):
        for number, content in enumerate(labelled()):
            batch.put(build_key(number), content)
    return ["data.path=a.lmdb", "data.num_classes=3"]


def tfrecord_words(workdir: Path) -> list[str]:
    records = (frame_record(encode_example({"sample": content})) for content in labelled())
    (workdir / "a.tfrecord").write_bytes(b"".join(records))
    return ["data.path=a.tfrecord", "data.num_classes=3"]


def webdataset_words(workdir: Path) -> list[str]:
    for shard in range(2):
        with tarfile.open(workdir / f"shard-{shard}.tar", "w") as archive:
            for number, content in enumerate(labelled(64)):
                info = tarfile.TarInfo(f"{number:04d}.safetensors")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return ["data.path=shard-{0..1}.tar", "data.num_classes=3"]


def datasets_words(workdir: Path) -> list[str]:
    datasets = pytest.importorskip("datasets", reason="needs the extra datasets")
    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0]] * 128, "y": [i % 3 for i in range(128)]})
    rows.save_to_disk(workdir / "rows")
    return ["data.path=rows", "data.train.columns=[x,y]", "data.num_classes=3"]


def text_words(workdir: Path) -> list[str]:
    (workdir / "next_byte.py").write_text(
        "from torch.nn import Embedding, Linear, Sequential\n"
        "def build(num_classes):\n"
        "    return Sequential(Embedding(num_classes, 8), Linear(8, num_classes))\n"
    )
    model = ["model=custom", "model._target_=next_byte.build", "model.num_classes=256", "task.class_dim=-1"]
    return [*model, "data.train.block_size=16", "data.train.max_bytes=20000", "data.train.cache_dir=cache"]


FORMATS = {
    "lmdb": lmdb_words,
    "tfrecord": tfrecord_words,
    "webdataset": webdataset_words,
    "datasets": datasets_words,
    "text": text_words,
    "csv": csv_words,
    "parquet": parquet_words,
    "hdf5": hdf5_words,
    "image_folder": image_words,
    "idx": idx_words,
}


def segmentation_words(workdir: Path) -> list[str]:
    random = numpy.random.default_rng(0)
    arrays = {f"x_{split}": random.random((64, 1, 8, 8)).astype("float32") for split in ("train", "val")}
    arrays |= {f"y_{split}": random.integers(0, 3, (64, 8, 8)) for split in ("train", "val")}
    numpy.savez(workdir / "maps.npz", **arrays)
    (workdir / "per_pixel.py").write_text(
        "from torch.nn import Conv2d\ndef build(num_classes):\n    return Conv2d(1, num_classes, 3, padding=1)\n"
    )
    own = ["model=custom", "model._target_=per_pixel.build", "model.num_classes=3"]
    return ["data=arrays", "data.path=maps.npz", "data.num_classes=3", *own]


def model_loss_words(workdir: Path) -> list[str]:
    (workdir / "own_loss.py").write_text(
        "import torch\nfrom types import SimpleNamespace\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.Linear(8, 1)\n"
        "    def forward(self, x, labels=None):\n"
        "        loss = torch.nn.functional.mse_loss(self.layer(x)[:, 0], labels)\n"
        "        return SimpleNamespace(loss=loss)\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 64\n"
        "    def __getitem__(self, i):\n"
        "        return {'x': torch.full((8,), i / 64), 'labels': torch.tensor(i / 32)}\n"
    )
    return ["model=custom", "model._target_=own_loss.Net", "data=custom", "data.train._target_=own_loss.Rows",
            "data.val._target_=own_loss.Rows"]  # fmt: skip


OWN = {"segmentation": segmentation_words, "model_loss": model_loss_words}


def needed_words(group: str, option: str, workdir: Path) -> list[str]:
    """What an option cannot do without."""
    if (group, option) == ("task", "regression"):
        return ["data=synthetic", "data.num_classes=null", "data.shape=[8]", "model.num_classes=1"]
    if option == "multilabel":
        random = numpy.random.default_rng(0)
        arrays = {f"x_{split}": random.random((64, 8)) for split in ("train", "val")}
        arrays |= {
            f"y_{split}": (random.random((64, 3)) > 0.5).astype("float32") for split in ("train", "val")
        }
        numpy.savez(workdir / "labels.npz", **arrays)
        return ["data=arrays", "data.path=labels.npz", "model.num_classes=3"]
    if option == "resnet":
        return ["model.width=8"]
    if (group, option) == ("experiment", "text"):
        return ["data.batch_size=2"]
    if option == "sequence_vae":
        return ["data=text", "data.train.max_bytes=100000", "data.train.block_size=16", "task=vae"]
    if option in ("segmentation", "model_loss"):
        return OWN[option](workdir)
    if option == "vae":
        return ["task=vae", "model=vae", "model.hidden=[16]"]
    if option == "distillation":
        return [
            "task.teacher._target_=trainrun.model.mlp.Mlp",
            "+task.teacher.in_shape=[1,8,8]",
            "+task.teacher.num_classes=10",
        ]
    if option in ("gpt", "lstm", "language_modeling"):
        text = ["data=text", "data.train.max_bytes=100000", "data.train.block_size=32"]
        own = {"gpt": ["task=language_modeling"], "lstm": ["task=language_modeling"]}
        return [*text, *own.get(option, ["model=gpt"])]
    if (group, option) == ("data", "arrays"):
        random = numpy.random.default_rng(0)
        arrays = {f"x_{split}": random.random((64, 8)) for split in ("train", "val")}
        arrays |= {f"y_{split}": random.integers(0, 3, 64) for split in ("train", "val")}
        numpy.savez(workdir / "arrays.npz", **arrays)
        return ["data.path=arrays.npz"]
    if group == "data" and option in FORMATS:
        return FORMATS[option](workdir)
    return []


@pytest.mark.usefixtures("drawn")  # of the options of `monitor`
@pytest.mark.parametrize(("group", "option"), EVERY_OPTION, ids=[f"{g}={o}" for g, o in EVERY_OPTION])
def test_every_option_is_built_and_trains(workdir: Path, group: str, option: str) -> None:
    if option == "fashion_mnist":
        try:
            find_folder(None)
        except DataError as error:
            pytest.skip(str(error))
    quiet = QUIET if group == "monitor" else [*QUIET, "monitor.plots=false", "monitor.progress_bar=false"]
    run = package.train(f"{group}={option}", *quiet, *needed_words(group, option, workdir))
    assert run.status["state"] == "done"
    assert run.status["step"] == 2
    assert run.status["reason"] == "trainer.max_steps=2 reached"
