"""Make the user's training smaller or more exact: the first samples only, or float64 throughout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainrun.data.tensor_dataset import Splits, find_columns
from trainrun.errors import DataError

MAKERS = (torch.randn, torch.rand, torch.zeros, torch.ones, torch.empty, torch.eye, torch.linspace)
HIDDEN = ("columns", "__getitems__")  # they would give all samples


class Float64ByDefault(TorchFunctionMode):
    """A context in which `torch.randn(3)` and similar calls without a dtype return float64, in this thread only.

    `torch.set_default_dtype` would also affect threads that read data.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in MAKERS and named.get("dtype") is None and named.get("out") is None:
            named["dtype"] = torch.float64
        return func(*args, **named)


class FirstSamples:
    """A map-style data set of the first samples of a split. It also has the attributes of the source."""

    def __init__(self, source: Any, count: int, split: str) -> None:
        source = source[split] if isinstance(source, Splits) else source
        columns = find_columns(source, "data")
        self._about, self._samples = source, source if columns is None else columns
        if not hasattr(type(self._samples), "__len__"):
            raise DataError("data: its samples cannot be read by number")
        self._count = min(count, len(self._samples))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._samples[index]

    def __getattr__(self, name: str) -> Any:
        if name in HIDDEN or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._about, name)


def first_samples_node(node: Any, count: int, split: str) -> dict[str, Any]:
    """Return the config node of a data set with only the first samples of a split."""
    return {
        "_target_": f"{__name__}.{FirstSamples.__name__}",
        "source": copy.deepcopy(node),
        "count": count,
        "split": split,
    }
