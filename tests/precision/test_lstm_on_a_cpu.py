"""LSTMs in short types on a CPU are trained, or refused in one line before the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from things import supports_lstm

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
TEXT = ("data=text", "data.train.block_size=16", "data.train.max_bytes=20000", "model=lstm", "model.width=8",
        "task=language_modeling", "trainer.max_steps=2", "trainer.limit_val_batches=1", "monitor=none",
        "parallel.accelerator=cpu")  # fmt: skip


@pytest.mark.parametrize(("mode", "isa"), [("16-mixed", "DEFAULT"), ("bf16-mixed", "AVX2")])
def test_an_lstm_in_a_short_type_is_trained_or_refused_in_one_line(
    tmp_path: Path, mode: str, isa: str
) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT), "ONEDNN_MAX_CPU_ISA": isa}
    environ |= {"ATEN_CPU_CAPABILITY": "avx2"} if isa == "AVX2" else {}
    done = subprocess.run(
        [sys.executable, "-m", "trainrun", *TEXT, f"precision={mode}", f"output_dir={tmp_path / 'run'}"],
        capture_output=True, text=True, check=False, env=environ, cwd=tmp_path,
    )  # fmt: skip
    if isa == "DEFAULT" and supports_lstm(torch.float16 if mode == "16-mixed" else torch.bfloat16):
        assert done.returncode == 0, done.stderr
        return
    message = f"precision={mode}: torch has no kernel that trains a layer"
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "32-true" in done.stderr
    assert "Traceback" not in done.stderr
