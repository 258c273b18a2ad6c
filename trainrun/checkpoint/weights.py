"""The weights of a checkpoint or a safetensors file: whether they fit a model, and `init_from`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from trainrun.checkpoint.best import best_checkpoint
from trainrun.checkpoint.collective import on_rank_zero
from trainrun.checkpoint.format import read_tensors
from trainrun.checkpoint.load import Loaded, load_together, resolve
from trainrun.errors import CheckpointError
from trainrun.interfaces import Parallel

KEY = "init_from"
CHECKPOINTS = "checkpoints"  # in a run folder
SHOWN, MOST_SHOWN = 5, 20  # tensors that do not fit

Kind = tuple[tuple[int, ...], torch.dtype]


def weights_of(loaded: Loaded) -> tuple[dict[str, Tensor], bool]:
    """The weights that a checkpoint is evaluated with, and whether they are averaged. Raises CheckpointError."""
    shared, weights, averaged = loaded.shared, None, None
    if isinstance(shared, dict):
        ema = shared.get("ema")
        averaged = ema.get("module") if isinstance(ema, dict) else None
        weights = averaged if averaged is not None else shared.get("model")
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"checkpoint {loaded.folder.name}: holds no weights")
    return weights, averaged is not None


def load_initial(model: nn.Module, init_from: str, parallel: Parallel) -> str:
    """Copy weights into a model that has exactly those; the line that says so. All ranks call it together.

    init_from: a run (its best checkpoint, else its last), a checkpoint, or a safetensors file. Numbers are rounded
    to the model's own types where the source has others of the same kind. Raises CheckpointError.
    """
    path = Path(init_from).expanduser().absolute()
    try:
        place, there, about = _found(path, parallel)
        here = model.state_dict()
        for name, tensor in there.items():
            if name in here and tensor.is_floating_point() and here[name].is_floating_point():
                there[name] = tensor.to(here[name].dtype)
        check_tensors(place, "this model", tensor_kinds(here), tensor_kinds(there), MOST_SHOWN)
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}={init_from}: {error}") from error
    model.load_state_dict(parallel.load_state_dict(there, here))
    return f"weights: {len(there)} tensors of {init_from}{about}"


def _found(path: Path, parallel: Parallel) -> tuple[str, dict[str, Tensor], str]:
    """What to call the source, its weights, and what else is said of it. Rank 0 chooses the checkpoint for all."""
    name, why = on_rank_zero(parallel, lambda: _choice(path))
    if name:
        loaded = load_together(Path(name), parallel, None)
        weights, averaged = weights_of(loaded)
        of_run = f" ({loaded.folder.name}{why})" if why else ""
        return loaded.folder.name, weights, of_run + (", averaged" if averaged else "")
    if not path.is_file() or path.suffix != ".safetensors":
        raise CheckpointError(_what_it_is(path))
    return path.name, read_tensors(path), ""


def _choice(path: Path) -> tuple[str, str]:
    """The folder of the checkpoint that a folder stands for, and why it is that one of several; empty for a file."""
    if not path.is_dir():
        return "", ""
    checkpoints = path if path.name == CHECKPOINTS else path / CHECKPOINTS
    if not checkpoints.is_dir():
        return str(resolve(path.parent, path)), ""
    best = best_checkpoint(checkpoints)
    return (
        (str(best), ", the best") if best is not None else (str(resolve(checkpoints, "last")), ", the last")
    )


def _what_it_is(path: Path) -> str:
    if not path.exists():
        return "no such file or folder"
    return f"not a .safetensors file; trainrun import {path.name} makes one of a torch file"


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
