"""How deep in a model each parameter is: what comes before its numbered blocks, the blocks in order, and the head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from torch import nn

from trainrun.errors import ConfigError

SHOWN = 3


def layers_above(
    model: nn.Module, members: Collection[nn.Parameter], key: str
) -> tuple[dict[nn.Parameter, int], str]:
    """Return how many layers are above that of each member, and a text of the layers.

    What comes before the first block is depth 0, and so are embeddings; what comes after the last block is one depth
    more. A norm counts with the layer before it. Raise ConfigError if the model has no numbered blocks, or two rows.
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


def number_blocks(model: nn.Module, own: Collection[nn.Parameter], key: str) -> dict[str, int]:
    """Return the depth of each layer of the row of blocks, from 1 on, by name.

    A row is what one module has under numbers. Rows with blocks (layers made of layers, of a class that comes several
    times) go before others. Raise ConfigError if there is no row, or a second one at least half as long.
    """
    rows: dict[str, dict[str, nn.Module]] = {}
    for name, layer in model.named_modules():
        parent, _, number = name.rpartition(".")
        if number.isdigit() and any(param in own for param in layer.parameters()):
            rows.setdefault(parent, {})[name] = layer
    kinds = Counter(type(layer) for row in rows.values() for layer in row.values() if has_layers(layer))
    blocks = {name for row in rows.values() for name, layer in row.items() if kinds[type(layer)] > 1}
    candidates = [
        number_layers(row) for parent, row in rows.items() if not is_inside(parent, blocks) and blocks & set(row)
    ] or [number_layers(row) for row in rows.values()]  # fmt: skip
    best = max(candidates, key=lambda row: max(row.values()), default={})
    length, way_out = max(best.values(), default=0), "name parameters and their rates in groups"
    if length < 2:
        raise ConfigError(
            f"{key}: the model has no blocks that are numbered (torch.nn.ModuleList, torch.nn.Sequential), which give "
            f"the depth; {way_out}"
        )
    rivals = [row for row in candidates if row is not best and 2 * max(row.values()) >= length]
    for rival in (next(iter(row)) for row in rivals):
        if not is_inside(rival, best):
            raise ConfigError(
                f"{key}: two rows of layers, from {next(iter(best))} and from {rival} on, so the depth is not clear; "
                f"{way_out}"
            )
    return best


def has_layers(layer: nn.Module) -> bool:
    return next(layer.children(), None) is not None


def is_inside(name: str, blocks: Collection[str]) -> bool:
    """Return whether a module is a block, or inside of one: what it has under numbers are experts or heads."""
    return any(f"{name}.".startswith(f"{block}.") for block in blocks)


def number_layers(row: dict[str, nn.Module]) -> dict[str, int]:
    """Return the depth of each layer, from 1 on; one with vectors alone has that of the layer before it."""
    depths: dict[str, int] = {}
    depth = 0
    for name, layer in row.items():
        depth += any(param.ndim > 1 for param in layer.parameters())
        depths[name] = depth
    return depths


def list_names(names: list[str]) -> str:
    rest = ", ..." if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{rest}"
