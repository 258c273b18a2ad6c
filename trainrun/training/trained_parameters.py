"""The contract of trained parameters: each is in an optimizer, and a gradient reaches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainrun.errors import PluginError
from trainrun.output import format_short_list

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class TrainedParameters:
    """The parameters that require a gradient, at the start of the run and now.

    Checkpoints store the changes by hooks or tasks: `requires_grad` by name. Parameters that the config freezes
    follow the config of the present session.
    """

    def __init__(self, model: nn.Module, held: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._held, self._optimizer = model, held, optimizer
        self._required = {name: param.requires_grad for name, param in model.named_parameters()}
        self._known = set(held.parameters())

    def list_without_optimizer(self) -> list[str]:
        """Return the names of parameters that require a gradient and that no optimizer has."""
        owned = {param for group in self._optimizer.param_groups for param in group["params"]}
        return [
            name
            for name, param in self._held.named_parameters()
            if param.requires_grad and param not in owned
        ]

    def check(self) -> None:
        """Accept parameters that a hook or a task has added to the model and to an optimizer's group.

        Replaced parameters leave the optimizer. Raise PluginError for new parameters that no optimizer has.
        """
        if all(param in self._known for param in self._held.parameters()):
            return
        added = set(self._held.parameters()) - self._known
        named = dict(self._held.named_parameters())
        names = [name for name in self.list_without_optimizer() if named[name] in added]
        if names:
            raise PluginError(
                f"model: no optimizer has {format_short_list(names)}, because they were created after the optimizer. "
                "Create parameters in __init__ or in a transform, or copy new values into existing parameters "
                "(nn.LazyLinear gets its size before the first step)"
            )
        present = set(self._held.parameters())
        for param in self._known - present:
            self._optimizer.state.pop(param, None)
        for group in self._optimizer.param_groups:
            group["params"] = [
                param for param in group["params"] if param in present or param not in self._known
            ]
        self._known = present

    def state_dict(self) -> dict[str, bool]:
        now = self._model.named_parameters()
        return {
            name: param.requires_grad
            for name, param in now
            if param.requires_grad != self._required.get(name, param.requires_grad)
        }

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        for name, param in self._model.named_parameters():
            if name in state:
                param.requires_grad_(state[name])


class GradientCheck:
    """A check of the gradients up to the first log point of a session. run: `Components`.

    A parameter that was created in the first forward is an error. A parameter that no optimizer has, that got no
    gradient on a rank, or that has other values on another rank, is reported once. After the first log point the check
    costs nothing.
    """

    def __init__(self, run: Any) -> None:
        self._run, self._steps = run, 0
        self._without_optimizer: list[str] = []

    def after_step(self, log: bool) -> bool:
        """Check after a step. Return whether this check is done."""
        self._steps += 1
        if self._steps == 1:
            self._check_optimizers()
        if log:
            self._note_missing_gradients()
            self._note_different_ranks()
        return log

    def _check_optimizers(self) -> None:
        run = self._run
        run.trained.check()
        self._without_optimizer = run.trained.list_without_optimizer()
        if self._without_optimizer:
            names = format_short_list(self._without_optimizer)
            run.monitors.note(
                f"model: no optimizer has {names}, so nothing trains them; if that is meant, set requires_grad=False"
            )

    def _note_missing_gradients(self) -> None:
        run = self._run
        if not run.precision.params_with_gradient:  # a step of one graph shows no gradients
            return
        names = [
            name
            for name, param in run.held.named_parameters()
            if param.requires_grad
            and param not in run.precision.params_with_gradient
            and name not in self._without_optimizer
        ]
        by_rank = run.parallel.gather(names)
        steps = "the first step" if self._steps == 1 else f"the first {self._steps} steps"
        if any(each != by_rank[0] for each in by_rank):
            message = "; ".join(
                f"on rank {rank} {format_short_list(each)}" for rank, each in enumerate(by_rank) if each
            )
        else:
            message = format_short_list(names)
        if message:
            run.monitors.note(
                f"model: no gradient in {steps} for {message}: the loss does not depend on them; leave them out of the "
                "model, or use them in its forward"
            )

    def _note_different_ranks(self) -> None:
        """Note parameters whose values differ between ranks that hold all of them."""
        run = self._run
        if run.config.parallel.mode != "ddp":
            return
        named = {name: param for name, param in run.held.named_parameters() if param.layout is torch.strided}
        ranks = run.parallel.gather([compute_bit_sum(param) for param in named.values()])
        names = [name for name, sums in zip(named, zip(*ranks, strict=True), strict=True) if len({*sums}) > 1]
        if names:
            run.monitors.note(
                f"parallel=ddp: the ranks have different values of {format_short_list(names)}. Did each rank change "
                "them by its own samples, such as in a forward? Keep such values in a buffer (register_buffer), which "
                "all ranks copy from rank 0"
            )


def compute_bit_sum(param: Tensor) -> int:
    """Return the sum of the numbers of a tensor, read as integers. The host waits for the device."""
    return int(param.detach().contiguous().view(INTEGERS[param.element_size()]).sum(dtype=torch.int64))
