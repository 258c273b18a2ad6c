"""Random numbers of a user's own code: seeded for each sample, or kept away from the training's.

The global generators (`random`, `numpy.random`, torch's default one) belong to the whole process. Where
the training is paused or elsewhere (in a worker, in the main process between two steps), they are seeded
by (seed, epoch, index) before a sample. During a running training that cannot be done, and a number drawn
from them would change the model's dropout: see `Guard`. What always works is a generator of its own: a
`__getitem__`, or a transform, with a parameter `generator` gets a torch.Generator seeded by (seed, epoch,
index), and a `__getitems__` with a parameter `generators` a list of them, one for each sample.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainrun.data.engines.workers import seed_globals
from trainrun.errors import DataError
from trainrun.seeding import derive_seed

WAY_OUT = (
    "give it a parameter `generator` (a torch.Generator, seeded for each sample) and draw from that, "
    "or use data.engine=workers"
)


class GlobalDraw(DataError):
    """A number was, or was about to be, drawn from a generator that the training draws from too."""


def takes(function: Any, name: str) -> bool:
    """Whether a callable has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some that are written in C cannot say
        return False


def generator_of(*parts: int) -> torch.Generator:
    """A new generator whose numbers depend on `parts` alone."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def states() -> tuple[Any, ...]:
    """Where the global generators of this process stand, to be compared."""
    name, keys, position, *rest = np.random.get_state(legacy=True)
    return (
        random.getstate(),
        (name, keys.tobytes(), position, *rest),  # type: ignore[union-attr]
        torch.default_generator.get_state().numpy().tobytes(),
    )


def moved(before: tuple[Any, ...]) -> str:
    """Which global generators were used since `before = states()`; empty if none was."""
    names = ("random", "numpy.random", "torch")
    pairs = zip(names, before, states(), strict=True)
    return " and ".join(name for name, old, new in pairs if old != new)


def global_draw(what: str, which: str) -> GlobalDraw:
    return GlobalDraw(
        f"data.engine=threads: {what} draws from the global generator of {which}, which the training beside "
        f"it draws from too; {WAY_OUT}"
    )


# How a reader calls the user's code. parts: what the numbers of this call depend on; what: for messages.
Calling = Callable[[tuple[int, ...], str], AbstractContextManager[None]]


def seeded(parts: tuple[int, ...], what: str) -> AbstractContextManager[None]:
    """The global generators seeded: for a process, or a moment, in which nobody else draws."""
    seed_globals(*parts)
    return nullcontext()


@contextmanager
def guarded(parts: tuple[int, ...], what: str) -> Iterator[None]:
    """The global generators left alone, and torch's defended: for a thread during the training."""
    with Guard(what) as guard:
        yield
    if guard.fault is not None:
        raise guard.fault  # the user's code may have caught it


@contextmanager
def watched(parts: tuple[int, ...], what: str) -> Iterator[None]:
    """Seeded, and refused where a number was drawn: for a trial before any thread runs."""
    seed_globals(*parts)
    before = states()
    yield
    if which := moved(before):
        raise global_draw(what, which)


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # how torch has it extended
    """Refuses, in this thread alone, every torch operator that would draw from the default generator.

    It does so before the number is drawn, so the training's numbers have not moved. Costs about 5 us an
    operator. `random` and `numpy.random` it cannot see: they are tried before the run (`watched`), and
    looked at whenever the training waits for a batch (threads.py).
    """

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.what = what
        self.fault: GlobalDraw | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch wraps the method below so that its first call imports torch._dynamo, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        if torch.Tag.nondeterministic_seeded in func.tags and not _any_generator(given):
            self.fault = global_draw(f"{self.what} ({func})", "torch")
            raise self.fault
        return func(*args, **kwargs)


def _any_generator(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Generator) for value in values)
