"""Language models show useful tokens a second: in the rows, the summary and the screen; others show samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from approved import refused

from trainrun.assemble.assemble import read_task_unit
from trainrun.cli.main import main
from trainrun.data.pipeline import open_batches
from trainrun.data.sequences.collate import TokenCounter
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import PluginError
from trainrun.task.classification import Classification

QUIET = ["monitor.hardware=false", "monitor.progress_bar=false", "checkpoint.enabled=false", "trainer.max_steps=6",
         "monitor.log_every_n_steps=3", "output_dir=run"]  # fmt: skip


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("drawn")
def test_useful_tokens_and_not_padding(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("".join("x" * (1 + i * 7 % 40) + "\n" for i in range(120)))
    words = ["data=text", "data.path=a.txt", "data.train.kind=lines", "model=gpt", "model.width=16", "model.layers=1",
             "model.heads=2", "task=language_modeling", "data.batch_size=8"]  # fmt: skip
    assert main([*words, *QUIET]) == 0
    run = next(Path("run").rglob("metrics.jsonl")).parent
    train = [row for row in rows_of(run) if row["kind"] == "train"]
    assert len(train) == 2
    assert all("tokens_per_second" in row and "samples_per_second" not in row for row in train)
    status = json.loads((run / "status.json").read_text())
    assert status["tokens_per_second"] > 0
    assert status["samples_per_second"] is None
    assert "tokens/s" in capsys.readouterr().out
    assert (run / "plots" / "throughput.png").is_file()
    # 6 steps of 8 lines: 21.5 characters and a newline each on average, and a target for all but the first
    tokens = status["tokens_per_second"] * status["seconds"]
    assert 6 * 8 * 12 < tokens < 6 * 8 * 32


SOURCE = """
import torch

LENGTHS = [1 + i * 7 % 40 for i in range(96)]

class Reviews:
    def __len__(self):
        return 96
    def __getitem__(self, i):
        return torch.arange(LENGTHS[i]) % 11, torch.tensor(i % 2)
"""


@pytest.mark.parametrize("padding", ["bucket"])
def test_beside_samples_where_sequences_are_classified(workdir: Path, padding: str) -> None:
    Path(f"reviews_{padding}.py").write_text(SOURCE)
    words = [f"data.train._target_=reviews_{padding}.Reviews", "data.val=null", "model=lstm", "model.vocab_size=11",
             "model.width=8", "model.outputs=last", "model.num_classes=2", "data.batch_size=8",
             f"data.padding={padding}", "trainer.max_steps=12"]  # fmt: skip
    assert main([*words, *[word for word in QUIET if "max_steps" not in word]]) == 0
    run = next(Path("run").rglob("metrics.jsonl")).parent
    train = [row for row in rows_of(run) if row["kind"] == "train"]
    assert len(train) == 4
    lengths = [1 + i * 7 % 40 for i in range(96)]  # 12 steps of 8: each sample once
    seen = sum(row["tokens_per_second"] / row["samples_per_second"] for row in train) / 4
    assert seen == pytest.approx(sum(lengths) / 96)
    status = json.loads((run / "status.json").read_text())
    assert status["tokens_per_second"] / status["samples_per_second"] == pytest.approx(sum(lengths) / 96)


@pytest.mark.parametrize("padding", ["longest", "max", "bucket", "pack", "token_budget"])
def test_every_mode_counts_what_is_no_padding(padding: str) -> None:
    lengths = [1 + i * 7 % 40 for i in range(60)]
    source = [{"input_ids": torch.arange(length)} for length in lengths]
    tally = TokenCounter()
    stream, _ = open_batches(source, StreamOptions(
        "data.train", training=True, batch_size=4, seed=1, engine="workers", num_workers=0, tally=tally,
        padding=padding, max_tokens=200 if padding == "token_budget" else None,
    ))  # fmt: skip
    assert tally.counts
    for _ in stream.epoch(0):
        pass
    assert tally.take() == sum(lengths)
    assert tally.take() == 0


def test_another_unit_is_refused() -> None:
    class Own(Classification):
        unit = "words"

    with refused(PluginError):
        read_task_unit(Own())
