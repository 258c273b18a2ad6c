"""`scheduler.interval=epoch`: torch's schedules counted in epochs, as torch itself would step them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from approved import approve_error, refused
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR

from trainrun.cli.main import main
from trainrun.errors import CheckpointError, ConfigError
from trainrun.scheduler.build_schedule import build_schedule
from trainrun.scheduler.curves import cosine

STEPLR = [
    "scheduler=custom", "scheduler._target_=torch.optim.lr_scheduler.StepLR", "scheduler.step_size=2",
    "scheduler.gamma=0.5", "scheduler.interval=epoch",
]  # fmt: skip
WORDS = [
    "model.hidden=[8]", "data.batch_size=64", "trainer.num_threads=1", "optimizer=sgd", "optimizer.lr=0.1",
    "monitor.log_every_n_steps=1", "monitor.progress_bar=false", "monitor.plots=false", "monitor.hardware=false",
]  # fmt: skip


def new_optimizer() -> SGD:
    return SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def rates_of(run: str) -> list[float]:
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [row["lr"] for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("warmup", [0, 5])
def test_it_is_torchs_own_schedule_behind_the_warmup(warmup: int) -> None:
    ours, theirs = new_optimizer(), new_optimizer()
    schedule = build_schedule(ours, StepLR, {"step_size": 2, "gamma": 0.5}, warmup, 40, None, 5, True)
    reference = StepLR(theirs, step_size=2, gamma=0.5)
    for update in range(1, 41):
        ours.step()
        schedule.step()
        if update % 5 == 0:
            schedule.end_epoch()
            if update > warmup:
                theirs.step()
                reference.step()
        if update >= warmup:
            assert schedule.lr == theirs.param_groups[0]["lr"]


def test_the_length_is_filled_in_in_epochs() -> None:
    optimizer = new_optimizer()
    schedule = build_schedule(optimizer, CosineAnnealingLR, {}, 5, 38, None, 5, True)
    for _ in range(7):  # 33 steps are left, the last epoch is short
        for _ in range(6):
            optimizer.step()
            schedule.step()
        schedule.end_epoch()
    assert schedule.lr == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("target", [cosine, None, ReduceLROnPlateau])
def test_what_counts_no_epochs_is_refused(target: object) -> None:
    with refused(ConfigError, "scheduler.interval"):
        build_schedule(new_optimizer(), target, {}, 0, 40, None, 5, True)  # type: ignore[arg-type]


def test_another_interval_than_the_checkpoints_is_refused() -> None:
    words = {"step_size": 2}, 0, 40, None, 5
    saved = build_schedule(new_optimizer(), StepLR, *words, True).state_dict()
    with refused(CheckpointError, "scheduler.interval"):
        build_schedule(new_optimizer(), StepLR, *words, False).load_state_dict(saved)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_run_and_its_resume_in_the_middle_of_an_epoch(workdir: Path, accumulate: int) -> None:
    words = [*WORDS, *STEPLR, f"trainer.accumulate_grad_batches={accumulate}", "trainer.max_epochs=5"]
    assert main([*words, "output_dir=whole"]) == 0
    steps = -(-23 // accumulate)
    per_epoch = [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    done = [step // steps for step in range(5 * steps)]  # epochs done before the update of each row
    assert rates_of("whole") == pytest.approx([per_epoch[epoch] for epoch in done])
    assert main([*words, f"trainer.max_steps={2 * steps + 1}", "output_dir=part"]) == 0
    assert main(["resume", "part", "trainer.max_steps=null"]) == 0
    assert rates_of("part") == rates_of("whole")


@pytest.mark.parametrize(
    "words", [[*STEPLR[:-1], "scheduler.interval=epochs"], [*STEPLR, "loop._target_=math.floor"]]
)
def test_a_wrong_word_is_refused(workdir: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *words]) == 2
    approve_error(capsys.readouterr().err)
