"""One look at a source, in a child process: what it tells, and what becomes of its faults."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused
from torch.utils.data import Dataset, IterableDataset, Subset

from trainrun.data import look as look_module
from trainrun.data.engines.generators import GLOBAL_GENERATORS, NUMPY, PYTHON, TORCH
from trainrun.data.facts import describe_source
from trainrun.data.look import inspect_source
from trainrun.data.pipeline import open_batches
from trainrun.data.same_samples import hash_samples
from trainrun.data.stream_options import FirstInput, SourceFacts, StreamOptions
from trainrun.errors import DataError
from trainrun.runtime import child_process

N = 40


class Samples(Dataset[Any]):
    """Samples that `read` makes of their numbers; it counts the reads of this process."""

    def __init__(self, read: Any = None) -> None:
        self.read, self.reads = read, list[int]()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        found = None if self.read is None else self.read(index)
        return (torch.full((2, 3), float(index)) if found is None else found), index


def options(**changes: Any) -> StreamOptions:
    fields = {"key": "data.train", "training": True, "batch_size": 4, "seed": 7} | changes
    return StreamOptions(**fields)  # type: ignore[arg-type]


def test_it_tells_what_a_sample_is_and_reads_nothing_in_this_process() -> None:
    source = Samples()
    found = inspect_source(source, options())
    assert (found.first, found.fault) == (FirstInput("floats", (2, 3)), "")
    assert found.sample_bytes == 2 * 3 * 4 + 8
    assert found.seconds > 0
    assert (found.drawn_from, found.draws, found.changes) == ((), {}, ())
    assert source.reads == []


@pytest.mark.parametrize(
    ("source", "changes", "first"),
    [
        (Samples(lambda i: np.zeros(5, np.int32)), {}, FirstInput("integers", (5,))),
        (Samples(lambda i: "a text"), {}, FirstInput("a str", None)),
        (Samples(lambda i: [1, 2, 3]), {}, FirstInput("integers", (3,))),
        (Samples(lambda i: {"label": 1, "image": torch.zeros(1, 4)}), {}, FirstInput("floats", (1, 4))),
        (Samples(), {"transform": lambda sample: (sample[0].long()[:1], 0)}, FirstInput("integers", (1, 3))),
        ((torch.zeros(9, 4), torch.zeros(9)), {}, FirstInput("floats", (4,))),
        (
            (torch.zeros(9, 4), torch.zeros(9)),
            {"transform": lambda s: s[0].bool()},
            FirstInput("integers", (4,)),
        ),
    ],
)
def test_the_first_input(source: Any, changes: dict[str, Any], first: FirstInput) -> None:
    assert inspect_source(source, options(**changes)).first == first


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_nested_tensor_has_no_shape_and_is_left_to_the_collate_function() -> None:
    source = Samples(lambda index: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))
    assert inspect_source(source, options()).first == FirstInput("a Tensor", None)
    stream, _ = open_batches(
        source, options(collate_fn=lambda samples: torch.tensor([row for _, row in samples]))
    )
    assert sorted(next(stream.epoch(0)).data.tolist())


def test_an_iterable_source_is_not_read() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("must not be read")

    assert inspect_source(Stream(), options()).first is None


def fail(index: int) -> None:
    raise KeyError("no such file")


def fail_at_first(index: int) -> None:
    if index == 0:
        fail(index)


def test_a_sample_that_cannot_be_read_is_told_by_who_needs_it() -> None:
    found = inspect_source(Samples(fail), options())
    assert found.first is None
    line = fail.__code__.co_firstlineno + 1
    assert (
        f"sample 0 of Samples cannot be read: KeyError: 'no such file' ({__file__} line {line})"
        in found.fault
    )
    with refused(DataError):
        describe_source(Samples(fail))
    assert inspect_source(Samples(fail_at_first), options(on_error="skip")).first is not None
    assert inspect_source(Samples(fail_at_first), options()).first is None


@pytest.mark.parametrize("end", [lambda i: os.kill(os.getpid(), signal.SIGKILL), lambda i: os._exit(3)])
def test_a_sample_that_ends_its_process(end: Any) -> None:
    with refused(DataError):
        inspect_source(Samples(end), options())


def test_a_sample_that_calls_sys_exit() -> None:
    def leave(index: int) -> None:
        raise SystemExit(0)

    assert "SystemExit" in inspect_source(Samples(leave), options()).fault


@pytest.mark.parametrize("changes", [{}, {"num_workers": 2}, {"engine": "threads"}])
def test_a_sample_that_never_comes(changes: dict[str, Any]) -> None:
    with refused(DataError, "data.worker_timeout_seconds=0.2", "data.train"):
        inspect_source(Samples(lambda i: time.sleep(600)), options(timeout_seconds=0.2, **changes))


BUFFER = torch.zeros(2)


def fill_buffer(index: int) -> torch.Tensor:
    return BUFFER.fill_(index)


def transform_in_buffer(sample: Any) -> Any:
    return BUFFER.fill_(sample[1]), sample[1]


@pytest.mark.parametrize(
    ("read", "changes"),
    [(fill_buffer, {}), (fill_buffer, {"cache": "memory"}), (None, {"transform": transform_in_buffer})],
)
def test_samples_that_share_their_memory_are_refused(read: Any, changes: dict[str, Any]) -> None:
    with refused(DataError, "data.train"):
        open_batches(Samples(read), options(**changes))


def test_a_batch_of_one_sample_may_share_its_memory_with_the_next() -> None:
    assert inspect_source(Samples(fill_buffer), options(batch_size=1)).fault == ""


@pytest.mark.parametrize("number", [np.full(2, 3, np.uint64), [2**64]])
def test_numbers_that_no_tensor_can_hold_are_refused(number: Any) -> None:
    with refused(DataError, "data.train"):
        next(open_batches(Samples(lambda index: number), options())[0].epoch(0))


class OfAThread(Samples):
    """A thread of its own makes the samples, as in a data set that decodes ahead."""

    def __init__(self) -> None:
        super().__init__(self.ask)
        self.asked, self.done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(
            target=self.work, daemon=True, name="trainrun pretended to be of a library in C"
        ).start()

    def work(self) -> None:
        while True:
            self.asked.acquire()
            self.done.release()

    def ask(self, index: int) -> None:
        self.asked.release()
        self.done.acquire()


def test_who_waits_for_a_thread_of_its_own_is_read_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the main process, as the user asks; at once, if Python knows of the thread."""
    source = OfAThread()
    assert inspect_source(source, options(num_workers=0, timeout_seconds=0.2)).first == FirstInput(
        "floats", (2, 3)
    )
    monkeypatch.setattr(child_process, "OWN_THREADS", ("MainThread",))
    assert inspect_source(source, options(num_workers=0, timeout_seconds=0)).first == FirstInput(
        "floats", (2, 3)
    )


def test_where_cuda_was_started_nothing_is_forked_that_the_main_process_will_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(look_module, "can_fork_safely", lambda: False)
    for changes, here in (({"num_workers": 0}, True), ({}, True), ({"num_workers": 2}, False)):
        source, state = Samples(lambda i: torch.rand(2, 3)), torch.get_rng_state()
        assert inspect_source(source, options(**changes)).first == FirstInput("floats", (2, 3))
        assert bool(source.reads) == here
        assert torch.equal(torch.get_rng_state(), state)


def state_put_back(index: int) -> torch.Tensor:
    """Depends on the generator, and does not move it."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(2, 3)


@pytest.mark.parametrize(
    ("read", "drawn_from"),
    [
        (lambda i: None, ()),
        (lambda i: torch.rand(2, 3), (TORCH,)),
        (lambda i: torch.full((2, 3), random.random()), (PYTHON,)),
        (lambda i: torch.full((2, 3), np.random.randn()), (NUMPY,)),
        (lambda i: torch.full((2, 3), random.random() + np.random.rand()), (PYTHON, NUMPY)),
        (lambda i: torch.full((2, 3), float(torch.initial_seed() % 1000)), GLOBAL_GENERATORS),
        (state_put_back, GLOBAL_GENERATORS),
        (lambda i: torch.rand(2, 3, generator=torch.Generator().manual_seed(i)), ()),
    ],
)
def test_the_generators_that_samples_depend_on(read: Any, drawn_from: tuple[str, ...]) -> None:
    assert inspect_source(Samples(read), options()).drawn_from == drawn_from


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((torch.zeros(2), 1), (torch.zeros(2), 2)),
        (torch.zeros(2), torch.zeros(1, 2)),
        ({"a": "x"}, {"a": "y"}),
        ([np.float32(1)], [np.float64(1)]),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
    ],
)
def test_samples_that_differ_have_other_digests(left: Any, right: Any) -> None:
    assert hash_samples([left]) != hash_samples([right])
    assert hash_samples([left]) == hash_samples([left])


def test_what_holds_no_numbers_counts_by_its_type() -> None:
    assert hash_samples([(object(), None)]) == hash_samples([(object(), None)])
    assert hash_samples([torch.tensor([float("nan")])]) == hash_samples([torch.tensor([float("nan")])])


def draws_late(index: int) -> torch.Tensor:
    """Random in samples that no look reads."""
    known = torch.full((2, 3), float(index))
    if index % 10 == 2:
        return known + random.random()
    return known + np.random.rand() if index % 10 == 4 else known


def read_all(reader: Any, **changes: Any) -> list[Any]:
    stream = open_batches(reader, options(**changes))[0]
    batches = [(b.data[0].tolist(), b.data[1].tolist()) for epoch in (0, 1) for b in stream.epoch(epoch)]
    stream.close()
    return batches


@pytest.mark.parametrize("read", [draws_late, lambda i: torch.rand(2, 3), state_put_back, lambda i: None])
def test_samples_are_those_that_are_seeded_each(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what moves is seeded; in every batch, the samples are those of a reader that seeds all."""
    found = read_all(Samples(read), num_workers=0)
    assert read_all(Subset(Samples(read), range(N)), num_workers=0) == found
    monkeypatch.setattr(
        look_module, "_look", lambda dataset, options: SourceFacts(FirstInput("floats", (2, 3)))
    )
    assert read_all(Samples(read), num_workers=0) == found


class AtOnce(Samples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def draws_late_again(index: int) -> torch.Tensor:
    """Random in one sample that a look reads, of a source that also reads many at once."""
    return torch.full((2, 3), index + (random.random() if index % 10 == 1 else 0))


@pytest.mark.parametrize("read", [draws_late, draws_late_again])
def test_many_read_at_once_are_those_that_are_read_one_by_one(read: Any) -> None:
    expected = read_all(Samples(read), num_workers=0)
    assert read_all(AtOnce(read), num_workers=0) == expected
    samples = {
        index: x
        for xs, ys in read_all(AtOnce(read), num_workers=0, batch_size=8)
        for x, index in zip(xs, ys, strict=True)
    }
    assert samples == {index: x for xs, ys in expected for x, index in zip(xs, ys, strict=True)}


@pytest.mark.process
def test_workers_read_the_same_of_what_draws_late() -> None:
    assert read_all(Samples(draws_late), num_workers=2) == read_all(Samples(draws_late), num_workers=0)


def test_the_training_draws_on_as_if_nothing_had_been_read() -> None:
    """Also where the data set draws, and a normal number of NumPy's waits to be given out."""
    np.random.seed(3)
    random.seed(3)
    torch.manual_seed(3)
    np.random.randn()
    before = np.random.get_state()
    expected = np.random.randn(3).tolist(), random.random(), torch.rand(2).tolist()
    for read in (
        lambda i: None,
        draws_late,
        lambda i: torch.full((2, 3), np.random.randn() + random.gauss(0, 1)),
    ):
        np.random.set_state(before)
        random.seed(3)
        torch.manual_seed(3)
        read_all(Samples(read), num_workers=0)
        assert (np.random.randn(3).tolist(), random.random(), torch.rand(2).tolist()) == expected
