"""Random states: derived seeds, the generators of a process saved and put back, and evaluations that move none."""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every part, and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch on every device."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """The state of every global generator of this process, as a tree of plain values and tensors."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
        "cuda": cuda_states(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        words_of_numpy = torch.from_numpy(keys.astype("int64"))
        state["numpy"] = [name, words_of_numpy, int(position), int(has_gauss), float(cached)]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    set_cuda_states(state["cuda"])
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, cached))


def cuda_states() -> list[torch.Tensor]:
    """Return the state of the one GPU that this process trains on.

    The list is empty if CUDA was not started, since asking for the state would start it.
    """
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.cuda.get_rng_state()] if started else []


def set_cuda_states(states: list[torch.Tensor]) -> None:
    if states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states[0])


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever draws random numbers inside, the generators outside go on as if it had not."""
    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = cuda_states()
    numpy = sys.modules.get("numpy")
    kept = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        set_cuda_states(cuda)
        if numpy is not None and kept is not None:
            numpy.random.set_state(kept)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, `model` evaluates without gradients; the modes of modules and random numbers are as before afterwards."""
    whole, modes = model.training, [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), kept_random_state():
            yield
    finally:
        model.train(whole)  # which may do more than set modes
        for module, training in modes:
            module.training = training
