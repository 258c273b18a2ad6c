"""How deep in a model each parameter is: the stem, the blocks in their order, and the head."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import nn

from trainrun.errors import ConfigError

SHOWN = 3


class LayerRow(NamedTuple):
    """Layers one after the other. parent: the prefix of what holds them; layers: by prefix."""

    parent: str
    layers: dict[str, nn.Module]

    def stem(self) -> str:
        """The name of what has the layers, without numbers: `layer` of `layer1` and `layer2`."""
        inside = next(iter(self.layers)).removeprefix(f"{self.parent}.".lstrip("."))
        return re.sub(r"\d", "", inside.partition(".")[0])

    def kinds(self) -> set[type[nn.Module]]:
        """Classes of the layers that have layers of their own."""
        return {type(layer) for layer in self.layers.values() if is_composite(layer)}


def layers_above(
    model: nn.Module, members: Collection[nn.Parameter], key: str
) -> tuple[dict[nn.Parameter, int], str]:
    """How many layers stand above that of each member, and in words which were found.

    The layers are the blocks of the longest ModuleList or Sequential; those beside it with blocks of the same class,
    and the same name but for a number (the stages of a ResNet), go on with the counting. What comes before the first
    block is one layer, and so are embeddings; what comes after the last is another. Where no block is repeated, each
    layer of a Sequential counts; a norm counts with the layer before it.
    Raises ConfigError: there are no such layers, or two rows of them (encoder and decoder, two towers).
    """
    own = set(members)
    rows = [row for row in rows_of(model) if own.intersection(params_of(row.layers.values()))]
    place = numbered(chosen_rows(rows, key))
    num_layers = max(place.values())
    kinds = (nn.Embedding, nn.EmbeddingBag)
    embeddings = set(params_of(module for module in model.modules() if isinstance(module, kinds)))
    depths: dict[nn.Parameter, int] = {}
    names: dict[int, list[str]] = {}
    latest = 0
    for name, param in model.named_parameters():
        if param not in own:
            continue
        inside = next((place[prefix] for prefix in prefixes(name) if prefix in place), None)
        if inside is not None:
            depth = latest = inside
        elif param in embeddings or not latest:
            depth = 0
        else:
            depth = latest if latest < num_layers else num_layers + 1
        depths[param] = depth
        names.setdefault(depth, []).append(name)
    first, last = (next(prefix for prefix, depth in place.items() if depth == end) for end in (1, num_layers))
    told = [f"depth 0 {brief(names[0])}"] if 0 in names else []
    told.append(f"depths 1 to {num_layers} {first} ... {last}")
    told += [f"depth {depth} {brief(names[depth])}" for depth in names if depth > num_layers]
    top = max(depths.values())
    return {param: top - depth for param, depth in depths.items()}, ", ".join(told)


def rows_of(module: nn.Module, prefix: str = "", parent: str = "") -> Iterator[LayerRow]:
    """Every row of layers, in order; none inside of a repeated block, whose own parts are no depth (experts, heads)."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        row = LayerRow(parent, dict(layers_of(module, prefix)))
        yield row
        if is_repeated([row]):
            return
    for name, child in module.named_children():
        yield from rows_of(child, f"{prefix}.{name}".lstrip("."), prefix)


def layers_of(container: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Its children with parameters; in place of a Sequential of blocks those blocks."""
    for name, child in container.named_children():
        inner = f"{prefix}.{name}".lstrip(".")
        if isinstance(child, nn.Sequential) and any(map(is_composite, child.children())):
            yield from layers_of(child, inner)
        elif next(child.parameters(), None) is not None:
            yield inner, child


def chosen_rows(rows: list[LayerRow], key: str) -> list[LayerRow]:
    """The longest row, with those beside it that go on with it."""
    beside = [[other for other in rows if other.parent == row.parent] for row in rows]
    alike = [
        [other for other in family if other.kinds() & row.kinds()]
        for row, family in zip(rows, beside, strict=True)
    ]
    repeated = [family for family in alike if is_repeated(family)]
    blocks = tuple(f"{prefix}." for family in repeated for row in family for prefix in row.layers)
    families = [family for family in repeated if not is_inside(family, blocks)] or beside
    lengths = [max(numbered(family).values(), default=0) for family in families]
    if max(lengths, default=0) < 2:
        raise ConfigError(
            f"{key}: the model has no torch.nn.ModuleList or torch.nn.Sequential of several layers, by which the "
            "depth could be told; name parameters and their rates in groups"
        )
    best = families[lengths.index(max(lengths))]
    inside = tuple(f"{prefix}." for row in best for prefix in row.layers)
    rivals = [
        family[0]
        for family, length in zip(families, lengths, strict=True)
        if family[0] not in best and not is_inside(family, inside) and 2 * length >= max(lengths)
    ]
    if is_repeated(best):  # `text` and `image`, or `encoder` and `decoder`
        rivals += [row for row in best if row.stem() != best[0].stem()]
    if rivals:
        first, second = (next(iter(row.layers)) for row in (best[0], rivals[0]))
        raise ConfigError(
            f"{key}: two rows of layers, from {first} and from {second} on, so the depth is not clear; name "
            "parameters and their rates in groups"
        )
    return best


def is_inside(rows: list[LayerRow], places: tuple[str, ...]) -> bool:
    return f"{rows[0].parent}.".startswith(places)


def is_repeated(rows: list[LayerRow]) -> bool:
    """Whether some class of blocks occurs several times in them."""
    return (
        max(
            Counter(
                type(layer) for row in rows for layer in row.layers.values() if is_composite(layer)
            ).values(),
            default=0,
        )
        > 1
    )


def numbered(rows: list[LayerRow]) -> dict[str, int]:
    """The depth of each layer by prefix, from 1 on; one with vectors alone has that of the layer before it."""
    found: dict[str, int] = {}
    depth = 0
    for row in rows:
        for prefix, layer in row.layers.items():
            depth += any(param.ndim > 1 for param in layer.parameters())
            found[prefix] = depth
    return found


def params_of(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    for module in modules:
        yield from module.parameters()


def is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def prefixes(name: str) -> Iterator[str]:
    """`a.b`, `a` of `a.b.c`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def brief(names: list[str]) -> str:
    more = ", ..." if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
