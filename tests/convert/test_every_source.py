"""Every source to every format: each sample is what it was, and a run takes the printed words."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from convert_kit import (
    FORMATS,
    LENGTHS_DIFFER,
    SOURCES,
    assert_same,
    convert,
    source_words,
    sources_of,
    use_of,
)
from PIL import Image
from rich.console import Console

from trainrun.cli.main import main
from trainrun.convert import conversion, output_formats
from trainrun.runtime.signals import StopFlag

ARRAYS_ONLY = ("npy", "hdf5")  # formats of arrays of one shape


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library stores a few samples with one call, so that it is called again, and for a shorter rest."""
    monkeypatch.setattr(output_formats, "BATCH_SAMPLES", 7)


def is_refused(kind: str, to: str) -> bool:
    """Whether a format cannot hold a source: of other lengths, dicts, or files that would be decoded to floats."""
    return to in ARRAYS_ONLY and kind in (*LENGTHS_DIFFER, "parquet_inputs_by_name", "pictures")


def written_names(folder: str) -> list[str]:
    return [path.name for path in Path(folder).rglob("*") if path.is_file() and path.name[0] != "."]


ALIKE = ("npy", "hdf5", "lmdb", "webdataset")  # these share most of their code with others
EVERY_FORMAT = ("pictures", "pictures_as_bytes", "npz", "text_lines")


@pytest.mark.parametrize(
    ("kind", "to"),
    [(kind, to) for kind in SOURCES for to in FORMATS if kind in EVERY_FORMAT or to not in ALIKE],
)
def test_each_sample_is_what_it_was(kind: str, to: str, workdir: Path, capsys: pytest.CaptureFixture[str]):
    words = SOURCES[kind](workdir)
    source, *settings = words
    code = convert(source, "out", "--to", to, "--num-workers", "0", *settings)
    out, err = capsys.readouterr()
    if is_refused(kind, to):
        assert code == 2
        assert not [name for name in written_names("out") if name != "convert.json"]
        return
    assert code == 0, err
    before, after = sources_of(source_words(words)), sources_of(use_of(out))
    assert before.keys() == after.keys()
    for name in before:
        assert_same(before[name], after[name], exact=to in ("lmdb", "tfrecord"))
        if to not in ("npy", "hdf5"):
            kept = before[name].class_names if to != "parquet" or kind != "half_precision" else ()
            assert after[name].class_names == kept
    assert not list(Path("out").rglob(".*"))


@pytest.mark.parametrize(("to", "kind"), [("npy", "npz"), ("hdf5", "npz"), ("parquet", "pictures"), ("lmdb", "npz"),
                                          ("tfrecord", "npz"), ("webdataset", "pictures")])  # fmt: skip
def test_a_run_trains_with_the_words(kind: str, to: str, workdir: Path, capsys: pytest.CaptureFixture[str]):
    source, *settings = SOURCES[kind](workdir)
    assert convert(source, "o u,t", "--to", to, "--num-workers", "0", *settings) == 0
    words = use_of(capsys.readouterr().out)
    settings = ["trainer.max_steps=2", "data.batch_size=4", "monitor=fast", "parallel.accelerator=cpu"]
    code = main([*words, *settings, "hydra.run.dir=run"])
    assert code == 0, capsys.readouterr()


def test_what_was_converted_is_a_source(workdir: Path, capsys: pytest.CaptureFixture[str]):
    source, *settings = SOURCES["npz"](workdir)
    assert convert(source, "one", "--to", "parquet", *settings) == 0
    first = sources_of(use_of(capsys.readouterr().out))
    assert convert("one", "two", "--to", "lmdb") == 0
    second = sources_of(use_of(capsys.readouterr().out))
    assert first.keys() == second.keys() == {"train", "val", "test"}
    for name in first:
        assert_same(first[name], second[name], exact=True)


@pytest.mark.parametrize("to", ["parquet", "webdataset", "lmdb", "tfrecord"])
def test_files_of_pictures_stay_as_they_are(to: str, workdir: Path):
    source, *settings = SOURCES["pictures"](workdir)
    assert convert(source, "out", "--to", to, "data.val=null", *settings) == 0
    written = [path for path in Path("out").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in written)
    files = [path.read_bytes() for path in sorted(Path("pics").glob("*/*"))]
    assert sum(file in content for file in files) == 22, "24 less the 2 that are held out"


@pytest.mark.parametrize("to", FORMATS)
def test_pictures_take_no_more_room_than_their_files(to: str, workdir: Path):
    noise = np.random.default_rng(0)
    for name in ("a", "b"):
        Path("pics", name).mkdir(parents=True)
        for i in range(10):
            pixels = noise.integers(0, 256, (128, 128, 3), np.uint8)
            Image.fromarray(pixels).save(f"pics/{name}/{i}.jpg", quality=90)
    size = sum(path.stat().st_size for path in Path("pics").glob("*/*"))
    settings = ["data.train.dtype=uint8"] if to in ARRAYS_ONLY else []
    assert convert("pics", "out", "--to", to, "data.shape=[3,32,32]", *settings) == 0
    assert sum(path.stat().st_size for path in Path("out").rglob("*") if path.is_file()) < 1.4 * size


@pytest.mark.parametrize("to", ["npy", "lmdb", "tfrecord"])
def test_equal_inputs_give_equal_bytes(to: str, workdir: Path):
    """By one process and by several, which divide the work anew each time."""
    source, *settings = SOURCES["digits"](workdir)
    shards = ["--shard-size", "50"] if to == "tfrecord" else []
    for dest, workers in (("a", "0"), ("b", "2")):
        assert convert(source, dest, "--to", to, "--num-workers", workers, *shards, *settings) == 0
    assert contents("a") == contents("b")


def contents(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(
    ("kind", "size", "shards"), [("own_map_style", 1, 24), ("own_map_style", 25, 1), ("own_iterable", 23, 2)]
)
def test_shard_borders(kind: str, size: int, shards: int, workdir: Path, capsys: pytest.CaptureFixture[str]):
    words = SOURCES[kind](workdir)
    source, *settings = words
    assert (
        convert(source, "out", "--to", "tfrecord", "--shard-size", str(size), "--num-workers", "2", *settings)
        == 0
    )
    names = sorted(path.name for path in Path("out/train").glob("*.tfrecord"))
    assert names == [f"train-{i:05d}-of-{shards:05d}.tfrecord" for i in range(shards)]
    after = sources_of(use_of(capsys.readouterr().out))["train"]
    assert_same(sources_of(source_words(words))["train"], after, exact=True)


def test_quiet_lines_where_no_terminal_is(trainrun, workdir: Path):
    done = trainrun("convert", "digits", "out", "--to", "npy", "data.train.val_fraction=0.5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" samples")[0] for line in lines[:2]] == ["train: 899", "val: 898"]
    assert "32 samples" in lines[-2]
    assert lines[-1] == "use it with: data=arrays data.path=out data.num_classes=10"
    assert len(lines) == 4
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(conversion, "Console", partial(Console, force_terminal=is_terminal, width=80))
    assert list(conversion.with_progress(iter(range(20)), "train", 20, 0, StopFlag())) == list(range(20))
    assert ("20/20" in capsys.readouterr().out) is is_terminal
