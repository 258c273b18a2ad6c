"""Read samples before a cache is built: a few for their form and size, and all of them to detect random numbers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import getitem
from typing import Any, NamedTuple

from trainrun.data.cache.samples import Leaf, NotCacheable, SampleForm, flatten_sample, sample_kind
from trainrun.data.engines.batch_reader import has_epochs
from trainrun.data.engines.generators import has_parameter, read_generator_states
from trainrun.data.tensor_dataset import list_parts
from trainrun.errors import DataError
from trainrun.runtime.child_process import report_progress
from trainrun.user_code import format_error_with_line

NUM_PROBES = 9
RANDOM = (
    "and a cache would repeat one random sample; move random code to data.transform, which runs after the cache, or "
    "use data.cache=none"
)


class SampleDigest(NamedTuple):
    form: SampleForm
    leaves: tuple[Leaf, ...]
    num_bytes: int
    digest: str


class Probe(NamedTuple):
    """Facts about samples. form, leaves: the form and the leaves of the first sample that can be read. sample_bytes:
    the size of a sample.

    digest: a hash of all samples that were read. seconds: the time to read a sample.
    """

    form: SampleForm
    leaves: tuple[Leaf, ...]
    sample_bytes: float
    digest: str
    seconds: float = 0.0


def probe_samples(source: Any, where: str) -> Probe:
    """Read some samples, each twice, in a child process because this runs the user's code. `where` begins the
    messages.
    """
    _refuse_generators(source, where)
    last = len(source) - 1
    rows = sorted({round(part * last / (NUM_PROBES - 1)) for part in range(NUM_PROBES)})
    looks: list[SampleDigest] = []
    began = time.perf_counter()
    fault: Exception | None = None
    for row in rows:  # a data set may begin with a damaged sample
        try:
            look = _digest_sample(source[row])
            why = explain_randomness(partial(getitem, source, row), row, look)
        except Exception as error:
            if isinstance(error, NotCacheable) and not looks:
                raise DataError(
                    f"{where}: sample {row} holds {error}, which a cache cannot store; allowed: CPU tensors, arrays, "
                    "numbers, str and bytes in tuples, lists and dicts; convert it in __getitem__, or use "
                    "data.cache=none"
                ) from error
            fault = fault or error
            continue
        if why:
            raise build_randomness_error(source, why, where)
        looks.append(look)
        report_progress()
    if not looks:
        assert fault is not None
        raise DataError(
            f"{where}: none of the samples {', '.join(map(str, rows))} of {type(source).__name__} can be read: "
            f"{format_error_with_line(fault)}"
        ) from fault
    seconds = (time.perf_counter() - began) / (2 * len(rows))
    form, leaves, *_ = looks[0]
    sizes = [
        look.num_bytes for look in looks if sample_kind(look.form, look.leaves) == sample_kind(form, leaves)
    ]
    return Probe(form, leaves, sum(sizes) / len(sizes), repr([look.digest for look in looks]), seconds)


def _digest_sample(sample: Any) -> SampleDigest:
    """Return the digest of a sample, without keeping its buffers. A source may reuse them for its next sample."""
    form, leaves, buffers = flatten_sample(sample)
    digest = hashlib.blake2b(repr((form, leaves)).encode(), digest_size=16)
    for buffer in buffers:
        digest.update(buffer.data)
    return SampleDigest(form, leaves, sum(buffer.nbytes for buffer in buffers), digest.hexdigest())


def _refuse_generators(source: Any, where: str) -> None:
    """Raise DataError if a source takes generators or epochs, because the cache would hide that its samples are
    random.
    """
    methods = {"__getitem__": "generator", "__getitems__": "generators"}
    for part, (method, name) in product(list_parts(source), methods.items()):
        if has_parameter(getattr(part, method, None), name):
            reason = f"{type(part).__name__}.{method} takes `{name}`, so it draws random numbers"
            raise DataError(f"{where}: {reason}, {RANDOM}")
        if has_epochs(part):
            reason = f"{type(part).__name__} has set_epoch, so its samples may change with the epoch"
            raise DataError(f"{where}: {reason}, {RANDOM}")


def explain_randomness(read: Callable[[], Any], row: int, look: SampleDigest | None = None) -> str:
    """Return why a sample is random; empty if a second read gives the same and uses no global generator.

    The first read, for `look`, may use random numbers, for example to prepare something once.
    """
    look = _digest_sample(read()) if look is None else look
    before = read_generator_states()
    if _digest_sample(read()).digest != look.digest:
        return f"sample {row} differs each time it is read"
    return "" if read_generator_states() == before else f"random numbers are drawn while sample {row} is read"


def build_randomness_error(source: Any, why: str, where: str) -> DataError:
    return DataError(f"{where}: {why} (by {type(source).__name__}), {RANDOM}")
