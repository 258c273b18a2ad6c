"""Parameter groups: options for parameters by name pattern, by kind, and by depth.

what: torch's own groups. `groups` selects parameters by patterns, with any option of the optimizer. `no_decay`
    removes the weight decay from norms, biases and embeddings. `layer_decay` multiplies the learning rate of each
    layer by one factor more than that of the layer above it. An entry of `groups` has priority over both.
when: fine-tuning (a new head learns faster, early layers change little), and recipes that decay matrices only. when
    not: parts that are trained alternately (use several named optimizers), or parameters that are not trained
    (`freeze`).
source: Loshchilov and Hutter 2019, arXiv:1711.05101; Clark et al. 2020 (ELECTRA), arXiv:2003.10555, and BEiT, Bao et
    al. 2022, arXiv:2106.08254, for the rates of layers; `param_groups_layer_decay` of timm.
gain: not measured
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from trainrun.errors import OF_ARGUMENTS, ConfigError, PluginError
from trainrun.output import format_count
from trainrun.patterns import match_names
from trainrun.user_code import format_error

UNDECAYED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)  # other norms have vectors only

PEAKS = (
    "max_lr",
    "base_lr",
)  # of torch's OneCycleLR and CyclicLR: rates, where other schedules multiply them


@dataclass(frozen=True)
class GroupRules:
    """The rules that divide the parameters of an optimizer.

    key: the setting of the optimizer, as `optimizer`. groups: entries with patterns (`params`) and options; the
        first entry that matches a parameter applies. no_decay: none or auto. layer_decay: above 0, at most 1.
    """

    key: str
    groups: Sequence[dict[str, Any]] = ()
    no_decay: str = "none"
    layer_decay: float | None = None

    def options(self, number: int) -> dict[str, Any]:
        """Return the options of one entry of `groups`, without its parameters."""
        return {name: value for name, value in self.groups[number].items() if name != "params"}


class SharedOptions(NamedTuple):
    """The common options of the parameters of a group."""

    entry: int
    above: int
    undecayed: bool


class GroupDivision:
    """The groups with which an optimizer is built, and the options that the groups get afterwards."""

    def __init__(
        self, rules: GroupRules, model: nn.Module, members: Collection[nn.Parameter], groups: list[dict[str, Any]]
    ) -> None:  # fmt: skip
        """Divide the groups by the rules. members: all parameters of this optimizer, including frozen ones.

        Raise ConfigError if a pattern matches no trained parameter, or if the depth of layers is ambiguous.
        """
        self._rules = rules
        owners = match_entries(rules, model, {param for group in groups for param in group["params"]})
        undecayed = parameters_without_decay(model) if rules.no_decay == "auto" else set()
        above: dict[nn.Parameter, int] = {}
        self._told = ""
        if rules.layer_decay is not None:
            above, layers = count_layers_above(
                model, members, f"{rules.key}.layer_decay={rules.layer_decay:g}"
            )
            lowest = rules.layer_decay ** max(above.values())
            self._told = f"{rules.key}.layer_decay={rules.layer_decay:g}: {layers}; lr x {lowest:.3g} to 1"
        self.groups: list[dict[str, Any]] = []
        self._parts: list[SharedOptions] = []
        for group in groups:
            divided: dict[SharedOptions, list[nn.Parameter]] = {}
            for param in group["params"]:
                entry = owners.get(param, -1)
                entry_options = rules.options(entry) if entry >= 0 else {}
                part = SharedOptions(
                    entry,
                    0 if "lr" in entry_options else above.get(param, 0),
                    "weight_decay" not in entry_options and param in undecayed,
                )
                divided.setdefault(part, []).append(param)
            self._parts += sorted(divided)
            self.groups += [group | {"params": divided[part]} for part in sorted(divided)]

    def apply_options(
        self, optimizer: Optimizer, factory: Callable[..., Optimizer], keywords: dict[str, Any]
    ) -> list[str]:
        """Give the groups of the new optimizer their options. Return a line about each rule.

        keywords: the arguments with which the optimizer was built. Raise ConfigError or PluginError for invalid
            options.
        """
        key, kind = self._rules.key, type(optimizer).__name__
        if len(optimizer.param_groups) != len(self._parts):
            raise PluginError(
                f"{key}: {kind} changes the parameter groups that it receives; use an optimizer that keeps them"
            )
        for option, name in (("no_decay", "weight_decay"), ("layer_decay", "lr")):
            if getattr(self._rules, option) not in (None, "none") and name not in optimizer.defaults:
                raise ConfigError(f"{key}.{option}: {kind} has no {name}; leave it out")
        for group, part in zip(optimizer.param_groups, self._parts, strict=True):
            if part.entry >= 0:
                group.update(self._checked_options(part.entry, group["params"][0], factory, keywords))
            if part.undecayed:
                group["weight_decay"] = 0.0
            if part.above and self._rules.layer_decay is not None:
                group["lr"] = group["lr"] * self._rules.layer_decay**part.above
        return [*filter(None, [self._told]), f"{key}: {kind}: {describe_groups(optimizer.param_groups)}"]

    def _checked_options(
        self, entry: int, param: nn.Parameter, factory: Callable[..., Optimizer], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the options of an entry as the optimizer stores them, after it has checked them."""
        options, entry_key = self._rules.options(entry), f"{self._rules.key}.groups[{entry}]"
        probe = nn.Parameter(torch.zeros(1, dtype=param.dtype, device=param.device))
        try:
            built = factory([probe], **(keywords | options))
        except (RuntimeError, *OF_ARGUMENTS) as error:
            raise PluginError(f"{entry_key}: {format_error(error)}") from error
        kind = type(built).__name__
        for name in options:
            if name not in built.defaults:
                option_names = ", ".join(built.defaults)
                raise ConfigError(
                    f"{entry_key}.{name}: {kind} has one for all parameters; a group may have {option_names}"
                )
        return {name: built.defaults[name] for name in options}


def match_entries(
    rules: GroupRules, model: nn.Module, trained: Collection[nn.Parameter]
) -> dict[nn.Parameter, int]:
    """Return for each parameter the index of the first entry of `groups` that matches it.

    Raise ConfigError that lists the entries without effect. A parameter that is used twice may match by either name.
    """
    named_params = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[nn.Parameter, int] = {}
    faults = []
    for number, group in enumerate(rules.groups):
        key = f"{rules.key}.groups[{number}].params"
        try:
            names = match_names(named_params, group["params"], key)
        except ValueError as error:
            faults.append(str(error))
            continue
        params = {named_params[name] for name in names} & set(trained)
        if not params:
            faults.append(
                f"{key}={group['params']}: {names[0]} and other matching parameters belong to another optimizer; "
                "leave the group out"
            )
        elif all(param in owners for param in params):
            before = owners[next(iter(params))]
            faults.append(
                f"{key}={group['params']}: an earlier group has each of its parameters ({rules.key}.groups[{before}]), "
                "and the first that fits holds; put the narrower pattern first"
            )
        for param in params:
            owners.setdefault(param, number)
    if faults:
        raise ConfigError(*faults)
    return owners


def parameters_without_decay(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters without weight decay.

    These are vectors and scalars (norms, biases, scales), all parameters of embeddings and layer norms, biases of
    any shape, and the parameters that the method `no_weight_decay` of a module names (timm).
    """
    undecayed = {param for param in model.parameters() if param.ndim <= 1}
    for module in model.modules():
        own_parameters = dict(module.named_parameters(recurse=False))
        is_undecayed_class = isinstance(module, UNDECAYED)
        undecayed |= {
            param for name, param in own_parameters.items() if is_undecayed_class or name.endswith("bias")
        }
        if callable(listed := getattr(module, "no_weight_decay", None)):
            below = dict(module.named_parameters())
            undecayed |= {below[name] for name in listed() if name in below}
    return undecayed


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return `52 tensors decay, 98 do not, 2 groups`, and how many tensors are frozen now."""
    decays = [bool(group.get("weight_decay")) for group in groups for p in group["params"] if p.requires_grad]
    decayed, others = sum(decays), len(decays) - sum(decays)
    num_frozen = sum(len(group["params"]) for group in groups) - len(decays)
    does = f"{format_count(decayed, 'tensor')} {'decays' if decayed == 1 else 'decay'}"
    text = f"{does}, {others} {'does' if others == 1 else 'do'} not, {format_count(len(groups), 'group')}"
    frozen = f"; {format_count(num_frozen, 'tensor')} {'is' if num_frozen == 1 else 'are'} frozen"
    return text + frozen if num_frozen else text


def peak_rates(keywords: dict[str, Any], optimizer: Optimizer) -> dict[str, list[float]]:
    """Return the peak rates of the schedule for each group, in proportion to its learning rate; {} if all rates are
    equal.
    """
    rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
    if len(set(rates)) < 2 or not rates[0]:
        return {}
    peaks = {name: keywords[name] for name in PEAKS if isinstance(keywords.get(name), int | float)}
    return {name: [rate * (value / rates[0]) for rate in rates] for name, value in peaks.items()}


SHOWN = 3


def count_layers_above(
    model: nn.Module, members: Collection[nn.Parameter], key: str
) -> tuple[dict[nn.Parameter, int], str]:
    """Return how many layers are above that of each parameter, and a description of the layers.

    Parameters before the first block, and embeddings, have depth 0. Those after the last block are one layer above
    it. A norm belongs to the layer before it. Raise ConfigError if the model has no numbered blocks, or two lists of
    them.
    """
    member_set = set(members)
    depth_of_layer = number_blocks(model, member_set, key)
    num_layers = max(depth_of_layer.values())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {param for table in tables for param in table.parameters()}
    depths: dict[nn.Parameter, int] = {}
    names: dict[int, list[str]] = {}
    latest = 0
    for name, param in model.named_parameters():
        if param not in member_set:
            continue
        layer = next((layer for layer in depth_of_layer if name.startswith(f"{layer}.")), None)
        if layer is not None:
            depth = latest = depth_of_layer[layer]
        elif param in embeddings or not latest:
            depth = 0
        else:
            depth = latest if latest < num_layers else num_layers + 1
        depths[param] = depth
        names.setdefault(depth, []).append(name)
    layers = list(depth_of_layer)
    parts = [f"depth 0 {list_names(names[0])}"] if 0 in names else []
    last = next(layer for layer in layers if depth_of_layer[layer] == num_layers)
    parts.append(f"depths 1 to {num_layers} {layers[0]} ... {last}")
    parts += [f"depth {depth} {list_names(names[depth])}" for depth in names if depth > num_layers]
    deepest = max(depths.values())
    return {param: deepest - depth for param, depth in depths.items()}, ", ".join(parts)


def number_blocks(model: nn.Module, members: Collection[nn.Parameter], key: str) -> dict[str, int]:
    """Return the depth of each block by name, from 1 on.

    A list of blocks is what one module has under numbers. A list whose items consist of layers, of a class that
    occurs several times, has priority. Raise ConfigError if there is no list, or a second one at least half as long.
    """
    rows: dict[str, dict[str, nn.Module]] = {}
    for name, layer in model.named_modules():
        parent, _, number = name.rpartition(".")
        if number.isdigit() and any(param in members for param in layer.parameters()):
            rows.setdefault(parent, {})[name] = layer
    kinds = Counter(type(layer) for row in rows.values() for layer in row.values() if has_layers(layer))
    blocks = {name for row in rows.values() for name, layer in row.items() if kinds[type(layer)] > 1}
    candidates = [
        number_layers(row) for parent, row in rows.items() if not is_inside_block(parent, blocks) and blocks & set(row)
    ] or [number_layers(row) for row in rows.values()]  # fmt: skip
    best = max(candidates, key=lambda row: max(row.values()), default={})
    length, way_out = max(best.values(), default=0), "name parameters and their rates in groups"
    if length < 2:
        raise ConfigError(
            f"{key}: the model has no numbered blocks (torch.nn.ModuleList, torch.nn.Sequential), which give "
            f"the depth; {way_out}"
        )
    rivals = [row for row in candidates if row is not best and 2 * max(row.values()) >= length]
    for rival in (next(iter(row)) for row in rivals):
        if not is_inside_block(rival, best):
            raise ConfigError(
                f"{key}: the model has two rows of layers, from {next(iter(best))} and from {rival} on, so the depth "
                f"is not clear; {way_out}"
            )
    return best


def has_layers(layer: nn.Module) -> bool:
    return next(layer.children(), None) is not None


def is_inside_block(name: str, blocks: Collection[str]) -> bool:
    """Return whether a module is a block, or inside a block. Numbered modules inside a block are experts or heads."""
    return any(f"{name}.".startswith(f"{block}.") for block in blocks)


def number_layers(row: dict[str, nn.Module]) -> dict[str, int]:
    """Return the depth of each layer, from 1 on. A layer with vectors only has the depth of the layer before it."""
    depths: dict[str, int] = {}
    depth = 0
    for name, layer in row.items():
        depth += any(param.ndim > 1 for param in layer.parameters())
        depths[name] = depth
    return depths


def list_names(names: list[str]) -> str:
    rest = ", ..." if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{rest}"
