"""The running average of the weights: a second model that is validated and predicts.

What: after t updates its weights are the mean of those seen, weighted by decay**(t - i) for update i. The
first weights weigh no more than their age says, so short runs work too (an average that starts from the
initial weights keeps 0.999**900 = 41 % of them after 900 steps).
When: almost always at validation, more the noisier the weights. When not: batch norm with few steps
(its statistics are copied, not averaged). Cost: one pass over the weights.
Source: Polyak and Juditsky 1992; the correction is that of Adam (Kingma and Ba 2015, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainrun.errors import CheckpointError
from trainrun.runtime.foreach_copy import by_type, copy_
from trainrun.runtime.model_copy import copied

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Ema:
    """module: the average; never swapped in place.

    every: updates between two looks at the weights; `decay` is per look.
    """

    def __init__(self, model: nn.Module, decay: float, every: int) -> None:
        self._model = model
        self._decay = decay
        self._every = every
        self._count = 0  # calls of update
        self.module = copied(model, model).requires_grad_(False).eval()
        # of the parameters, in their order, at least float32
        self._averages = [_roomy(param) for param in self.module.parameters()]

    def update(self) -> None:
        """Once after every update of the weights that was not skipped."""
        self._count += 1
        if self._count % self._every == 0:
            looks = self._count // self._every
            self._look(newest=(1 - self._decay) / (1 - self._decay**looks))

    @torch.no_grad()
    def _look(self, newest: float) -> None:
        """Mix the weights in; `newest` is the weight of what is seen now, 1 at the first look."""
        average: Any = get_ema_multi_avg_fn(1 - newest)  # type: ignore[no-untyped-call]
        average(self._averages, [_roomy(param) for param in self._model.parameters()], None)
        rounded = zip(self.module.parameters(), self._averages, strict=True)
        self._fit_buffers()
        # asked again each time: a model may replace a buffer instead of writing into it
        buffers = zip(self.module.buffers(), self._model.buffers(), strict=True)
        for targets, sources in by_type([*(pair for pair in rounded if pair[0] is not pair[1]), *buffers]):
            copy_(targets, sources)

    def _fit_buffers(self) -> None:
        """A forward may make buffers, and make them longer."""
        if [one.shape for one in self.module.buffers()] == [one.shape for one in self._model.buffers()]:
            return
        for own, other in zip(self.module.modules(), self._model.modules(), strict=True):
            for name, buffer in other._buffers.items():
                persistent = name not in other._non_persistent_buffers_set
                own.register_buffer(name, None if buffer is None else buffer.detach().clone(), persistent)

    def state_dict(self) -> dict[str, Any]:
        self._fit_buffers()
        averages = {
            name: average
            for (name, shown), average in zip(self.module.named_parameters(), self._averages, strict=True)
            if shown is not average
        }
        return {"count": self._count, "module": self.module.state_dict(), "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """To be called after the model has its weights: without a stored average, it starts from them."""
        self._fit_buffers()
        try:
            self.module.load_state_dict(state["module"] if state else self._model.state_dict())
        except RuntimeError as error:
            raise CheckpointError(
                "trainer.ema: the averaged weights in the checkpoint belong to another model: "
                + " ".join(str(error).split())[:1000]
            ) from error
        self._count = state["count"] if state else 0
        stored = state["averages"] if state else {}
        for (name, shown), average in zip(self.module.named_parameters(), self._averages, strict=True):
            if shown is not average:
                average.copy_(stored.get(name, shown))


def _roomy(tensor: Tensor) -> Tensor:
    """Itself, or float32 where it is 16 bits wide: there, a step of 0.001 of the difference is lost."""
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor
