"""What cannot be converted, and where it cannot go: one message, and nothing is touched."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from convert_kit import SOURCES, convert
from hydra.core.override_parser.overrides_parser import OverridesParser

from trainrun.convert import conversion


def test_an_apostrophe_in_the_settings_of_the_test_data_is_read_as_it_is() -> None:
    path = "it's a (1), x"
    word = f"data.test.path={conversion.quote_for_hydra(path)}"
    assert OverridesParser.create().parse_override(word).value() == path


OWN = ["data.train.count=20"]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert convert(*words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.csv", "out", "--to", "npy"], "nowhere.csv: no such place, and no data group of this name"),
        (["a.bin", "out", "--to", "npy"], "a.bin: its ending tells nothing of its kind; say which data group"),
        (["one.npy", "out", "--to", "npy"], "one.npy: a single array; name the folder"),
        (["mixed", "out", "--to", "npy"], "mixed: this folder has files of several kinds (csv, parquet)"),
        (["empty", "out", "--to", "npy"], "empty: this folder has no file of a known kind"),
        (["a.npz", "out", "--to", "npy", "--data", "cvs"], "--data cvs: no such data group; allowed: arrays,"),
        (["a.npz", "out", "--to", "zip"], "invalid choice: 'zip'"),
        (["a.npz", "out"], "--to"),
        (["a.npz", "--to", "npy", "data.shape=[3]"], "DEST is missing before data.shape=[3]"),
        (["a.npz", "out", "--to", "npy", "trainer.max_steps=3"], "trainer.max_steps=3: means nothing to a conversion"),
        (["a.npz", "out", "--to", "npy", "data.batch_size=3"], "data.batch_size=3: means nothing"),
        (["a.npz", "out", "--to", "npy", "--shard-size", "3"], "--shard-size 3: --to npy has one file a split"),
        (["a.npz", "out", "--to", "parquet", "--shard-size", "0"], "--shard-size 0: must be 1 or more"),
        (["a.npz", "a.bin", "--to", "npy"], "a.bin: this is a file; DEST is a folder that does not exist"),
        (["a.npz", "mixed", "--to", "npy"], "mixed: exists and is no conversion of trainrun's (it has a.csv)"),
        (["folder", "folder/out", "--to", "parquet"], "folder/out: lies in SOURCE, which must not change"),
        (["a.npz", "out", "--to", "npy", "data.train.no_such=1"], "no_such"),
        (["digits", "out", "--to", "npy"], "digits: is a data group and a place here; write ./digits for the place"),
        (["none.npz", "out", "--to", "npy"], "data.train: the data set is empty"),
    ],
)  # fmt: skip
def test_words_that_are_refused(
    words: list[str], message: str, workdir: Path, capsys: pytest.CaptureFixture[str]
):
    Path("a.bin").write_bytes(b"?")
    np.save("one.npy", np.zeros(3))
    for name in ("mixed", "empty", "folder", "digits"):
        Path(name).mkdir()
    for name in ("mixed/a.csv", "mixed/b.parquet"):
        Path(name).write_bytes(b"")
    for name in ("x_train", "y_train", "x_val", "y_val"):
        np.save(f"folder/{name}.npy", np.zeros(3))
    np.savez(
        "a.npz", x_train=np.zeros((3, 2)), y_train=np.zeros(3), x_val=np.zeros((3, 2)), y_val=np.zeros(3)
    )
    np.savez(
        "none.npz", x_train=np.zeros((0, 2)), y_train=np.zeros(0), x_val=np.zeros((3, 2)), y_val=np.zeros(3)
    )
    before = sorted(path for path in Path().rglob("*"))
    assert message in refusal(capsys, *words)
    assert sorted(path for path in Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("target", "to", "message"),
    [
        ("Triples", "npy", "data.train: sample 0"),
        ("Triples", "parquet", "data.train: sample 0"),
        ("Dicts", "npy", "data.train"),
        ("Dicts", "parquet", "deep of shape (2, 2)"),
        ("BFloat", "npy", "data.train: sample 0"),
    ],
)
def test_samples_that_do_not_fit(
    target: str, to: str, message: str, workdir: Path, capsys: pytest.CaptureFixture[str]
):
    words = [f"data.train._target_=own_sources.{target}", *OWN]
    error = refusal(capsys, "custom", "out", "--to", to, *words)
    assert message in error
    assert "lmdb" in error
    assert not Path("out").exists()


@pytest.mark.parametrize("to", ["lmdb", "tfrecord", "webdataset"])
@pytest.mark.parametrize("target", ["Triples", "Dicts", "BFloat"])
def test_they_fit_elsewhere(target: str, to: str, workdir: Path):
    assert convert("custom", "out", "--to", to, f"data.train._target_=own_sources.{target}", *OWN) == 0


def test_other_words_or_another_source(workdir: Path, capsys: pytest.CaptureFixture[str]):
    source, *settings = SOURCES["csv"](workdir)
    words = ["out", "--to", "parquet", "--shard-size", "5", *settings]
    assert convert(source, *words) == 0
    kept = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert convert(source, *words) == 0, "the same words again find it complete"
    assert "24 samples" not in capsys.readouterr().err
    assert "out: holds a finished conversion" in refusal(capsys, source, *words, "data.val=null")
    assert "--shard-size=5" in refusal(capsys, source, "out", "--to", "parquet", *settings)
    state = os.stat("t.csv")
    os.utime("t.csv", ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    assert "the source is not what it was when this conversion began" in refusal(capsys, source, *words)
    assert kept == {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def test_data_in_memory_that_has_changed(workdir: Path, capsys: pytest.CaptureFixture[str]):
    """No file is named: the content itself is compared."""
    words = ["out", "--to", "npy", "data.shape=[3]", "data.train.num_samples=50", "data.val.num_samples=8"]
    assert convert("synthetic", *words) == 0
    capsys.readouterr()
    journal = Path("out/convert.json")
    changed = journal.read_text().replace('"identity": "', '"identity": "0')
    journal.write_text(changed)
    assert "the source is not what it was" in refusal(capsys, "synthetic", *words)


def test_a_journal_that_is_none(workdir: Path, capsys: pytest.CaptureFixture[str]):
    Path("out").mkdir()
    Path("out/convert.json").write_text("{")
    assert "its convert.json cannot be read" in refusal(capsys, "digits", "out", "--to", "npy")


def test_an_unfinished_conversion_is_no_source(workdir: Path, capsys: pytest.CaptureFixture[str]):
    assert convert("digits", "out", "--to", "npy") == 0
    journal = Path("out/convert.json")
    journal.write_text(journal.read_text().replace('"complete": true', '"complete": false'))
    assert "is a conversion that is not finished" in refusal(capsys, "out", "two", "--to", "lmdb")
