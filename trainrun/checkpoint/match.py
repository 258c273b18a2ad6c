"""Whether the tensors of a checkpoint fit a model, said before one of them is copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainrun.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Kind = tuple[tuple[int, ...], "torch.dtype"]
SHOWN = 5


def tensor_kinds(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Shape and dtype by name, of a `state_dict()` for example."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def check_tensors(
    place: str, owner: str, expected: Mapping[str, Kind], found: Mapping[str, Kind], shown: int = SHOWN
) -> None:
    """Raises CheckpointError with the first differences, in the order of the model.

    place: the checkpoint; owner: what the tensors are for, as typed (`model=cnn`).
    expected: of the model; found: of the checkpoint; shown: differences that are named at most.
    """
    names = [*expected, *(name for name in found if name not in expected)]
    faults = [
        fault for name in names if (fault := _difference(name[:200], expected.get(name), found.get(name)))
    ]
    if faults:
        more = f", and {len(faults) - shown} more" if len(faults) > shown else ""
        raise CheckpointError(
            f"checkpoint {place} does not fit {owner}: {len(faults)} of {len(names)} tensors differ: "
            f"{', '.join(faults[:shown])}{more}; build it with the same model and model.* as the checkpoint"
        )


def _difference(name: str, here: Kind | None, there: Kind | None) -> str:
    if there is None:
        return f"{name} is missing there"
    if here is None:
        return f"{name} is there only"
    if here[0] != there[0]:
        return f"{name} is {there[0]} there and {here[0]} here"
    if here[1] != there[1]:
        return f"{name} is {_plain(there[1])} there and {_plain(here[1])} here"
    return ""


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
