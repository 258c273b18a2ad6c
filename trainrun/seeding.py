"""Random states: derive seeds, save and restore the generators of a process, and evaluate without moving them."""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import random
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import numpy
import torch
from torch import nn

MT19937_BYTES = 624 * 4 + 4  # its words and the position in them


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed that depends on all parts and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


def build_memory_reader(value: Any) -> Callable[[], bytes]:
    """Return a function that copies the memory of an object after its type and reference count. CPython only."""
    size_of_head = object.__basicsize__
    return partial(ctypes.string_at, id(value) + size_of_head, type(value).__basicsize__ - size_of_head)


def build_python_memory_reader(generator: random.Random) -> Callable[[], Any]:
    """Return a function that returns another value after each draw from one of Python's generators."""
    words = build_memory_reader(generator)
    return lambda: (words(), getattr(generator, "gauss_next", None))


def build_numpy_memory_reader(generator: Any, find_bits: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that returns another value after each draw from a RandomState of NumPy.

    It returns None for a bit generator other than the Mersenne Twister. A RandomState holds half of a pair of
    Gaussian numbers; everything else is in its bit generator.
    """
    half_of_pair = build_memory_reader(generator)

    def read() -> Any:
        bits = find_bits()
        if type(bits) is not numpy.random.MT19937:
            return None
        return half_of_pair(), ctypes.string_at(bits.ctypes.state_address, MT19937_BYTES)

    return read


@cache
def is_memory_changed_by_draws() -> bool:
    """Return whether every draw changes the memory that `GlobalGenerator` compares, tested on new generators."""
    if sys.implementation.name != "cpython":
        return False
    of_python, of_numpy = random.Random(0), numpy.random.RandomState(0)
    memory = (
        build_python_memory_reader(of_python),
        build_numpy_memory_reader(of_numpy, lambda: of_numpy._bit_generator),
    )
    for generator, draw in (
        (0, of_python.random),
        (0, of_python.random),
        (1, of_numpy.randn),
        (1, of_numpy.randn),
    ):
        before = [read() for read in memory]
        draw()
        changed = [read() != value for read, value in zip(memory, before, strict=True)]
        if changed != [generator == 0, generator == 1]:
            return False
    return True


class Generator(Protocol):
    """A random generator. `state` returns the same object as before if nothing was drawn since."""

    def state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class TorchGenerator:
    """A generator of torch. `state` returns the same tensor as before if nothing was drawn since."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._newest = torch.empty(0, dtype=torch.uint8)

    def state(self) -> torch.Tensor:
        state = self._generator.get_state()
        if not torch.equal(state, self._newest):
            self._newest = state
        return self._newest

    def set_state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)


class GlobalGenerator:
    """A generator of this process whose state is read and written only if something was drawn.

    NumPy takes 70 us to read its state and as long to write it; Python takes 16 and 7. Comparing their memory takes
    1 us. read, write: functions for the complete state. memory: returns what every draw changes; None if it cannot
    be read.
    """

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], None], memory: Callable[[], Any]
    ) -> None:
        self._read, self._write, self._memory = read, write, memory
        self._newest: tuple[Any, Any] = (None, None)  # a mark, and the state that belongs to it

    def mark(self) -> Any:
        """Return a value that differs once something was drawn."""
        mark = self._memory() if is_memory_changed_by_draws() else None
        return pickle.dumps(self._read()) if mark is None else mark

    def state(self) -> Any:
        mark = self.mark()
        if self._newest[0] != mark:
            self._newest = mark, self._read()
        return self._newest[1]

    def set_state(self, state: Any) -> None:
        """Restore a state that `state` returned."""
        mark, newest = self._newest
        if newest is not state or self.mark() != mark:
            self._write(state)
            self._newest = self.mark(), state


NUMPYS_OWN: Any = numpy.random.get_state.__self__  # type: ignore[attr-defined]
FIND_BITS: Callable[[], Any] = numpy.random.get_bit_generator  # type: ignore[attr-defined]  # its types lack it
PYTHON_GENERATOR = GlobalGenerator(
    random.getstate,
    random.setstate,
    build_python_memory_reader(random.getstate.__self__),  # type: ignore[attr-defined]
)
NUMPY_GENERATOR = GlobalGenerator(
    partial(numpy.random.get_state, legacy=False),
    numpy.random.set_state,
    build_numpy_memory_reader(NUMPYS_OWN, FIND_BITS),
)


def read_random_state() -> dict[str, Any]:
    """Return the state of every global generator of this process, as a tree of plain values and tensors."""
    version, words, gauss = PYTHON_GENERATOR.state()
    of_numpy = NUMPY_GENERATOR.state()
    words_of_numpy = torch.from_numpy(of_numpy["state"]["key"].astype("int64"))
    return {
        "python": [version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
        "cuda": read_cuda_states(),
        "numpy": [of_numpy["bit_generator"], words_of_numpy, int(of_numpy["state"]["pos"]),
                  int(of_numpy["has_gauss"]), float(of_numpy["gauss"])],
    }  # fmt: skip


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the state that `read_random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    set_cuda_states(state["cuda"])
    if "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), position, has_gauss, cached))


def read_cuda_states() -> list[torch.Tensor]:
    """Return the state of the GPU on which this process trains.

    The list is empty if CUDA was not started, because reading the state would start it.
    """
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.cuda.get_rng_state()] if started else []


def set_cuda_states(states: list[torch.Tensor]) -> None:
    if states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states[0])


@contextmanager
def restore_random_state() -> Iterator[None]:
    """Restore the state of the global generators after the block."""
    python, of_numpy = PYTHON_GENERATOR.state(), NUMPY_GENERATOR.state()
    cpu, cuda = torch.default_generator.get_state(), read_cuda_states()
    try:
        yield
    finally:
        PYTHON_GENERATOR.set_state(python)
        NUMPY_GENERATOR.set_state(of_numpy)
        torch.default_generator.set_state(cpu)
        set_cuda_states(cuda)


def has_plain_train_and_eval(module: nn.Module) -> bool:
    """Return whether `train` and `eval` of a module do nothing but set the attribute `training`."""
    kind, attributes = type(module), module.__dict__
    if "train" in attributes or "eval" in attributes or hasattr(kind, "training"):
        return False
    methods = kind.train, kind.eval, kind.__setattr__, kind.children, kind.named_children
    usual = (
        nn.Module.train,
        nn.Module.eval,
        nn.Module.__setattr__,
        nn.Module.children,
        nn.Module.named_children,
    )
    return methods == usual


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode without gradients inside the block. Restore its modes and the random state
    after it.

    `eval` takes 3 us for a module; writing the attribute into its dictionary takes 0.1 us.
    """
    modules = list(model.modules())
    was_training, modes = model.training, [module.training for module in modules]
    is_plain = all(map(has_plain_train_and_eval, modules))
    if is_plain:
        for module in modules:
            module.__dict__["training"] = False
    else:
        model.eval()
    try:
        with torch.no_grad(), restore_random_state():
            yield
    finally:
        if is_plain:
            for module in model.modules():  # one that the evaluation has made is in the mode of the model
                module.__dict__["training"] = was_training
            for module, training in zip(modules, modes, strict=True):
                module.__dict__["training"] = training
        else:
            model.train(was_training)  # which may do more than set modes
            for module, training in zip(modules, modes, strict=True):
                if module.training is not training:
                    module.training = training
