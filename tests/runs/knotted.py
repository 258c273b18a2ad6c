"""A network that ties a knot for the garbage collector at every forward, and watches it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor, nn

alive: weakref.WeakSet[Any] = weakref.WeakSet()
most: list[int] = []  # knots that were there at once
seen: list[tuple[int, int]] = []  # the collector's threshold and its frozen objects


class Knot:
    """A cycle that holds a tensor."""

    def __init__(self, held: Tensor) -> None:
        self.held, self.self = held, self


class Knotted(nn.Module):
    """A user's model that leaves a cycle behind at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        alive.add(Knot(x))
        most.append(len(alive))
        counted = seen[-1][1] if len(seen) % 30 else gc.get_freeze_count()  # it walks over all of them
        seen.append((gc.get_threshold()[0], counted))
        return self.layers(x)
