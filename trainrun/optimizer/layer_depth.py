"""How deep in a model each parameter is: what comes before its numbered blocks, the blocks in order, and the head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from torch import nn

from trainrun.errors import ConfigError

SHOWN = 3
Row = dict[str, nn.Module]  # numbered layers beside each other, by their names in the model


def layers_above(
    model: nn.Module, members: Collection[nn.Parameter], key: str
) -> tuple[dict[nn.Parameter, int], str]:
    """Return how many layers are above that of each member, and a text of the layers.

    What comes before the first block is depth 0, and so are embeddings; what comes after the last block is one depth
    more. A norm counts with the layer before it. Raise ConfigError if the model has no numbered blocks, or two rows.
    """
    member_set = set(members)
    blocks = block_classes(model)
    rows = [
        row
        for row in numbered_rows(model, blocks)
        if member_set & {param for layer in row.values() for param in layer.parameters()}
    ]
    depth_of_layer = number_layers(choose_row(rows, blocks, key))
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


def block_classes(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes, made of layers, of which the model has several under numbers."""
    composite = [
        type(module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and next(module.children(), None) is not None
    ]
    return {kind for kind, count in Counter(composite).items() if count > 1}


def numbered_rows(module: nn.Module, blocks: set[type[nn.Module]], prefix: str = "") -> Iterator[Row]:
    """Yield the layers of each module that are named by numbers; none inside blocks (experts, heads)."""
    children = {f"{prefix}.{name}".lstrip("."): child for name, child in module.named_children()}
    numbered = {name: child for name, child in children.items() if name.rpartition(".")[2].isdigit()}
    row = {name: child for name, child in numbered.items() if next(child.parameters(), None) is not None}
    if row:
        yield row
    for name, child in children.items():
        if name not in row or type(child) not in blocks:
            yield from numbered_rows(child, blocks, name)


def choose_row(rows: list[Row], blocks: set[type[nn.Module]], key: str) -> Row:
    """Return the longest row of blocks, or of layers if there is none. ConfigError: there are none, or several rows."""
    candidates = [row for row in rows if blocks & set(map(type, row.values()))] or rows
    length = max((number_of_layers(row) for row in candidates), default=0)
    if length < 2:
        raise ConfigError(
            f"{key}: the model has no blocks that are numbered (torch.nn.ModuleList, torch.nn.Sequential), which give "
            "the depth; name parameters and their rates in groups"
        )
    best = next(row for row in candidates if number_of_layers(row) == length)
    outside = [
        row for row in candidates if not next(iter(row)).startswith(tuple(f"{name}." for name in best))
    ]
    rivals = [row for row in outside if row is not best and 2 * number_of_layers(row) >= length]
    if rivals:
        first, second = next(iter(best)), next(iter(rivals[0]))
        raise ConfigError(
            f"{key}: two rows of layers, from {first} and from {second} on, so the depth is not clear; name "
            "parameters and their rates in groups"
        )
    return best


def number_layers(row: Row) -> dict[str, int]:
    """Return the depth of each layer, from 1 on; one with vectors alone has that of the layer before it."""
    depths: dict[str, int] = {}
    depth = 0
    for name, layer in row.items():
        depth += any(param.ndim > 1 for param in layer.parameters())
        depths[name] = depth
    return depths


def number_of_layers(row: Row) -> int:
    return max(number_layers(row).values(), default=0)


def list_names(names: list[str]) -> str:
    rest = ", ..." if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{rest}"
