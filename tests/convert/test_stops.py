"""A kill, a full disk, a broken sample, two at once: nothing half under a final name, the same bytes in the end."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from convert_kit import FORMATS, convert, sources_of, use_of
from faults.forks import ForkedCommand

from trainrun.convert import output_formats, split_samples
from trainrun.errors import ConfigError

pytestmark = pytest.mark.process

SLOW = ["data.train._target_=own_sources.Points", "data.train.count=120"]


def contents(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def some_units_done(to: str, dest: str) -> bool:
    if to == "lmdb":
        return Path(dest, ".train.lmdb.tmp").is_file()
    if to == "npy":
        return Path(dest, ".x_train.npy.tmp").is_file()
    return len(list(Path(dest).glob("train/train-*"))) >= 3


@pytest.mark.parametrize(
    ("to", "how"), [*((to, signal.SIGKILL) for to in ("npy", "parquet", "lmdb")), ("npy", signal.SIGINT)]
)
def test_stopped_and_run_again_gives_the_same_bytes(
    to: str, how: int, workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    shards = ["--shard-size", "10"] if to not in ("npy", "hdf5", "lmdb") else []
    words = ["custom", "out", "--to", to, *shards, *SLOW, "data.train.delay=0.02"]
    monkeypatch.setattr(split_samples, "MAX_BLOCK", 5)
    monkeypatch.setattr(output_formats, "BATCH_SAMPLES", 5)
    Path("slow").touch()
    process = ForkedCommand("convert", *words)
    deadline = time.monotonic() + 300
    while not some_units_done(to, "out"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, how)
    _, err = process.communicate(timeout=30)
    assert process.returncode == (-how if how == signal.SIGKILL else 130), err
    if how == signal.SIGINT:
        assert "run the same command again" in err
    Path("slow").unlink()
    assert '"complete": false' in Path("out/convert.json").read_text()
    before = {path: path.stat().st_ino for path in Path("out").rglob("train-*") if path.is_file()}
    assert convert(*words) == 0
    assert ("of them were there already" in capsys.readouterr().out) == (to == "parquet")
    assert before.items() <= {path: path.stat().st_ino for path in Path("out").rglob("train-*")}.items()
    assert convert("custom", "whole", *words[2:]) == 0
    assert contents("out") == contents("whole")


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk(to: str, workdir: Path, capsys: pytest.CaptureFixture[str]):
    np.savez("a.npz", x_train=np.random.default_rng(0).standard_normal((400, 500)), x_val=np.zeros((4, 500)))
    shards = ["--shard-size", "100"] if to not in ("npy", "hdf5", "lmdb") else []
    words = ["a.npz", "out", "--to", to, *shards, "data.train.target=null"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        code = convert(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("trainrun: out: no room is left ("), err
    assert {path.name for path in Path("out").rglob("*") if path.is_file()} <= {"convert.json"}
    assert convert(*words) == 0
    after = sources_of(use_of(capsys.readouterr().out))["train"]
    assert len(after) == 400


@pytest.mark.parametrize("to", ["npy", "parquet", "webdataset"])
def test_a_broken_sample_is_named(to: str, workdir: Path, capsys: pytest.CaptureFixture[str]):
    shards = ["--shard-size", "10"] if to not in ("npy", "hdf5", "lmdb") else []
    words = [*SLOW, "data.train.bad=77"]
    assert convert("custom", "out", "--to", to, *shards, *words) == 2
    err = capsys.readouterr().err
    assert "data.train: sample 77 of Points cannot be read: ValueError: this one is broken" in err
    assert "own_sources.py line" in err
    assert not [path for path in Path("out").rglob("*") if path.suffix in (".npy", ".h5", ".lmdb")]


@pytest.mark.parametrize("to", ["npy", "parquet", "webdataset"])
def test_a_sample_of_another_shape_is_named(to: str, workdir: Path, capsys: pytest.CaptureFixture[str]):
    words = ["data.train._target_=own_sources.Uneven", "data.train.count=100", "data.train.bad=50"]
    code = convert("custom", "out", "--to", to, *words)
    if to == "webdataset":
        assert code == 0
        return
    assert code == 2
    assert (
        "data.train: sample 50: x is float32 (2, 5), but float32 (2, 4) in sample 0"
        in capsys.readouterr().err
    )


def test_a_source_that_draws_is_found_out(workdir: Path, capsys: pytest.CaptureFixture[str]):
    words = ["data.train._target_=own_sources.Random", "data.train.count=30"]
    assert convert("custom", "out", "--to", "lmdb", *words) == 2
    assert "is another one whenever it is read" in capsys.readouterr().err
    assert '"complete": false' in Path("out/convert.json").read_text()


def wait_for(path: Path, process: ForkedCommand) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_second_is_told_and_the_first_ends_well(workdir: Path, capsys: pytest.CaptureFixture[str]):
    words = ["custom", "out", "--to", "npy", *SLOW, "data.train.delay=0.05"]
    Path("slow").touch()
    first = ForkedCommand("convert", *words)
    wait_for(Path("out/convert.json"), first)
    os.killpg(first.pid, signal.SIGSTOP)  # it cannot end before
    try:
        assert convert(*words) == ConfigError.exit_code
    finally:
        Path("slow").unlink()
        os.killpg(first.pid, signal.SIGCONT)
    err = capsys.readouterr().err
    assert err.strip().count("\n") == 0
    assert "out: another conversion writes to it; wait until it is done" in err
    out, err = first.communicate(timeout=300)
    assert first.returncode == 0, err
    assert "use it with: " in out
    assert convert(*words) == 0  # finished: the same words say so


def test_a_fault_before_the_first_file_leaves_no_folder(workdir: Path):
    assert convert("custom", "out", "--to", "npy", "data.train._target_=own_sources.NoSuch") != 0
    assert not Path("out").exists()
