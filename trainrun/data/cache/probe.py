"""A look at a few samples before a cache is laid out: what they are, how large, and whether they are random."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from trainrun.data.cache.slots import record_bytes
from trainrun.data.cache.tree import Form, Leaf, NotKept, Parts, signature, take_apart
from trainrun.errors import DataError
from trainrun.process.usercode import line_of
from trainrun.randomness import kept_random_state

NUM_PROBES = 9


@dataclass(frozen=True)
class Probe:
    """form, leaves: of the first sample that can be read. equal_shapes: all that were looked at agree.

    mean_record_bytes: of one sample in an arena. digest: of all that was read.
    """

    form: Form
    leaves: tuple[Leaf, ...]
    equal_shapes: bool
    mean_record_bytes: float
    digest: str

    @property
    def sample_bytes(self) -> float:
        """What one sample takes."""
        if self.equal_shapes:
            return sum(leaf.num_bytes for leaf in self.leaves)
        return self.mean_record_bytes


class _Look(NamedTuple):
    parts: Parts
    digest: bytes


def look_at(source: Any, where: str) -> Probe:
    """Reads the first sample twice, and some more once. `where` begins the messages."""
    last = len(source) - 1
    rows = sorted({round(part * last / (NUM_PROBES - 1)) for part in range(NUM_PROBES)})
    with kept_random_state():
        first, look = _first_look(source, rows, where)
        _refuse_random(source, first, look, where)
        looks = [look, *(other for row in rows if row > first and (other := _try_look(source, row)))]
    parts = look.parts
    alike = [other.parts for other in looks if _signature(other.parts) == _signature(parts)]
    return Probe(
        parts.form, parts.leaves,
        equal_shapes=all(other.leaves == parts.leaves for other in alike),
        mean_record_bytes=sum(map(record_bytes, alike)) / len(alike),
        digest=hashlib.blake2b(b"".join(other.digest for other in looks), digest_size=16).hexdigest(),
    )  # fmt: skip


def _first_look(source: Any, rows: list[int], where: str) -> tuple[int, _Look]:
    """At the first of the rows that can be read: a data set may begin with a damaged sample."""
    fault: Exception | None = None
    for row in rows:
        try:
            sample = source[row]
        except Exception as error:
            fault = fault or error
            continue
        try:
            return row, _look(sample)
        except NotKept as error:
            raise DataError(
                f"{where}: sample {row} holds {error}, which no cache can keep; allowed: CPU tensors, arrays, "
                "numbers, str and bytes in tuples, lists and dicts; convert it in __getitem__, or use "
                "data.cache=none"
            ) from error
    assert fault is not None
    raise DataError(
        f"{where}: none of the samples {', '.join(map(str, rows))} of {type(source).__name__} can be read: "
        f"{type(fault).__name__}: {fault}{line_of(fault)}"
    ) from fault


def _try_look(source: Any, row: int) -> _Look | None:
    """None where the sample cannot be read or kept; who asks for it by its number gets the fault."""
    try:
        return _look(source[row])
    except Exception:
        return None


def _look(sample: Any) -> _Look:
    """The buffers are let go: a source may use them again for its next sample."""
    parts = take_apart(sample)
    digest = hashlib.blake2b(_signature(parts).encode(), digest_size=16)
    for leaf, buffer in zip(parts.leaves, parts.buffers, strict=True):
        digest.update(repr(leaf.shape).encode())
        digest.update(buffer.data)
    return _Look(Parts(parts.form, parts.leaves, ()), digest.digest())


def _signature(parts: Parts) -> str:
    return signature(parts.form, parts.leaves)


def _refuse_random(source: Any, row: int, look: _Look, where: str) -> None:
    """The second read must give the same, and draw from no global generator.

    The first may draw: to prepare something once, or because it seeds the generators itself.
    """
    before = _generators()
    again = _look(source[row])
    if again.digest != look.digest:
        why = f"sample {row} is another one each time it is read"
    elif _generators() != before:
        why = f"random numbers are drawn while sample {row} is read"
    else:
        return
    raise DataError(
        f"{where}: {why} (by {type(source).__name__}), and a cache would keep one draw for ever; move what is "
        "random to data.transform, which comes after the cache, or use data.cache=none"
    )


def _generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return (
        random.getstate(),
        (name, np.asarray(keys).tobytes(), *rest),
        torch.get_rng_state().numpy().tobytes(),
    )
