"""The weights that a run begins with (`init_from`): those of another run, or of a safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor, nn

from trainrun.checkpoint.format import Loaded
from trainrun.checkpoint.manifest import open_regular
from trainrun.checkpoint.match import check_tensors, tensor_kinds
from trainrun.checkpoint.ranking import best_checkpoint
from trainrun.checkpoint.resume import load_together, resolve
from trainrun.checkpoint.tensor_file import parse_header, read_header, read_tensors
from trainrun.checkpoint.together import on_rank_zero
from trainrun.errors import CheckpointError
from trainrun.interfaces import Parallel

KEY = "init_from"
CHECKPOINTS = "checkpoints"  # in a run folder
MOST_SHOWN = 20  # tensors that do not fit


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a file. Raises CheckpointError."""
    with open_regular(path) as file:
        return read_tensors(file, os.fstat(file.fileno()).st_size, str(path))[0]


def check_file(path: Path) -> None:
    """Raises CheckpointError unless the header describes the file to the last byte."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = read_header(file, size, str(path))
        parse_header(header, size - 8 - len(header), str(path))


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
    model.load_state_dict(there)
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
    return path.name, read_weights(path), ""


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
