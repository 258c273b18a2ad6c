"""What a run that compiles nothing need not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainrun.precision.gradients import run_backward

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

RUN = """
import sys
import trainrun
run = trainrun.train("trainer.max_steps=2", "trainer.limit_val_batches=1", "output_dir={out}", {word!r})
import torch
from trainrun.optimizer.plain_step import MARK, lazily_disabled
print(run.status["step"], *(name in sys.modules for name in ("torch._dynamo", "torch._inductor", "sympy")))
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
    assert "2 False False False" in lines
    assert "True False" in lines  # the methods would ask dynamo again, and carry no mark of ours


def test_a_run_that_wants_the_compiler_has_it(tmp_path: Path) -> None:
    lines = python(RUN.format(out=tmp_path / "run", word="trainer.compile={scope: model, backend: eager}"))
    assert any(line.startswith("2 ") and "True" in line for line in lines)


class Own(torch.Tensor):
    """A tensor subclass that notes that it was asked."""

    def backward(self, *args: object, **keywords: object) -> None:
        self.asked = True


def test_the_gradient_is_multiplied_and_subclasses_keep_their_own_backward() -> None:
    weight = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    for number in (1, 2):
        run_backward(weight.pow(2).sum(), torch.tensor(0.25, dtype=torch.float64))
        torch.testing.assert_close(weight.grad, number * 0.5 * weight.detach(), rtol=0, atol=0)
    own = torch.ones(()).as_subclass(Own)
    run_backward(own, torch.ones(()))
    assert own.asked
