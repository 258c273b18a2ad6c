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
    code = convert(source, "out", "--to", to, *settings)
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
    assert convert(source, "o u,t", "--to", to, *settings) == 0
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


def test_files_of_pictures_stay_as_they_are_from_format_to_format(
    workdir: Path, capsys: pytest.CaptureFixture[str]
):
    noise = np.random.default_rng(0)
    for i in range(20):
        path = Path("pics", "ab"[i % 2], f"{i:02}.{'jpg' if i % 4 else 'png'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (128, 128, 3), np.uint8)).save(path)
    files = [path.read_bytes() for path in Path("pics").glob("*/*")]
    source, settings = "pics", ["data.shape=[3,32,32]", "data.train.val_fraction=0.25"]
    first = sources_of(["data=image_folder", "data.path=pics", *settings])
    for hop, to in enumerate(["webdataset", "lmdb", "tfrecord", "parquet", "webdataset"]):
        dest = f"{hop}-{to}"
        assert convert(source, dest, "--to", to, *settings) == 0
        after = sources_of(use_of(capsys.readouterr().out))
        assert first.keys() == after.keys() == {"train", "val"}
        for name in first:
            assert_same(first[name], after[name], exact=True)
        written = [path.read_bytes() for path in Path(dest).rglob("*") if path.is_file()]
        assert all(any(file in content for content in written) for file in files)
        assert sum(map(len, written)) < 1.3 * sum(map(len, files))
        source, settings = dest, []


@pytest.mark.parametrize("to", ["npy", "hdf5"])
def test_arrays_take_pictures_only_as_pixels_that_are_asked_for(
    to: str, workdir: Path, capsys: pytest.CaptureFixture[str]
):
    source, *settings = SOURCES["pictures"](workdir)
    assert convert(source, "tar", "--to", "webdataset", *settings) == 0
    for pictures in (source, "tar"):
        capsys.readouterr()
        assert convert(pictures, "out", "--to", to, *settings) == 2
        assert "data.train.dtype=uint8" in capsys.readouterr().err
    assert convert("tar", "out", "--to", to, "data.train.dtype=uint8", *settings) == 0


@pytest.mark.parametrize(
    ("kind", "size", "shards"), [("own_map_style", 1, 24), ("own_map_style", 25, 1), ("own_iterable", 23, 2)]
)
def test_shard_borders(kind: str, size: int, shards: int, workdir: Path, capsys: pytest.CaptureFixture[str]):
    words = SOURCES[kind](workdir)
    source, *settings = words
    assert convert(source, "out", "--to", "tfrecord", "--shard-size", str(size), *settings) == 0
    names = sorted(path.name for path in Path("out/train").glob("*.tfrecord"))
    assert names == [f"train-{i:05d}-of-{shards:05d}.tfrecord" for i in range(shards)]
    after = sources_of(use_of(capsys.readouterr().out))["train"]
    assert_same(sources_of(source_words(words))["train"], after, exact=True)


def test_quiet_lines_where_no_terminal_is(workdir: Path, capsys: pytest.CaptureFixture[str]):
    assert convert("digits", "out", "--to", "npy", "data.train.val_fraction=0.5") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.partition(" samples")[0] for line in lines[:2]] == ["train: 899", "val: 898"]
    assert "32 samples" in lines[-2]
    assert lines[-1] == "use it with: data=arrays data.path=out data.num_classes=10"
    assert len(lines) == 4
    assert "\x1b" not in out


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(conversion, "Console", partial(Console, force_terminal=is_terminal, width=80))
    assert list(conversion.show_progress(iter(range(20)), "train", 20, 0, StopFlag())) == list(range(20))
    assert ("20/20" in capsys.readouterr().out) is is_terminal
