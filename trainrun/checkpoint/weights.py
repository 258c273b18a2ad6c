"""A safetensors file of weights: the start of a run (`init_from`), or what `trainrun import` made."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor, nn

from trainrun.checkpoint.manifest import open_regular
from trainrun.checkpoint.match import check_tensors, tensor_kinds
from trainrun.checkpoint.tensor_file import parse_header, read_header, read_tensors
from trainrun.errors import CheckpointError

KEY = "init_from"


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


def load_initial(model: nn.Module, init_from: str) -> str:
    """Copies the weights of a file into a model that has exactly those; the line that says so.

    Numbers are rounded to the model's own types where the file has others of the same kind.
    """
    path = Path(init_from).expanduser().absolute()
    if not path.is_file() or path.suffix != ".safetensors":
        raise CheckpointError(f"{KEY}={init_from}: {_what_it_is(path)}")
    here, there = model.state_dict(), read_weights(path)
    for name, tensor in there.items():
        if name in here and tensor.is_floating_point() and here[name].is_floating_point():
            there[name] = tensor.to(here[name].dtype)
    try:
        check_tensors(path.name, "this model", tensor_kinds(here), tensor_kinds(there))
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}={init_from}: {error}") from error
    model.load_state_dict(there)
    return f"weights: {len(there)} tensors of {init_from}"


def _what_it_is(path: Path) -> str:
    if path.is_dir():
        return "is a folder; ckpt_path=... goes on from a checkpoint of a run"
    if not path.exists():
        return "no such file"
    return f"not a .safetensors file; trainrun import {path.name} makes one of a torch file"
