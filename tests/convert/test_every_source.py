"""Every source to every format: each sample is what it was, and a run takes the printed words."""

from __future__ import annotations

import io
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
from rich.console import Console

from trainrun.cli.main import main
from trainrun.convert.part_samples import Samples
from trainrun.convert.usage import target_of
from trainrun.convert.write import write_parts


def refused(kind: str, to: str) -> str:
    """Why a format cannot keep a source; empty where it can."""
    if to in ("npy", "hdf5") and kind in LENGTHS_DIFFER:
        return "the lengths of"
    if to in ("npy", "hdf5") and kind == "parquet_inputs_by_name":
        return "its samples are dicts"
    return ""


ALIKE = ("npy", "hdf5", "lmdb", "webdataset")  # these share most of their code with others
EVERY_FORMAT = ("pictures", "npz", "text_lines")


@pytest.mark.parametrize(
    ("kind", "to"),
    [(kind, to) for kind in SOURCES for to in FORMATS if kind in EVERY_FORMAT or to not in ALIKE],
)
def test_each_sample_is_what_it_was(kind: str, to: str, workdir: Path, capsys: pytest.CaptureFixture[str]):
    words = SOURCES[kind](workdir)
    source, *settings = words
    code = convert(source, "out", "--to", to, "--num-workers", "0", *settings)
    out, err = capsys.readouterr()
    if why := refused(kind, to):
        assert code == 2
        assert why in err
        assert not [path for path in Path("out").rglob("*") if path.name != "convert.json"]
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


@pytest.mark.parametrize("to", ["parquet", "webdataset"])
def test_pictures_keep_the_bytes_of_their_files(to: str, workdir: Path):
    source, *settings = SOURCES["pictures"](workdir)
    assert convert(source, "out", "--to", to, "data.val=null", *settings) == 0
    (shard,) = Path("out/train").glob("train-*")
    content = shard.read_bytes()
    kept = [path.read_bytes() in content for path in sorted(Path("pics").glob("*/*"))]
    assert sum(kept) == 22, "24 less the 2 that are held out"


@pytest.mark.parametrize("to", ["npy", "lmdb", "tfrecord"])
def test_equal_inputs_give_equal_bytes(to: str, workdir: Path):
    """By one process and by several, which divide the work anew each time."""
    source, *settings = SOURCES["digits"](workdir)
    shards = ["--shard-size", "50"] if to == "tfrecord" else []
    for dest, workers in (("a", "0"), ("b", "3")):
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
    assert lines[-2].endswith("32 samples read back are the same")
    assert lines[-1] == "use it with: data=arrays data.path=out data.num_classes=10"
    assert len(lines) == 4
    assert "\x1b" not in done.stdout


def test_a_bar_on_a_terminal_alone(workdir: Path):
    samples = Samples((np.zeros((20, 3)),), "data.train")
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
        target, _ = target_of("tfrecord", workdir / str(is_terminal), "train", samples, 5)
        write_parts(workdir, {"train": target}, {"train": samples}, 0, console, lambda line: None)
        assert ("20/20" in console.file.getvalue()) is is_terminal
