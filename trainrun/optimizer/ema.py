"""Averaged weights for validation and prediction: a running average, and averages that optimizers compute
themselves.

What: after t updates the average is the mean of all weights so far, where those of update i have the weight
    decay**(t - i). It has no bias towards the first weights, so short runs work too. (An average that starts from
    the initial weights keeps 0.999**900 = 41 % of them after 900 steps.) Until the first update the weights
    themselves are validated.
When: almost always for validation, above all with noisy weights. When not: batch norm with few steps, because its
    statistics are not averaged. Cost: one pass over the weights per update, and two per validation.
How: there is an averaged tensor for each parameter. An evaluation copies the averages into the model's parameters,
    and restores the weights afterwards. So all other references to the parameters (functions, hooks, a layer under
    two names) use the averages too, and every tensor keeps its memory.
Source: Polyak and Juditsky 1992; the bias correction is that of Adam (Kingma and Ba 2015, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainrun.errors import CheckpointError
from trainrun.runtime.foreach_copy import copy_tensors, group_by_type

LOW_PRECISION = (torch.bfloat16, torch.float16)


class WeightSwap:
    """Replace the weights of a model for a while, and restore them bit for bit.

    put_in: writes the other weights into the model. before_return: is called before the model's own weights are
        restored.
    """

    def __init__(
        self, model: nn.Module, put_in: Callable[[], None], before_return: Callable[[], None] | None = None
    ) -> None:
        self._model, self._put_in, self._before_return = model, put_in, before_return
        self._weights: dict[nn.Parameter, Tensor] | None = (
            None  # copies by parameter, while the model holds the others
        )

    @contextmanager
    def swap_weights_in(self) -> Iterator[None]:
        """Put the averaged weights into the model inside the block. A block inside another one changes nothing."""
        if self._weights is not None:
            yield
            return
        try:
            self._enter()
            yield
        finally:
            self._leave()

    @contextmanager
    def swap_weights_out(self) -> Iterator[bool]:
        """Restore the model's own weights inside the block. Yield whether the model had the other weights."""
        was_in_model = self._weights is not None
        self._leave()
        try:
            yield was_in_model
        finally:
            if was_in_model:
                self._enter()

    @torch.no_grad()
    def _enter(self) -> None:
        weights = {param: param.detach().clone() for param in self._model.parameters()}
        self._weights = weights  # from here on `_leave` has what it needs, whatever interrupts this
        self._put_in()

    @torch.no_grad()
    def _leave(self) -> None:
        if self._weights is None:
            return
        if self._before_return is not None:
            self._before_return()
        _copy_all(list(self._weights), list(self._weights.values()))
        self._weights = None


class Ema:
    """The averages of a model's parameters.

    every: the weights enter the average at every n-th update. `decay` applies to each of these.
    """

    def __init__(self, model: nn.Module, decay: float, every: int) -> None:
        self._model = model
        self._decay = decay
        self._every = every
        self._count = 0  # calls of update
        self._averages: dict[str, Tensor] = {}  # by name, at least float32; empty before the first look
        self._parameters: list[Tensor] = []  # the parameters that they are of, in the same order
        self.swap = WeightSwap(model, self._put_into_model)

    def update(self) -> None:
        """Count an update of the weights. At every n-th one, add the weights to the average."""
        self._count += 1
        if self._count % self._every == 0:
            num_looks = self._count // self._every
            self._average_weights(newest=(1 - self._decay) / (1 - self._decay**num_looks))

    @contextmanager
    def swap_weights_in(self) -> Iterator[None]:
        """Put the averages into the model's parameters inside the block. Restore their values afterwards, bit for
        bit.

        Enter it before `evaluating`: a model that merges weights in `eval()` then merges the averages.
        """
        self._match_parameters()
        with self.swap.swap_weights_in() if self._averages else nullcontext():
            yield

    def _put_into_model(self) -> None:
        _copy_all(self._parameters, list(self._averages.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the averages.

        count: the number of updates. module: the state of the model with averages instead of weights. averages: the
            averages of 16-bit parameters in float32.
        """
        self._match_parameters()
        owners = {id(parameter): name for name, parameter in self._model.named_parameters()}
        module: dict[str, Any] = {}
        for key, value in self._model.state_dict(keep_vars=True).items():
            name = owners.get(id(value))
            if name is not None and name in self._averages:
                module[key] = self._averages[name].to(value.dtype)
            else:
                module[key] = value.detach() if isinstance(value, Tensor) else value
        averages = {
            name: average
            for (name, average), parameter in zip(self._averages.items(), self._parameters, strict=True)
            if average.dtype != parameter.dtype
        }
        return {"count": self._count, "module": module, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load averages. An empty state begins a new average. Raise CheckpointError if they are of another model."""
        self._count, self._averages, self._parameters = 0, {}, []
        if not state:
            return
        stored, full = state["module"], state["averages"]
        for name, parameter in self._model.named_parameters():
            value = full.get(name, stored.get(name))
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else "missing"
                raise CheckpointError(
                    "trainer.ema: the averaged weights in the checkpoint belong to another model: "
                    f"{name} is {shape} there, and {tuple(parameter.shape)} here"
                )
        self._count = state["count"]
        if self._count >= self._every:
            self._match_parameters(begin=True)
            for name, average in self._averages.items():
                average.copy_(full.get(name, stored[name]))

    @torch.no_grad()
    def _average_weights(self, newest: float) -> None:
        """Add the current weights to the average. newest: their share, which is 1 for the first ones."""
        if not self._averages:
            self._match_parameters(begin=True)
        average: Any = get_ema_multi_avg_fn(1 - newest)  # type: ignore[no-untyped-call]
        weights = [_widen_to_float32(parameter) for parameter in self._parameters]
        average(list(self._averages.values()), weights, None)

    def _match_parameters(self, begin: bool = False) -> None:
        """Make the averages match the model's parameters. The average of a new or reshaped parameter begins with its
        value.
        """
        if not (self._averages or begin):
            return
        parameters = dict(self._model.named_parameters())
        same = len(parameters) == len(self._parameters) and all(
            old_parameter is new_parameter
            for old_parameter, new_parameter in zip(self._parameters, parameters.values(), strict=True)
        )
        if same and list(parameters) == list(self._averages):
            return
        averages = self._averages
        self._averages = {
            name: averages[name]
            if name in averages and averages[name].shape == parameter.shape
            else _widen_to_float32(parameter.detach()).clone()
            for name, parameter in parameters.items()
        }
        self._parameters = list(parameters.values())


def _widen_to_float32(tensor: Tensor) -> Tensor:
    """Return a 16-bit tensor as float32, any other unchanged. In 16 bits, a change of 0.001 of the difference would
    be lost.
    """
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


@torch.no_grad()
def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, which keeps its memory."""
    for some_targets, some_sources in group_by_type(zip(targets, sources, strict=True)):
        copy_tensors(some_targets, some_sources)


class OptimizerAverage:
    """The averaged weights of optimizers with `train()` and `eval()` (schedule-free). It has the methods of `Ema`.

    What: such an optimizer trains with one set of weights and evaluates with their average, which it computes itself.
        Validations, and the weights that are saved for evaluation, use `eval()`. The training weights are saved before
        and restored bit for bit, because `train()` after `eval()` would round them. Checkpoints contain both.
    When: the optimizer has both methods and `trainer.ema` is not set. When not: batch norm, because its statistics
        belong to the training weights.
    Source: Defazio et al. 2024, arXiv:2405.15682
    Gain: no schedule is needed. Cost: a copy of the weights during a validation, and a second one in each checkpoint.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._model, self._optimizers = model, optimizers
        self.swap = WeightSwap(model, self._switch_to_evaluation, self._switch_to_training)

    def update(self) -> None:
        """Do nothing: the optimizers update their averages themselves."""

    def swap_weights_in(self) -> AbstractContextManager[None]:
        """Put the averaged weights into the model inside the block, and restore the trained ones afterwards, bit for
        bit.
        """
        return self.swap.swap_weights_in()

    def _switch_to_evaluation(self) -> None:
        for optimizer in self._optimizers:
            optimizer.eval()

    def _switch_to_training(self) -> None:
        for optimizer in self._optimizers:
            optimizer.train()

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state with the weights for evaluation, as `module`."""
        with self.swap_weights_in():
            module = {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in self._model.state_dict().items()
            }
        return {"count": 0, "module": module, "averages": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the average follows from the states of the optimizers and the training weights."""
