"""A window that runs again: what is put back, what is cut, and what is refused."""

from __future__ import annotations

import random
import weakref
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from exact_parts import FEATURES, parts_of
from torch import Tensor, nn

from trainrun.data.split_batch import count_rows, split_micro_batch
from trainrun.interfaces import MicroBatch, StepOutput
from trainrun.parallel.single import Single
from trainrun.seeding import read_random_state, set_random_state
from trainrun.training.evaluate import compute_sums
from trainrun.training.recovery.nonfinite import count_nonfinite
from trainrun.training.recovery.oom import (
    BufferCopies,
    OomRetry,
    describe_out_of_memory,
    list_non_finite_buffers,
)

SINGLE = Single(torch.device("cpu"))
NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:113] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)


class Squares:
    """A loss that is a sum over samples."""

    def count(self, batch: Any) -> int:
        return len(batch)

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(model(batch).square().sum())


class Keeps(Squares):
    """One with state of its own, which a failed attempt may have changed."""

    def state_dict(self) -> dict[str, int]:
        return {"calls": 3}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Pairs(Squares):
    """One that couples them."""

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        return StepOutput(-(model(batch) @ model(batch).T).log_softmax(1).diagonal().sum())


class Writes(nn.Module):
    """Writes into one buffer, replaces another, and leaves a third alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.count: Tensor
        self.sum: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("sum", torch.zeros(3))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("links", torch.eye(3).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.sum = self.sum + x.sum(0)
        return self.layer(x)


def windows(count: int = 1, rows: int = 8) -> list[MicroBatch]:
    return [MicroBatch(torch.arange(rows * 3.0).view(rows, 3) + i) for i in range(count)]


def failing(limit: int, work: Callable[[Tensor], Any], error: type[Exception] = RuntimeError) -> Any:
    """Does the work, then fails above `limit` rows."""

    def compute(window: list[MicroBatch]) -> list[Any]:
        found = []
        for batch in window:
            found.append(work(batch.data))
            if len(batch.data) > limit:
                raise error(NO_MEMORY)
        return found

    return compute


DRAWS: dict[str, Callable[[Any], float]] = {
    "torch": lambda _: torch.rand(()).item(),
    "torch normal": lambda _: torch.randn(3).sum().item(),
    "python": lambda _: random.random(),
    "python normal": lambda _: random.gauss(0, 1),
    "numpy": lambda _: float(numpy.random.rand()),
    "numpy normal": lambda _: float(numpy.random.randn()),
}


@pytest.mark.parametrize("how", DRAWS)
@pytest.mark.parametrize("earlier_windows", [0, 1, 2, 5, 64])
@pytest.mark.parametrize("draws_earlier", [True, False])
def test_random_states_are_as_at_the_start_of_the_window(
    how: str, earlier_windows: int, draws_earlier: bool
) -> None:
    """After quiet windows the first draw is in a window whose start was read: the first, the second, the 65th."""
    draw = DRAWS[how]
    retry = OomRetry("split", nn.Linear(3, 3), Squares(), SINGLE, lambda text: None)
    for _ in range(earlier_windows):
        retry.run(windows(), failing(100, draw if draws_earlier else len))
    before = read_random_state()
    if not draws_earlier and earlier_windows in (2, 5):
        with pytest.raises(torch.OutOfMemoryError, match="the first random numbers of .* were drawn"):
            retry.run(windows(), failing(4, draw))
        return
    results = retry.run(windows(), failing(4, draw))
    set_random_state(before)
    assert results == [draw(None) for _ in range(2)]


def test_a_step_that_draws_nothing_runs_again_between_two_readings() -> None:
    retry = OomRetry("split", nn.Linear(3, 3), Squares(), SINGLE, lambda text: None)
    for _ in range(5):
        retry.run(windows(), failing(100, len))
    assert retry.run(windows(), failing(4, len)) == [4, 4]


@pytest.mark.parametrize("quiet_windows", [0, 4])
def test_buffers_are_as_at_the_start_of_the_window(quiet_windows: int) -> None:
    model = Writes()
    retry = OomRetry("split", model, Squares(), SINGLE, lambda text: None)
    for _ in range(quiet_windows):
        retry.run(windows(), failing(100, model))
    before, expected = model.sum.clone(), model.count + 2
    retry.run(windows(), failing(4, model))
    assert model.count == expected
    assert torch.equal(model.sum, before + windows()[0].data.sum(0))
    assert torch.equal(model.table, torch.ones(3))
    assert list(model.state_dict()) == ["count", "sum", "table", "layer.weight", "layer.bias"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_buffer_may_be_not_finite() -> None:
    model = Writes()
    assert list_non_finite_buffers(model) == []
    model.links = torch.tensor([[0.0, float("nan")]]).to_sparse()
    assert list_non_finite_buffers(model) == ["links"]
    model.links = model.links.to_sparse_csr()
    assert list_non_finite_buffers(model) == ["links"]
    assert count_nonfinite(model.links) == 1


def test_a_buffer_that_only_a_later_window_writes_into_is_said() -> None:
    model = Writes()
    retry = OomRetry("split", model, Squares(), SINGLE, lambda text: None)
    for _ in range(3):
        retry.run(windows(), failing(100, model.layer))
    with pytest.raises(torch.OutOfMemoryError, match="the model's buffer count was written into"):
        retry.run(windows(), failing(4, model))


def test_gradients_of_the_failed_attempt_are_gone() -> None:
    model, told = nn.Linear(3, 1), []
    retry = OomRetry("split", model, Squares(), SINGLE, told.append)

    def work(x: Tensor) -> int:
        model(x).sum().backward()
        return len(x)

    assert retry.run(windows(2), failing(3, work)) == [2] * 8
    torch.testing.assert_close(model.weight.grad[0], sum(batch.data.sum(0) for batch in windows(2)))
    assert len(told) == 1
    assert told[0].startswith("out of memory (DefaultCPUAllocator: can't allocate memory")
    assert "split into 4, 2 samples at a time" in told[0]
    assert retry.run(windows(1, rows=5), failing(3, len)) == [1, 1, 2, 1]  # and told no more
    assert len(told) == 1


def test_of_several_ranks_no_window_runs_again_but_the_pieces_of_before_stay() -> None:
    two = replace(SINGLE, world_size=2)
    retry = OomRetry("split", nn.Linear(3, 3), Squares(), two, lambda text: None)
    retry.load_state_dict({"pieces": 2})
    assert retry.run(windows(), failing(4, len)) == [4, 4]
    with pytest.raises(RuntimeError, match="can't allocate"):
        retry.run(windows(), failing(3, len))
    assert (retry.pieces, "ranks" in retry.refusal) == (2, True)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.OutOfMemoryError])
def test_what_counts_as_out_of_memory(error: type[Exception]) -> None:
    retry = OomRetry("split", nn.Linear(3, 3), Squares(), SINGLE, lambda text: None)
    assert retry.run(windows(), failing(4, len, error)) == [4, 4]


def test_other_errors_are_those_of_the_user() -> None:
    def broken(window: list[MicroBatch]) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        OomRetry("split", nn.Linear(3, 3), Squares(), SINGLE, lambda text: None).run(windows(), broken)
    assert describe_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
    )
    assert describe_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    assert describe_out_of_memory(MemoryError()) == "MemoryError"
    text = "GET was unable to find an engine to execute this computation"  # of cuDNN, on a full GPU
    assert describe_out_of_memory(RuntimeError(text), free=lambda: 0.02) == text
    assert describe_out_of_memory(RuntimeError(text), free=lambda: 0.5) == ""


NORM = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("task", "limit", "reason"),
    [(Pairs(), 4, "sum of their losses"), (Keeps(), 4, "task keeps state"), (Squares(), 0, "one sample")],
)
def test_what_would_compute_something_else_is_refused(task: Any, limit: int, reason: str) -> None:
    model = nn.Linear(3, 3)
    retry = OomRetry("split", model, task, SINGLE, lambda text: None)
    with pytest.raises(torch.OutOfMemoryError, match=f"can't allocate.*{reason}"):
        retry.run(windows(), failing(limit, len))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("mends", [False, True])
def test_a_model_with_batch_norm_is_refused_at_once_and_keeps_nothing_for_a_retry(
    mends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of all buffers in every step, for a second run that is always refused, took up to 9 % of a step."""
    marks: list[BufferCopies] = []
    mark = BufferCopies.mark
    monkeypatch.setattr(BufferCopies, "mark", lambda start: (marks.append(start), mark(start))[1])
    retry = OomRetry("split", NORM, Squares(), SINGLE, lambda text: None, mends=mends)
    for _ in range(3):
        assert retry.run(windows(), failing(8, len)) == [8]
    assert bool(marks) == mends  # trainer.nan_policy=skip puts averages back that are not finite
    with pytest.raises(RuntimeError, match="can't allocate"):
        retry.run(windows(), failing(4, len))
    assert "trainer.out_of_memory=split-batchnorm" in retry.refusal


def test_batch_norm_is_split_where_it_is_allowed_and_frozen_statistics_always() -> None:
    allowed = OomRetry("split-batchnorm", NORM, Squares(), SINGLE, lambda text: None)
    assert allowed.run(windows(), failing(2, len)) == [2] * 4
    with pytest.raises(torch.OutOfMemoryError, match="batch norm needs at least two samples"):
        allowed.run(windows(), failing(1, len))
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    assert OomRetry("split", frozen, Squares(), SINGLE, lambda text: None).run(
        windows(), failing(4, len)
    ) == [4, 4]
    assert [module.training for module in frozen] == [True, False]


def test_a_task_that_draws_numbers_is_not_mistaken_for_one_that_couples() -> None:
    class Noisy(Squares):
        def step(self, model: nn.Module, batch: Any) -> StepOutput:
            return StepOutput((model(batch) + 100 * torch.randn(len(batch), 3)).square().sum())

    torch.manual_seed(0)
    retry = OomRetry("split", nn.Linear(3, 3), Noisy(), SINGLE, lambda text: None)
    assert retry.run(windows(), failing(4, len)) == [4, 4]


def test_off_nothing_is_looked_at() -> None:
    retry = OomRetry("stop", nn.Linear(3, 3), Squares(), SINGLE, lambda text: None)
    with pytest.raises(RuntimeError, match="enforce fail"):
        retry.run(windows(), failing(4, len))
    assert retry.state_dict() == {"pieces": 1}


Named = namedtuple("Named", "x y")


@pytest.mark.parametrize(
    "data",
    [
        (torch.arange(7), torch.rand(7, 2)),
        {"x": torch.arange(7), "names": list("abcdefg"), "none": None},
        Named([torch.arange(7)], torch.rand(7)),
    ],
)
@pytest.mark.parametrize("pieces", [1, 3, 9])
def test_cuts_lose_and_repeat_nothing(data: Any, pieces: int) -> None:
    run = split_micro_batch(MicroBatch(data, last=True), pieces)
    sizes = [count_rows(part.data) for part in run]
    assert len(run) == min(pieces, 7)
    assert max(sizes) - min(sizes) <= 1
    assert type(run[0].data) is type(data)
    firsts = {tuple: lambda d: d[0], dict: lambda d: d["x"], Named: lambda d: d.x[0]}[type(data)]
    assert torch.cat([firsts(part.data) for part in run]).tolist() == list(range(7))
    if isinstance(data, dict):
        assert [name for part in run for name in part.data["names"]] == list("abcdefg")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.zeros(4), torch.zeros(())), r"a tensor of shape \(\) is in a batch of 4 samples"),
        ((torch.zeros(4), torch.zeros(3, 4)), r"shape \(3, 4\)"),
        ({"x": torch.zeros(4), "scale": 2.0}, "a float is in the batch"),
        ({"x": 3}, "holds no tensor"),
    ],
)
def test_what_cannot_be_cut_is_said(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_micro_batch(MicroBatch(data), 2)


def test_the_averages_of_batch_norm_are_put_back() -> None:
    """Torch writes into them without a new version."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    start = BufferCopies(model)
    for _ in range(3):
        start.mark()
        before = [buffer.clone() for buffer in model.buffers()]
        model(torch.randn(4, 3))
    assert start.restore() == ""
    assert all(torch.equal(now, then) for now, then in zip(model.buffers(), before, strict=True))


def limited(model: nn.Module, task: Any, rows: int) -> Callable[[MicroBatch], StepOutput]:
    def compute(batch: MicroBatch) -> StepOutput:
        if count_rows(batch.data) > rows:
            raise RuntimeError(NO_MEMORY)
        out: StepOutput = task.step(model, batch.data)
        return out

    return compute


def test_a_validation_that_does_not_fit_is_computed_in_parts_with_the_same_sum() -> None:
    notes: list[str] = []
    model, batch = nn.Linear(3, 3).eval(), MicroBatch(torch.rand(9, 3))
    retry = OomRetry("split", model, Squares(), SINGLE, notes.append)
    with torch.no_grad():
        whole = limited(model, Squares(), 9)(batch).loss_sum
        for run in (4, 4):  # the second time at once
            found = retry.compute_in_pieces(batch, limited(model, Squares(), 3))
            assert len(found) == run
            torch.testing.assert_close(sum(out.loss_sum for out in found), whole)
    assert [note.partition(" are ")[2] for note in notes] == [
        "split into 2; data.val_batch_size sets their size", "split into 4; data.val_batch_size sets their size",
    ]  # fmt: skip
    assert retry.pieces == 1  # the training's own


@pytest.mark.parametrize(
    ("mode", "task", "rows", "message"),
    [
        ("stop", Squares(), 3, "can't allocate memory"),
        ("split", Squares(), 0, "one sample at a time does not fit either"),
        ("split", Pairs(), 3, "depends on which samples come together"),
    ],
)
def test_a_validation_that_cannot_be_cut_says_why(mode: str, task: Any, rows: int, message: str) -> None:
    model, batch = nn.Linear(3, 3).eval(), MicroBatch(torch.rand(8, 3))
    retry = OomRetry(mode, model, task, SINGLE, lambda text: None)
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        retry.compute_in_pieces(batch, limited(model, task, rows))


def test_what_a_validation_was_cut_in_is_kept_and_what_cannot_be_cut_is_computed_whole() -> None:
    model = nn.Linear(3, 3).eval()
    retry, later = (OomRetry("split", model, Squares(), SINGLE, lambda text: None) for _ in range(2))
    with torch.no_grad():
        retry.compute_in_pieces(MicroBatch(torch.rand(8, 3)), limited(model, Squares(), 4))
    assert retry.state_dict() == {"pieces": 1, "val_pieces": 2}
    later.load_state_dict(retry.state_dict())
    seen: list[Any] = []
    later.compute_in_pieces(MicroBatch(torch.rand(8, 3)), lambda batch: seen.append(len(batch.data)))
    later.compute_in_pieces(
        MicroBatch({"x": torch.rand(8, 3), "name": "a word"}), lambda batch: seen.append("whole")
    )
    assert seen == [4, 4, "whole"]


def test_nothing_but_sums_stays_of_the_parts_of_a_validation() -> None:
    class Alive(Squares):
        def __init__(self) -> None:
            self.logits: list[Any] = []

        def step(self, model: nn.Module, batch: Any) -> StepOutput:
            logits = model(batch)
            self.logits.append(weakref.ref(logits))
            assert sum(ref() is not None for ref in self.logits) <= 1
            return StepOutput(logits.square().sum(), {"largest": lambda: logits.max()})

    run = parts_of(("data.batch_size=8",))
    task, retry = Alive(), OomRetry("split", run.model, Alive(), SINGLE, lambda text: None)
    retry.load_state_dict({"pieces": 1, "val_pieces": 4})
    given = replace(run, task=task, retry=retry)
    found = retry.compute_in_pieces(
        MicroBatch(torch.rand(8, FEATURES)), lambda piece: compute_sums(given, run.model, piece)
    )
    assert [(sorted(sums), rows) for sums, rows, _ in found] == [(["largest", "loss"], {})] * 4
