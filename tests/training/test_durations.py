"""Durations in epochs, samples, tokens and minutes: where they end, also after a resume, and where they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from approved import approve_error
from quiet_runs import QUIET

from trainrun.assemble.run_plan import resolve_interval
from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.limits import EPOCH, Duration
from trainrun.train_state import TrainState
from trainrun.training.triggers import Lengths, RepeatInterval

SHORT = (*QUIET, "monitor.verbose=false", "checkpoint.keep_last=99", "checkpoint.save_top_k=0")
DIGITS = (
    *SHORT,
    "model.hidden=[8]",
    "data.batch_size=100",
)  # 1,438 samples: 15 steps, 38 samples in the last
TEXT = (*SHORT, "data=text", "data.path=text.txt", "model=gpt", "model.layers=1", "model.width=8",
        "model.heads=1", "task=language_modeling", "data.val=null",
        "data.engine=threads")  # fmt: skip


def rows_of(run: str, kind: str) -> list[int]:
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["kind"] == kind]


def saved_steps(run: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(run, "checkpoints").glob("step-*"))


def test_epochs_and_samples_are_the_same_after_a_resume(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*DIGITS, "trainer.val_check_interval=700sample", "checkpoint.every_n_train_steps=1000sample",
             "checkpoint.every_n_epochs=2", "scheduler=cosine", "scheduler.warmup_steps=0.5epoch",
             "monitor.log_every_n_steps=250sample"]  # fmt: skip
    assert main([*words, "trainer.max_duration=2.5epoch", "output_dir=whole"]) == 0
    assert rows_of("whole", "eval") == [7, 14, 22, 29, 37, 38]  # 700, 1,400, 1,438 + 662 ...
    assert saved_steps("whole") == [10, 21, 30, 32, 38]  # 30: the second epoch
    assert rows_of("whole", "train")[:3] == [3, 6, 9]
    assert main([*words, "trainer.max_duration=2.5epoch", "trainer.max_steps=24", "output_dir=parts"]) == 0
    assert main(["resume", "parts", "trainer.max_steps=null"]) == 0
    assert rows_of("parts", "eval") == [7, 14, 22, 24, 29, 37, 38]
    assert saved_steps("parts") == [10, 21, 24, 30, 32, 38]
    status = json.loads(Path("parts", "status.json").read_text())
    assert status["reason"] == "trainer.max_duration=2.5epoch reached"
    assert main(["resume", "parts"]) == 0
    assert "parts: finished already (trainer.max_duration=2.5epoch" in capsys.readouterr().out


def test_whole_epochs_need_no_length() -> None:
    """every_n_epochs=1 is a number of type int, which has no is_integer before Python 3.12."""
    lengths = SimpleNamespace(steps_per_epoch=None, samples_per_epoch=None)
    assert resolve_interval("checkpoint.every_n_epochs=1", Duration(1, EPOCH), lengths, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        resolve_interval("trainer.val_check_interval=0.5", Duration(0.5, EPOCH), lengths, None)  # type: ignore[arg-type]


def test_run_without_known_epoch_length_ends_after_its_epochs() -> None:
    two_epochs = RepeatInterval(2, "epoch", Lengths(steps_per_epoch=None))
    states = [
        TrainState(step=9, epoch=1, batches=4),
        TrainState(step=10, epoch=2),
        TrainState(step=15, epoch=3),
    ]
    assert [two_epochs.is_reached(state) for state in states] == [False, True, True]


@pytest.mark.parametrize(("kind", "last"), [("blocks", 6), ("lines", None)])
def test_tokens_are_counted_as_the_loss_counts_them(workdir: Path, kind: str, last: int | None) -> None:
    """Blocks of 16 tokens, 4 a step; lines have any length, and are padded."""
    Path("text.txt").write_text("".join("ab" * (n % 7 + 1) + "\n" for n in range(400)))
    words = [*TEXT, f"data.train.kind={kind}", "data.batch_size=4", "trainer.max_duration=350token", "output_dir=run",
             "checkpoint.every_n_train_steps=100token", "monitor.log_every_n_steps=1"]  # fmt: skip
    words += ["model.context=16", *(["data.train.block_size=16"] if kind == "blocks" else [])]
    assert main([*words, *(["scheduler=cosine"] if last else [])]) == 0
    rows = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    done = saved_steps("run")[-1]
    assert last is None or (done == last and saved_steps("run") == [2, 4, 5, 6])
    assert (
        json.loads(Path("run", "status.json").read_text())["reason"]
        == "trainer.max_duration=350token reached"
    )
    assert len([row for row in rows if row["kind"] == "train"]) == done


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.max_duration=3"],
        ["trainer.max_duration=1e9token"],
        ["checkpoint.every_n_train_steps=10min"],
        ["checkpoint.every_n_epochs=0"],
        ["monitor.log_every_n_steps=10s"],
        ["scheduler=cosine", "scheduler.warmup_steps=2min"],
        ["trainer.max_epochs=10min"],
        ["trainer.max_time=500ms"],
        ["trainer.val_check_interval=100sample", "trainer.check_val_every_n_epoch=2"],
    ],
)  # fmt: skip
def test_units_that_make_no_sense(
    words: list[str], workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DIGITS, *words]) == 2
    approve_error(capsys.readouterr().err)


def test_ragged_tokens_have_no_known_end(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("ab\nabab\n" * 40)
    words = [*TEXT, "data.train.kind=lines", "trainer.max_duration=350token", "scheduler=cosine"]
    assert main(words) == 2
    approve_error(capsys.readouterr().err)
    assert main([*TEXT, "data.train.kind=lines", "scheduler=constant", "scheduler.warmup_steps=50token"]) == 2
    approve_error(capsys.readouterr().err)


def test_validation_by_time(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainrun.training import triggers

    clock: Any = type("Clock", (), {"now": 0.0})
    monkeypatch.setattr(triggers.time, "monotonic", lambda: clock.now)
    advance = triggers.Triggers.validation_request

    def later(self: Any) -> bool:
        clock.now += 20
        return advance(self)

    monkeypatch.setattr(triggers.Triggers, "validation_request", later)
    assert main([*DIGITS, "trainer.max_steps=10", "trainer.val_check_interval=1min", "output_dir=run"]) == 0
    assert rows_of("run", "eval") == [3, 6, 9, 10]


def test_a_duration_in_time_is_named_at_the_end(workdir: Path) -> None:
    words = [
        *DIGITS,
        "trainer.max_epochs=null",
        "trainer.max_duration=0.2s",
        "trainer.max_time=1h",
        "output_dir=run",
    ]
    assert main(words) == 0
    reason = json.loads(Path("run", "status.json").read_text())["reason"]
    assert reason == "trainer.max_duration=0.2s reached"
