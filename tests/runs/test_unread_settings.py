"""A setting that is typed and that no code reads is an error; new validation data is always read."""

from __future__ import annotations

import csv
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import trainrun
from trainrun.cli.main import main
from trainrun.config.schema import RunConfig, TrainerConfig
from trainrun.errors import ConfigError

QUIET = (
    "monitor.plots=false",
    "monitor.hardware=false",
    "model=mlp",
    "output_dir=run",
    "trainer.max_epochs=1",
)
TABLE = ("data=csv", "data.path=t.csv", "data.train.target=y", *QUIET)


def write_table(path: str, number: int) -> None:
    draws = np.random.default_rng(number)
    values = draws.random((number, 2)).round(4)
    Path(path).parent.mkdir(exist_ok=True)
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "y"])
        writer.writerows([*row, int(row[0] > row[1])] for row in values.tolist())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_table("t.csv", 60)
    write_table("new.csv", 7)
    write_table("named/train.csv", 50)
    write_table("named/val.csv", 20)
    return tmp_path


def predicted() -> int:
    return len(Path("run/predictions-val.csv").read_text().splitlines()) - 1


def check_new_data() -> None:
    assert main(["predict", "run", "data.train.val_path=new.csv"]) == 0
    assert predicted() == 7
    assert main(["evaluate", "run", "data.train.val_path=new.csv"]) == 0
    assert main(["predict", "run", "data.train.val_path=none.csv"]) == 2
    assert main(["evaluate", "run", "data.train.val_path=none.csv"]) == 2


def test_new_validation_data_after_folds():
    trainrun.train(*TABLE, "data.folds=3", "data.fold=1", "data.train.val_fraction=0")
    assert main(["predict", "run"]) == 0
    assert predicted() == 20
    check_new_data()


def test_new_validation_data_beside_named_sets():
    node = "trainrun.data.readers.tables.csv_files.load"
    sets = [f"data.val.{name}.{word}" for name in ("day", "night")
            for word in (f"_target_={node}", "path=t.csv", "val_path=t.csv", "target=y")]  # fmt: skip
    trainrun.train(*TABLE, "data.val=null", *(f"+{word}" for word in sets))
    check_new_data()


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["data.folds=3", "data.fold=0", "data.train.val_path=new.csv"], "data.train.val_path"),
        (["data.val=null", "data.train.val_path=new.csv"], "data.train.val_path"),
        (["data.train.val_path=new.csv", "data.train.val_fraction=0.3"], "data.train.val_fraction"),
        (["data.path=named", "data.train.val_fraction=0.3"], "data.train.val_fraction"),
        (["data.path=named", "data.train.seed=3"], "data.train.seed"),
        (["data.val=null", "data.train.val_fraction=0", "data.train.seed=3"], "data.train.seed"),
        (["data.val=null", "data.val_transform._target_=torch.nn.Identity"], "data.val_transform._target_"),
        (["data.test_transform._target_=torch.nn.Identity"], "data.test_transform._target_"),
    ],
)
def test_a_setting_that_nothing_reads_is_an_error(words: list[str], key: str):
    typed = [word for word in TABLE if word.partition("=")[0] not in {one.partition("=")[0] for one in words}]
    with pytest.raises(ConfigError) as caught:
        trainrun.train(*typed, *words)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [key]


DIGITS = ("data=digits", "trainer.max_steps=4", *QUIET[:3])


@pytest.mark.parametrize(
    "word",
    [
        "trainer.gradient_clip_algorithm=value",
        "data.max_skipped_fraction=0.3",
        "parallel.bucket_cap_mb=3",
        "parallel.find_unused_parameters=true",
        "trainer.ema.decay=0.9",
        "trainer.early_stopping.patience=3",  # the default
        "trainer.compile.mode=max-autotune",
        "init.strict=false",
        "data.weights=[1,2]",
    ],
)
def test_a_plain_setting_that_nothing_reads_is_an_error(word: str):
    with pytest.raises(ConfigError) as caught:
        trainrun.train(*DIGITS, word)
    assert [fault.partition("=")[0] for fault in caught.value.faults] == [word.partition("=")[0]]


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.gradient_clip_val=1", "trainer.gradient_clip_algorithm=value"],
        ["data.on_error=skip", "data.max_skipped_fraction=0.3"],
        ["trainer.ema=true", "trainer.ema.decay=0.9"],
        ["trainer.ema=false", "trainer.ema.decay=0.9", "trainer.gradient_clip_algorithm=norm"],
        [
            "checkpoint.save_last=false",
            "trainer.stop_grace_seconds=9",
            "user.mine=3",
        ],
        ["monitor.summary=true", "trainer.check_task=false", "run_name=mine"],
        [
            "monitor.tracker=csv",
            "monitor.progress_bar=false",
            "monitor.verbose=false",
        ],
        [
            "precision=auto",
            "data.global_batch_size=64",
            "trainer.watchdog_seconds=100",
            "checkpoint.keep_last=3",
        ],
    ],
)
def test_plain_settings_that_are_read_are_none(words: list[str]):
    assert trainrun.train(*DIGITS, *words).status["state"] == "done"


def test_the_words_of_a_resume_are_read():
    trainrun.train(*DIGITS, "output_dir=run")
    assert main(["resume", "run", "trainer.max_steps=6", "trainer.gradient_clip_algorithm=value"]) == 2
    assert main(["resume", "run", "trainer.max_steps=8"]) == 0


@pytest.mark.process
def test_ranks_read_settings_of_their_own():
    words = ["parallel=ddp", "parallel.devices=2", "parallel.bucket_cap_mb=3", "parallel.timeout_seconds=99"]
    assert main([*DIGITS, "output_dir=run", *words, "monitor.verbose=false"]) == 0
    assert main([*DIGITS, "output_dir=other", *words, "trainer.gradient_clip_algorithm=value"]) == 2


@pytest.mark.parametrize(
    "word", ["trainer.gradient_clip_algorithm=norm", "trainer.gradient_clip_algorithm=value"]
)
def test_reads_are_not_recorded_in_the_steps(word: str):
    with suppress(ConfigError):
        trainrun.train(*DIGITS, word)
    assert "__getattribute__" not in vars(TrainerConfig) | vars(RunConfig)


def test_named_training_sets_are_read():
    node = "trainrun.data.readers.builtin.synthetic.load"
    words = [f"data.{split}._target_={node}" for split in ("train.one", "train.two", "val")]
    words += [f"data.{split}.{word}" for split in ("train.one", "train.two", "val")
              for word in ("split=train", "num_samples=40", "shape=[2]", "num_classes=2")]  # fmt: skip
    run = trainrun.train("data=custom", *words, *QUIET, "data.mix={one: 0.5, two: 0.5}")
    assert run.status["state"] == "done"


@pytest.mark.parametrize(
    "words",
    [
        ["data.train.val_fraction=0.3", "data.train.seed=3"],
        ["data.train.val_path=new.csv", "data.train.val_fraction=0"],
        ["data.train.val_path=null", "data.train.test_path=null"],
        ["data.train.test_path=new.csv"],
        ["data.train.test_path=new.csv", "data.test_transform._target_=torch.nn.Identity"],
        ["data.val=null", "data.test=null"],
        ["data.path=named"],
        ["data.path=named", "data.train.val_path=named/val.csv", "data.val=null"],
        ["data.folds=3", "data.fold=0", "data.train.val_fraction=0"],
        ["data.val.val_path=new.csv", "data.transform._target_=torch.nn.Identity", "data.val_transform=same"],
    ],
)
def test_settings_that_are_read_are_none(words: list[str]):
    typed = [word for word in TABLE if word.partition("=")[0] not in {one.partition("=")[0] for one in words}]
    assert trainrun.train(*typed, *words).status["state"] == "done"
