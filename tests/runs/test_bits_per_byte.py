"""`val/bpb` compares models with different tokenizers: the data say how many bytes a token stands for."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from approved import refused
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import trainrun
from trainrun.cli.main import main
from trainrun.data.facts import find_bytes_per_token
from trainrun.data.readers.text.text import load
from trainrun.errors import ConfigError

VERSES = "In the beginning God created the heaven and the earth.\n" * 60
WORDS = (
    "model=gpt", "model.width=16", "model.layers=1", "model.heads=2", "model.context=16", "task=language_modeling",
    "data.batch_size=16", "trainer.max_epochs=1", "monitor.plots=false", "monitor.hardware=false",
)  # fmt: skip
TEXT = (
    "data=text", "data.path=a.txt", "data.train.block_size=16", "data.val.block_size=16",
    "data.train.cache_dir=kept", "data.val.cache_dir=kept",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(VERSES)
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator([VERSES], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet))
    found.save("tokenizer.json")
    return tmp_path


def evaluated(run: trainrun.Run) -> dict[str, float]:
    return [row for row in run.metrics if row["kind"] == "eval"][-1]


def test_of_tokens_and_of_bytes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [f"data.{split}.tokenizer=tokenizer.json" for split in ("train", "val")]
    for more, tokenizer in (([], None), (named, "tokenizer.json")):
        run = trainrun.train(*WORDS, *TEXT, *more)
        size = load("a.txt", block_size=16, tokenizer=tokenizer, cache_dir="kept")["train"].bytes_per_token
        assert (size == 1) == (tokenizer is None)
        row = evaluated(run)
        assert row["val/bpb"] == pytest.approx(row["val/loss"] / math.log(2) / size)
        assert main(["evaluate", str(run.folder)]) == 0
        assert f"val/bpb {row['val/bpb']:.5g}" in capsys.readouterr().out


def test_of_two_texts_with_other_tokens_there_is_none(folder: Path) -> None:
    (folder / "b.txt").write_text("zyx wvu tsr qpo nml kji hgf edc ba " * 60)
    other = [*WORDS, *TEXT, "data.train.val_path=b.txt", "data.val.val_path=b.txt"]
    assert "val/bpb" in evaluated(trainrun.train(*other))  # of bytes it is known
    named = [f"data.{split}.tokenizer=tokenizer.json" for split in ("train", "val")]
    assert "val/bpb" not in evaluated(trainrun.train(*other, *named))
    with refused(ConfigError, "task.bytes_per_token"):
        trainrun.train(*other, *named, "checkpoint.monitor=val/bpb")


@pytest.mark.parametrize(
    ("said", "expected"),
    [([4.5, None, 4.5], None), ([4, 4.0], 4.0), ([4.5, 4.4], None),
     *(([wrong], None) for wrong in (math.inf, True, -1.0, torch.ones(2), len))],
)  # fmt: skip
def test_what_data_say(said: list[object], expected: float | None) -> None:
    assert find_bytes_per_token([SimpleNamespace(bytes_per_token=one) for one in said]) == expected
    assert find_bytes_per_token([object()]) is None


def test_a_number_of_ones_own_wins(folder: Path) -> None:
    row = evaluated(trainrun.train(*WORDS, *TEXT, "task.bytes_per_token=5"))
    assert row["val/bpb"] == pytest.approx(row["val/loss"] / math.log(2) / 5)
