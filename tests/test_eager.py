"""What a run that compiles nothing need not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

RUN = """
import sys
import trainrun
run = trainrun.train("trainer.max_steps=2", "trainer.limit_val_batches=1", "output_dir={out}", {word!r})
import torch
from trainrun.eager import MARK, lazily_disabled
print(run.status["step"], "torch._dynamo" in sys.modules, "torch._inductor" in sys.modules)
if "torch._dynamo" not in sys.modules:
    names = {{function.__name__ for function in lazily_disabled()}}
    print("add_param_group" in names, any(hasattr(function, MARK) for function in lazily_disabled()))
"""


def python(code: str) -> list[str]:
    """The words that a fresh interpreter prints at the end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


def test_a_run_loads_no_compiler_and_leaves_torchs_optimizers_as_they_were(tmp_path: Path) -> None:
    lines = python(RUN.format(out=tmp_path / "run", word="optimizer=adamw"))
    assert "2 False False" in lines
    assert "True False" in lines  # the methods would ask dynamo again, and carry no mark of ours


def test_a_run_that_wants_the_compiler_has_it(tmp_path: Path) -> None:
    lines = python(RUN.format(out=tmp_path / "run", word="trainer.deterministic=true"))
    assert "2 False True" in lines or "2 True True" in lines  # torch loads it to be deterministic
