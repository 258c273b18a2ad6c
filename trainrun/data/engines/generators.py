"""Random numbers of a user's own code: seeded for each sample, or kept away from the training's.

Where the training is paused or elsewhere (in a worker, in the main process between two steps), the global generators
are seeded by (seed, epoch, index) before a sample. A thread beside the training cannot do that, and a number drawn
there would change the model's dropout: see `Guard`. What always works is a parameter: a `__getitem__`, or a transform,
with `generator` gets a torch.Generator seeded by (seed, epoch, index), a `__getitems__` with `generators` a list.
"""

from __future__ import annotations

import inspect
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from types import FunctionType, ModuleType
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


def noting(found: set[str]) -> Calling:
    """Seeded, and `what` of each call that drew a number is put into the set: as above, for a trial."""

    @contextmanager
    def calling(parts: tuple[int, ...], what: str) -> Iterator[None]:
        seed_globals(*parts)
        before = states()
        yield
        if states() != before:
            found.add(what)

    return calling


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


GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
LEAVES = (str, bytes, int, float, complex, torch.Tensor, np.ndarray, type, ModuleType, FunctionType)
MOST_OBJECTS = 2000  # looked at
MOST_PARTS = 48  # of one container: a list of a million names is not walked through


def kept_generators(source: Any) -> list[tuple[str, Any]]:
    """The generators that an object keeps for itself, each with its place, as `.transform.rng`.

    What they give depends on all reads before: a resume, and each worker, begins them anew.
    """
    of_all = (
        torch.default_generator,
        getattr(np.random.mtrand, "_rand", None),
        getattr(random, "_inst", None),
    )
    waiting, seen, looks, found = deque([("", source)]), {id(source)}, 0, []
    while waiting and looks < MOST_OBJECTS:
        name, value = waiting.popleft()
        looks += 1
        if isinstance(value, GENERATORS):
            if not isinstance(value, random.SystemRandom) and all(value is not one for one in of_all):
                found.append((name, value))
            continue
        with suppress(Exception):  # a user's attribute may raise anything
            for label, part in _parts(value):
                if id(part) not in seen and part is not None and not isinstance(part, LEAVES):
                    seen.add(id(part))
                    waiting.append((name + label, part))
    return found


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Containers of Python alone: others may decode what is asked of them."""
    if type(value) in (dict, OrderedDict):
        return [(f"[{key!r}]", part) for key, part in islice(value.items(), MOST_PARTS)]
    if type(value) in (list, tuple):
        return [(f"[{i}]", part) for i, part in enumerate(value[:MOST_PARTS])]
    if isinstance(value, partial):
        return [("", value.func), (".args", value.args), (".keywords", value.keywords)]
    owner = [("", value.__self__)] if hasattr(value, "__self__") else []  # of a method
    return owner + [(f".{name}", part) for name, part in getattr(value, "__dict__", {}).items()]


def drawn_from(kept: list[tuple[str, Any]], read: Callable[[], None]) -> list[str]:
    """The places of the generators that a read draws from, and does not seed itself; each is put back."""
    before = [_state(one) for _, one in kept]
    looks = [list(map(pickle.dumps, before))]
    try:
        for _ in range(2):
            read()
            looks.append([pickle.dumps(_state(one)) for _, one in kept])
    finally:
        for (_, one), state in zip(kept, before, strict=True):
            _put_back(one, state)
    return [name for (name, _), *each in zip(kept, *looks, strict=True) if len(set(each)) == len(each)]


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(torch.from_numpy(state) if isinstance(generator, torch.Generator) else state)
