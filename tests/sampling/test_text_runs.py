"""Whole runs that learn to write: a tokenizer trained for them, samples while they learn, and `trainrun sample`."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from approved import approve, refused
from quiet_runs import QUIET, losses, train, weights

import trainrun as package
from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.plots.page import text_samples_table

pytestmark = pytest.mark.train

TEXT = ("data=text", "data.path=book.txt", "task=language_modeling", "data.train.block_size=16",
        "data.train.cache_dir=cache", "data.batch_size=8")  # fmt: skip
GPT = (*TEXT, "model=gpt", "model.layers=1", "model.width=16", "model.heads=2", "model.context=32", *QUIET)
BPE = (*GPT, "data.tokenizer=bpe:280")

LSTM = (*TEXT, "model=lstm", "model.width=16", *QUIET)


@pytest.fixture
def book(workdir: Path) -> Path:
    words = random.Random(0).choices(["the", "fox", "jumps", "übers", "lazy", "dog"], k=3000)
    lines = [" ".join(words[i : i + 8]) for i in range(0, len(words), 8)]
    (workdir / "book.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return workdir


def samples_of(folder: str) -> list[dict[str, object]]:
    rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["kind"] == "sample"]


def test_samples_change_no_bit_and_come_again_after_a_resume(book: Path) -> None:
    plain = train("plain", 12, *BPE, "model.dropout=0.1")
    whole = train("whole", 12, *BPE, "model.dropout=0.1", "monitor.samples_every=4step")
    assert losses(plain) == losses(whole)
    halved = train("halved", 6, *BPE, "model.dropout=0.1", "monitor.samples_every=4step")
    (book / "cache").rename(book / "gone")  # a resume has its own tokenizer
    assert main(["resume", halved, "trainer.max_steps=12"]) == 0
    told = [[(row["step"], row["prompt"], row["text"]) for row in samples_of(run)] for run in (whole, halved)]
    assert told[0] == told[1]
    assert [step for step, _, _ in told[0]] == [4, 4, 8, 8, 12, 12]
    for one, other in zip(weights(whole).values(), weights(halved).values(), strict=True):
        assert torch.equal(one, other)


def test_epochs_are_counted_and_without_validation_it_begins_with_a_line(book: Path) -> None:
    words = ("trainer.max_epochs=2", "trainer.limit_train_batches=3", "monitor.samples_every=2epoch")
    package.train(*GPT, *words, "output_dir=run", "data.val=null")
    ((row),) = samples_of("run")
    assert row["step"] == 6
    assert row["prompt"] == "\n"
    page = text_samples_table(
        [{"step": 5, "prompt": "<a>", "text": "b\n"}, {"step": 6, "prompt": "c", "text": "d"}]
    )
    assert page.index("step 6") < page.index('<td class="text"><b>&lt;a&gt;</b>b\n</td>')


def test_a_text_that_gives_fewer_tokens_is_told(book: Path) -> None:
    log = Path(train("run", 1, *GPT, "data.tokenizer=bpe:5000")) / "run.log"
    assert "data.train.tokenizer=bpe:5000: the text gives 2" in log.read_text(encoding="utf-8")


def test_what_a_run_was_trained_with_is_used_and_nothing_else(
    book: Path, capsys: pytest.CaptureFixture[str], refuses: Callable[..., None]
) -> None:
    run = Path(train("run", 4, *BPE))
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    first = capsys.readouterr().out
    shutil.rmtree("cache")
    assert main(["evaluate", str(run)]) == 0
    assert capsys.readouterr().out == first
    tuned = train("tuned", 2, *BPE, f"init_from={run}", "data.train.max_bytes=9000")
    assert (Path(tuned) / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    text = (run / "tokenizer.json").read_text(encoding="utf-8")
    (run / "tokenizer.json").write_text(text.replace("fox", "fix"), encoding="utf-8")
    assert main(["sample", str(run)]) == 2
    refuses(["evaluate", str(run)], "differs from the file of the training")
    (run / "tokenizer.json").unlink()
    refuses(["resume", str(run), "trainer.max_steps=6"], "is missing")


@pytest.mark.parametrize("words", [GPT, BPE, LSTM], ids=["gpt", "bpe", "lstm"])
def test_the_command_writes_the_same_with_and_without_cache(
    book: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    run = train("run", 4, *words, "parallel.accelerator=cpu")
    capsys.readouterr()
    told = []
    for more in ([], ["--no-cache"], ["--seed=1"]):
        assert main(["sample", run, "--prompt", "the fox", "--max-tokens=40", *more]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]
    assert told[0].startswith("the fox")


def test_a_model_that_cannot_write_ends_no_run(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (book / "own.py").write_text(
        "from trainrun.model.lstm import Lstm\nfrom torch import nn\n\n\nclass Own(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.lstm = Lstm(256, width=8)\n\n"
        "    def forward(self, x):\n        out = self.lstm(x)\n"
        "        return out if self.training else out * float('nan')\n"
    )
    run = train("run", 4, *TEXT, "model=own.Own", "monitor.samples_every=2step", "data.val=null", *QUIET)
    assert not samples_of(run)
    told = (Path(run) / "run.log").read_text(encoding="utf-8")
    assert told.count("monitor.samples_every: no sample at step") == 2
    assert main(["sample", run, "--prompt=a"]) == 1
    assert "not finite; take an earlier checkpoint (--which)" in capsys.readouterr().err


def test_lines_end_with_a_line(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in GPT if not word.startswith("data.train.block_size")]
    run = train("run", 3, *words, "data.train.kind=lines", "model.context=64", "monitor.samples_every=1step")
    assert not any("\n" in str(row["text"]) for row in samples_of(run))
    capsys.readouterr()
    assert main(["sample", run, "--prompt=the", "--max-tokens=2000", "--temperature=1.5"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert main(["sample", run]) == 2  # none begins with a newline
    assert "--prompt: this run learned from data.train.kind=lines" in capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", ["null", "bpe:280"])
def test_a_sequence_vae_shows_lines_beside_what_their_codes_become(book: Path, tokenizer: str) -> None:
    words = (
        *TEXT[:2],
        "data.train.kind=lines",
        "data.batch_size=8",
        "model=sequence_vae",
        "task=vae",
        *QUIET,
    )
    more = (
        "model.latent_dim=8",
        "model.width=16",
        f"data.tokenizer={tokenizer}",
        "data.train.cache_dir=cache",
    )
    shown = train("shown", 6, *words, *more, "monitor.samples_every=3step")
    assert losses(shown) == losses(train("plain", 6, *words, *more))
    rows = samples_of(shown)
    assert [row["step"] for row in rows] == [3] * 4 + [6] * 4
    lines = (book / "book.txt").read_text(encoding="utf-8").splitlines()
    assert all(str(row["original"]).strip() in lines for row in rows)
    assert all(isinstance(row["rebuilt"], str) for row in rows)
    page = text_samples_table([{"step": 3, "original": "<b>&", "rebuilt": "<script>"}])
    assert "<b>&lt;b&gt;&amp;</b><br>&lt;script&gt;</td>" in page


@pytest.mark.parametrize("words", [["--top-k=0"], ["--temperature=-1"], ["--max-tokens=0"], []])
def test_wrong_uses_are_one_line(workdir: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    run = train("run", 1, *QUIET)
    capsys.readouterr()
    assert main(["sample", run, *words]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len([line for line in shown if not line.startswith("note:")]) == 1
    approve(shown[-1])


def test_samples_of_what_writes_no_text_are_refused(workdir: Path) -> None:
    with refused(ConfigError, "monitor.samples_every", "task._target_"):
        package.train(*QUIET, "monitor.samples_every=1epoch", "output_dir=run")
