"""Numbers that a model makes itself are float64 too where a check computes in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MAKERS = (torch.randn, torch.rand, torch.zeros, torch.ones, torch.empty, torch.eye, torch.linspace)


class Doubles(TorchFunctionMode):
    """Inside, `torch.randn(3)` and its like give float64 where no type is named; in this thread alone.

    `torch.set_default_dtype` would reach the threads that read data too.
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
