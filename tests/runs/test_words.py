"""Words of other trainers in whole runs: one batch of everything, the same batches again, the operation of a NaN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from approved import approve_error
from quiet_runs import QUIET

import trainrun as package
from trainrun.cli.main import main

BAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        return y + torch.sqrt(y - y)
"""


def test_fast_dev_run_is_one_batch_of_everything_and_leaves_no_checkpoint(workdir: Path) -> None:
    run = package.train("trainer.fast_dev_run=true", *QUIET)
    assert run.status["step"] == 1
    assert [row["kind"] for row in run.metrics].count("eval") == 1
    assert not list(run.folder.rglob("*.safetensors"))


def test_overfit_batches_are_the_same_in_every_epoch(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    from trainrun.task.classification import Classification

    step = Classification.step

    def noted(self: Classification, model: torch.nn.Module, batch: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append(batch[1].clone())
        return step(self, model, batch)

    monkeypatch.setattr(Classification, "step", noted)
    run = package.train("overfit_batches=3", "trainer.max_epochs=2", *QUIET)
    assert run.status["step"] == 6
    first, second = seen[-6:-3], seen[-3:]
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


def test_detect_anomaly_names_the_operation_and_is_off_again(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad_net.py").write_text(BAD)
    words = ["model=bad_net.Net", "trainer.max_steps=2", *QUIET]
    assert main(words) == 1
    approve_error(capsys.readouterr().err, "trainer.detect_anomaly")
    with pytest.warns(UserWarning, match="Traceback of forward call"):
        assert main([*words, "trainer.detect_anomaly=true"]) == 1
    error = capsys.readouterr().err
    assert "step 1: Function 'AddmmBackward0' returned nan values" in error
    assert "Traceback (most recent call last)" not in error
    assert not torch.is_anomaly_enabled()
