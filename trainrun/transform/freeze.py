"""Frozen parameters (`model.freeze`, `model.freeze_norm`): they get no gradient, and what they are stays.

When: the first layers of a pretrained network (`init_from`), with little data; or until a new last layer has learned
(`model.unfreeze_at`). When not: a network that is trained from nothing.
Gain: no gradients, no state of the optimizer, and no backward below the first trained layer.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from trainrun.patterns import Patterns, matching


class Frozen:
    """Parameters of a model by the patterns of their names, those that are frozen already left out.

    sizes: the numbers of their values, by name. norms: batch norms of which every parameter is among them (or none
    exists, and their statistics fit) keep their statistics and use them, as in evaluation. Raises ValueError for a
    pattern that fits no parameter, and for no norm.
    """

    def __init__(self, model: nn.Module, patterns: Patterns, norms: bool = False) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has all its names
        names = matching(parameters, patterns, "model.freeze")
        chosen = {parameters[name]: name for name in names}
        # by name: `parallel=fsdp` puts other parameters in their places
        self.sizes = {name: param.numel() for param, name in chosen.items() if param.requires_grad}
        if sum(param.requires_grad for param in model.parameters()) == len(self.sizes) > 0:
            raise ValueError(
                f"model.freeze={patterns}: freezes all that is trained; leave out what shall learn"
            )
        self.norms = norms_of(model, patterns, set(names)) if norms else []
        if norms and not self.norms:
            raise ValueError("model.freeze_norm=true: no batch norm is frozen; leave it out")

    def set(self, model: nn.Module, frozen: bool) -> None:
        """Freeze the parameters and their norms, or train them from here on."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in self.sizes:
            parameters[name].requires_grad_(not frozen)
        self.set_norms(model, frozen)

    def set_norms(self, model: nn.Module, frozen: bool) -> None:
        for name in self.norms:
            layer = model.get_submodule(name)  # `parallel.sync_batchnorm` may have put another in its place
            if frozen:
                layer.eval()
                layer.train = partial(keep_mode, layer)  # type: ignore[method-assign]
            elif vars(layer).pop("train", None):
                layer.train(model.training)


def norms_of(model: nn.Module, patterns: Patterns, frozen: set[str]) -> list[str]:
    """Return the names of batch norms that are frozen completely."""
    norms = []
    for name, layer in model.named_modules():
        if getattr(layer, "running_mean", None) is not None:
            beginning = f"{name}." if name else ""
            own_names = {f"{beginning}{parameter_name}" for parameter_name, _ in layer.named_parameters()}
            if own_names <= frozen if own_names else is_named(f"{beginning}running_mean", patterns):
                norms.append(name)
    return norms


def is_named(name: str, patterns: Patterns) -> bool:
    try:
        return bool(matching([name], patterns, ""))
    except ValueError:
        return False


def keep_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Return the layer unchanged; replaces its method `train`."""
    return layer
