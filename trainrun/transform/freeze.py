"""Frozen parameters (`model.freeze`, `model.freeze_norm`): they get no gradient and do not change.

When: the first layers of a pretrained network (`init_from`) with little data, or until a new last layer has learned
    (`model.unfreeze_at`). When not: a network that is trained from scratch. Gain: no gradients, no optimizer state,
    and no backward pass below the first trained layer.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from trainrun.patterns import Patterns, match_names


class FrozenParameters:
    """The parameters of a model that match name patterns, without those that were already frozen.

    sizes: the number of values of each parameter, by name. norms: BatchNorm layers whose parameters are all frozen, or
        which match and have no parameters. Their running statistics are used and do not change, as in evaluation.
        Raises ValueError for a pattern that matches no parameter or no norm.
    """

    def __init__(self, model: nn.Module, patterns: Patterns, norms: bool = False) -> None:
        parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has all its names
        names = match_names(parameters, patterns, "model.freeze")
        chosen = {parameters[name]: name for name in names}
        # by name: `parallel=fsdp` puts other parameters in their places
        self.sizes = {name: param.numel() for param, name in chosen.items() if param.requires_grad}
        if sum(param.requires_grad for param in model.parameters()) == len(self.sizes) > 0:
            raise ValueError(
                f"model.freeze={patterns}: freezes every trainable parameter; leave out the parameters to train"
            )
        self.norms = frozen_norms(model, patterns, set(names)) if norms else []
        if norms and not self.norms:
            raise ValueError("model.freeze_norm=true: no batch norm is frozen; leave it out")

    def set(self, model: nn.Module, frozen: bool) -> None:
        """Freeze the parameters and their norms, or unfreeze them."""
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


def frozen_norms(model: nn.Module, patterns: Patterns, frozen: set[str]) -> list[str]:
    """Return the names of BatchNorm layers that are frozen completely."""
    norms = []
    for name, layer in model.named_modules():
        if getattr(layer, "running_mean", None) is not None:
            beginning = f"{name}." if name else ""
            own_names = {f"{beginning}{parameter_name}" for parameter_name, _ in layer.named_parameters()}
            if own_names <= frozen if own_names else matches_patterns(f"{beginning}running_mean", patterns):
                norms.append(name)
    return norms


def matches_patterns(name: str, patterns: Patterns) -> bool:
    try:
        return bool(match_names([name], patterns, ""))
    except ValueError:
        return False


def keep_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Return the layer without changing its mode; replaces its method `train`."""
    return layer
