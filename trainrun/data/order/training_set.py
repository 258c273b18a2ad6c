"""From the sources of `data.train` to one training set, its fold that validates, and how often its samples come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainrun.data.order.drawn import Drawn, balanced, mixed, weighted
from trainrun.data.order.folds import fold_of
from trainrun.data.order.joined import joined, sized, taken


@dataclass(frozen=True)
class Asked:
    """The settings of `data` of these names."""

    sampling: str = "none"
    weights: Any = None
    mix: Mapping[str, float] | None = None
    folds: int | None = None
    fold: int | None = None
    stratified: bool = False


def training_set(
    named: Mapping[str, Any], asked: Asked, notes: list[str]
) -> tuple[dict[str, Any], Drawn | None]:
    """`train`, and `val` of folds. named: the source "", or several by name."""
    source = named[""] if "" in named else joined(named, "data.train")
    found, rows = {"train": source}, None
    if asked.folds is not None:
        rows, held, told = fold_of(source, asked.folds, asked.fold or 0, asked.stratified)
        notes.append(told)
        found = {name: taken(source, of, "data.train") for name, of in (("train", rows), ("val", held))}
    drawn = None
    if asked.mix:
        drawn = mixed(
            asked.mix, {name: sized(one, f"data.train.{name}", "data.mix") for name, one in named.items()}
        )
    elif asked.sampling != "none":
        number = sized(source, "data.train", f"data.sampling={asked.sampling}")
        balances = asked.sampling == "balanced"
        drawn = balanced(found["train"]) if balances else weighted(named, asked.weights, number, rows)
    notes += [drawn.told] if drawn is not None else []
    return found, drawn
