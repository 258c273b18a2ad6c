"""A small finished run, written the way a run writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainrun.folder.run_folder import RunDir, write_json, write_text
from trainrun.interfaces import RunFacts
from trainrun.monitor.bus import Bus
from trainrun.monitor.metric_rows import MetricsFile

MakeRun = Callable[..., RunDir]


def facts(**changes: Any) -> RunFacts:
    values: dict[str, Any] = {
        "name": "digits-mlp", "folder": "runs/x", "device": "cpu", "world_size": 1, "batch_size": 32,
        "accumulate": 1, "num_train": 1437, "num_val": 360, "steps_per_epoch": 10, "total_steps": 100,
        "total_epochs": 10, "model_summary": "MLP", "num_parameters": 9, "num_trainable": 9,
        "choices": ("data.engine=resident: fits",),
    }  # fmt: skip
    return RunFacts(**values | changes)


def write_run(
    root: Path, name: str = "digits-mlp", lr: float = 0.001, choices: tuple[str, ...] = ()
) -> RunDir:
    run = RunDir(root)
    run.create()
    file = Bus(MetricsFile(run.metrics))
    file.on_start(facts(name=name, choices=choices), 0)
    for step in range(2, 101, 2):
        loss = 1000.0 / step**1.5
        file.on_step(step, step / 10, {
            "train/loss": loss, "train/acc": 1 - 1 / step, "lr": lr, "grad_norm": 0.1,
            "samples_per_second": 6000.0 + step, "step_seconds": 0.005,
        })  # fmt: skip
        if step % 10 == 0:
            file.on_eval(step, step / 10, {"val/loss": loss + 1, "val/acc": 1 - 2 / step, "val/seconds": 0.1})
            file.write({
                "kind": "hardware", "step": step, "time": 1.0, "memory_bytes": 400 * 2**20, "cpu_percent": 99.0,
            })  # fmt: skip
    for seconds in ({"start-up": 2.0}, {"start-up": 2.0, "forward": 3.0, "other": 0.001}):
        file.write({"kind": "ledger", "step": 1, "time": 1.0, "seconds": seconds})
    file.on_note("saved <b>best</b> & last")
    file.write({
        "kind": "confusion", "step": 100, "weights_step": 80, "split": "val",
        "class_names": ["cat", "$dog_"], "matrix": [[5, 1], [0, 4]],
    })  # fmt: skip
    file.on_end({
        "reason": "trainer.max_epochs=10 reached", "monitor": "val/acc", "value": 0.98, "best_step": 100,
        "step": 100, "epoch": 10.0, "seconds": 3.5, "samples_per_second": 6050.0, "metrics": {"val/loss": 2.0},
    })  # fmt: skip
    images = np.arange(3 * 8 * 6, dtype=np.uint8).reshape(3, 1, 8, 6)
    columns = {
        "target": np.array([1, 0, 1]),
        "prediction": np.array([0, 0, 1]),
        "confidence": np.array([0.9, 0.6, 1]),
    }
    about = {"class_names": json.dumps(["cat", "$dog_"]), "num_worst": "2"}
    save_file({"images": images, **columns}, run.samples, metadata=about)
    write_text(run.config, f"run_name: {name}\noptimizer:\n  lr: {lr}\nmonitor:\n  window_size: 5\n")
    write_json(run.environment, {"python": "3.11", "packages": {"torch": "2.8.0"}})
    write_text(run.overrides, "optimizer.lr=<0.001>\n")
    return run


@pytest.fixture(autouse=True)
def _painted(pictures: None) -> None:
    """What is painted is what is tested here."""


@pytest.fixture
def make_run() -> MakeRun:
    return write_run


@pytest.fixture
def open_run(tmp_path: Path) -> tuple[RunDir, Bus]:
    """An empty run folder and the file to write its rows with."""
    run = RunDir(tmp_path / "run")
    run.create()
    file = Bus(MetricsFile(run.metrics))
    file.on_start(facts(), 0)
    return run, file
