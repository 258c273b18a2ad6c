"""Deep copies of models that hold results of their own weights."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

Copied = TypeVar("Copied")


def copied(value: Copied, model: nn.Module) -> Copied:
    """A deep copy of a model, or of what holds it.

    Results that wait for a backward, which torch does not copy, become their values: torch.nn.utils.weight_norm keeps
    the weight that it computes as an attribute, and computes it again in every forward.
    """
    results = (one for module in model.modules() for one in vars(module).values() if isinstance(one, Tensor))
    return copy.deepcopy(value, {id(one): one.detach().clone() for one in results if not one.is_leaf})
