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

TWO_RUNS = """
import sys
import trainrun
words = ("trainer.max_steps=2", "trainer.limit_val_batches=1", "monitor.plots=false")
run = trainrun.train(*words, "output_dir=plain", "optimizer=adamw")
import torch
from trainrun.optimizer.plain_step import MARK, list_wrapped_functions
print(run.status["step"], *(name in sys.modules for name in ("torch._dynamo", "torch._inductor", "sympy")))
names = {function.__name__ for function in list_wrapped_functions()}
print("add_param_group" in names, any(hasattr(function, MARK) for function in list_wrapped_functions()))
run = trainrun.train(*words, "output_dir=compiled", "trainer.compile={scope: model, backend: eager}")
print("compiled", run.status["step"], "torch._dynamo" in sys.modules)
"""


def test_run_loads_the_compiler_only_if_it_compiles(tmp_path: Path) -> None:
    """In a fresh interpreter: a plain run leaves torch's optimizers as they were, and a later run can compile."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO_RUNS]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert "2 False False False" in lines
    assert "True False" in lines  # the methods would ask dynamo again, and carry no mark of ours
    assert "compiled 2 True" in lines


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
