"""Random numbers of a user's own code: seeded for each sample, or kept away from the training's.

Where the training is paused or elsewhere (in a worker, in the main process between two steps), the global generators
are seeded by (seed, epoch, index) before a sample. A thread beside the training cannot do that, and a number drawn
there would change the model's dropout: see `Guard`. What always works is a parameter: a `__getitem__`, or a transform,
with `generator` gets a torch.Generator seeded by (seed, epoch, index), a `__getitems__` with `generators` a list.
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

from trainrun.errors import DataError
from trainrun.seeding import derive_seed


class GlobalDraw(DataError):
    """A number was, or was about to be, drawn from a generator that the training draws from too."""


# How a reader calls the user's code. parts: what the numbers of this call depend on; what: for messages.
Calling = Callable[[tuple[int, ...], str], AbstractContextManager[None]]


def takes(function: Any, name: str) -> bool:
    """Whether a callable has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some that are written in C cannot say
        return False


def generator_of(*parts: int) -> torch.Generator:
    """A new generator whose numbers depend on `parts` alone."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def seed_globals(*parts: int) -> None:
    """Seed the generators that a user's `__getitem__` may draw from, by a hash of `parts`."""
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed would seed every accelerator as well, or record a stack trace for each call.
    torch.default_generator.manual_seed(seed)


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
    """Seeded, and refused if a number was drawn: for a trial before any thread runs."""
    seed_globals(*parts)
    before = states()
    yield
    changed = [name for name, state in states().items() if state != before[name]]
    if changed:
        raise _global_draw(what, " and ".join(changed))


def states() -> dict[str, Any]:
    """Where the global generators of this process stand, to be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "random": random.getstate(),
        "numpy.random": (name, keys.tobytes(), *rest),  # type: ignore[union-attr]
        "torch": torch.default_generator.get_state().numpy().tobytes(),
    }


def _global_draw(what: str, which: str) -> GlobalDraw:
    return GlobalDraw(
        f"data.engine=threads: {what} draws from the global generator of {which}, which the training beside "
        "it draws from too; give it a parameter `generator` (a torch.Generator, seeded for each sample) and draw "
        "from that, or use data.engine=workers"
    )


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # how torch has it extended
    """Refuses, in this thread alone, every torch operator that would draw from the default generator.

    It does so before the number is drawn, so the training's numbers have not moved. Costs about 5 us an
    operator. `random` and `numpy.random` it cannot see: they are tried before the run (`watched`),
    and compared whenever the training waits for a batch (threads.py).
    """

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.what = what
        self.fault: GlobalDraw | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Or torch wraps the method below so that its first call imports torch._dynamo, which takes seconds."""
        return False

    # Torch keeps one flag for all threads of whether a mode is on, and the compiler of 2.8 leaves out what the
    # training calls meanwhile, or for ever where two threads end in another order. These two say: not this mode.

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        if torch.Tag.nondeterministic_seeded in func.tags and not named:
            self.fault = _global_draw(f"{self.what} ({func})", "torch")
            raise self.fault
        return func(*args, **kwargs)
