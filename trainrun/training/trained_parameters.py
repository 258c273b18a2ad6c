"""Which parameters are trained, and the contract that an optimizer has each of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from trainrun.errors import PluginError
from trainrun.output import short_list


class TrainedParameters:
    """The parameters that require a gradient, as the run was built with them and as they are now.

    Checkpoints hold what a hook or a task has changed since: `requires_grad` by name. What the config freezes is as the
    config of the present session says.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._at_start = dict(model.named_parameters())
        self._required = {name: param.requires_grad for name, param in self._at_start.items()}
        self._known = set(self._at_start.values())

    def without_optimizer(self) -> list[str]:
        """Return the names of parameters that require a gradient and that no optimizer has."""
        owned = {param for group in self._optimizer.param_groups for param in group["params"]}
        return [
            name
            for name, param in self._model.named_parameters()
            if param.requires_grad and param not in owned
        ]

    def check(self) -> None:
        """Take up parameters that a hook or a task has put into the model together with a group of the optimizer.

        What they replaced leaves the optimizer. Raise PluginError for new parameters that no optimizer has.
        """
        if all(param in self._known for param in self._model.parameters()):
            return
        added = set(self._model.parameters()) - self._known
        named = dict(self._model.named_parameters())
        names = [name for name in self.without_optimizer() if named[name] in added]
        if names:
            raise PluginError(
                f"model: no optimizer has {short_list(names)}, because the model got them after the optimizer was "
                "built. Make such parameters in __init__ or in a transform (nn.LazyLinear gets its size before the "
                "first step), or copy new values into the parameters that are there"
            )
        present = set(self._model.parameters())
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
