"""Optimizers with `train()` and `eval()`, which put other weights into the model for an evaluation (schedule-free).

What: such an optimizer trains at one point and evaluates at another, an average that it keeps itself. Validations and
the weights that are saved for evaluations are those of `eval()`. The weights that training goes on from are kept aside
and put back bit for bit, since `train()` behind `eval()` would round them; checkpoints hold both.
When: the optimizer has both methods and no `trainer.ema` is asked for, which is validated otherwise.
When not: batch norm, whose statistics are those of the training weights.
Source: Defazio et al. 2024, arXiv:2405.15682
Gain: no schedule. Cost: a copy of the weights while a validation is under way, and a second one in each checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class OwnAverage:
    """The weights that optimizers evaluate with; it has the methods of `Ema`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._model, self._optimizers = model, optimizers
        self._weights: dict[Tensor, Tensor] | None = None  # of the training, while the model holds others

    def update(self) -> None:
        """Do nothing: the optimizers update their averages themselves."""

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the weights for evaluation into the model inside the block; restore its own afterwards, bit for bit."""
        if self._weights is not None:
            yield
            return
        try:
            self._enter_model()
            yield
        finally:
            self._leave_model()

    @contextmanager
    def out_of_model(self) -> Iterator[bool]:
        """Put the model's own weights back inside the block, also during an evaluation. Yield whether one is
        running.
        """
        inside = self._weights is not None
        self._leave_model()
        try:
            yield inside
        finally:
            if inside:
                self._enter_model()

    def _enter_model(self) -> None:
        self._weights = {param: param.detach().clone() for param in self._model.parameters()}
        with torch.no_grad():
            for optimizer in self._optimizers:
                optimizer.eval()

    def _leave_model(self) -> None:
        if self._weights is None:
            return
        with torch.no_grad():
            for optimizer in self._optimizers:
                optimizer.train()
            for param, weights in self._weights.items():
                param.copy_(weights)
        self._weights = None

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state with the weights for evaluation, as `module`."""
        with self.in_model():
            module = {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in self._model.state_dict().items()
            }
        return {"count": 0, "module": module, "averages": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the optimizers' own states and the training weights give the average again."""
