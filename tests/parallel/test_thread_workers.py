"""`parallel=threads`: slices of a micro-batch in threads, against one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from approved import refused
from exact_parts import fitted, parts_of, result

from trainrun.errors import PluginError

pytestmark = pytest.mark.train

THREADS = ("parallel=threads", "parallel.devices=3")
TOKENS = ("data.train._target_=exact_parts.tokens", "data.train.count=29")
FLOAT64 = ("precision=64-true", "trainer.max_epochs=2")


def largest_difference(left: list[list[float]], right: list[list[float]]) -> float:
    flat = [torch.cat([torch.tensor(part, dtype=torch.float64) for part in parts]) for parts in (left, right)]
    return float((flat[0] - flat[1]).abs().max())


@pytest.mark.parametrize(
    "words",
    [
        (*TOKENS, "model=thread_parts.Varied", "task=exact_tasks.Mean"),
        (*TOKENS, "model=thread_parts.Varied", "task=exact_tasks.Rich", "ema=true", "ema.decay=0.5"),
        (*TOKENS, "task=exact_tasks.Before", "trainer.gradient_clip_val=0.05", "data.train.empty_below=9"),
        ("data.train.bad=5", "trainer.nan_policy=skip", "optimizer=adamw"),
        ("model=thread_parts.Table", "optimizer.momentum=0"),
        ("model.freeze=layers.0.*",),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_and_rows_are_those_of_one_process(words: tuple[str, ...], accumulate: int) -> None:
    """With uneven slices, a batch with fewer samples than workers, and a short last window."""
    options: dict[str, Any] = {"batch_size": 7, "accumulate": accumulate}
    one = result((*FLOAT64, *words), **options)
    threads = result((*FLOAT64, *THREADS, *words), **options)
    assert largest_difference(one["weights"], threads["weights"]) <= 1e-12
    assert largest_difference(one["averaged"], threads["averaged"]) <= 1e-12
    assert one["skipped"] == threads["skipped"]
    for expected, row in zip(one["train"], threads["train"], strict=True):
        assert row == pytest.approx(expected, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    "words", [("precision=bf16-mixed",), ("precision=16-mixed",), ("task=thread_parts.Noisy",)]
)
def test_two_runs_have_the_same_bits(words: tuple[str, ...]) -> None:
    results = [result((*THREADS, *words), batch_size=6) for _ in range(2)]
    assert results[0] == results[1]


def test_slices_of_a_batch_draw_from_generators_of_their_own() -> None:
    run = parts_of((*THREADS, "task=thread_parts.Noisy", "data.train.count=12"), batch_size=6)
    fitted(run)
    task: Any = run.task
    assert task.firsts == [True] * 3 + [False] * 3


def test_attributes_and_buffers_are_those_of_the_first_worker() -> None:
    words = (*TOKENS, "model=thread_parts.Varied", "task=exact_tasks.Mean")
    run = parts_of((*THREADS, *words), batch_size=6)
    model: Any = run.model
    model.forwards = 10  # as a hook may set between two steps
    fitted(run)
    assert (model.forwards, model.samples) == (15, 2)

    run = parts_of((*THREADS, "model=thread_parts.Normed", "data.train.count=12"), batch_size=12)
    x = run.train.epoch(0)
    first_slice = next(iter(x)).data[0][:4]
    fitted(run)
    norm: Any = run.model.norm
    torch.testing.assert_close(norm.running_mean, first_slice.mean(0) * 0.1)
    assert norm.num_batches_tracked == 1


def test_a_window_that_is_out_of_memory_is_cut() -> None:
    words = (*TOKENS, *FLOAT64, "task=exact_tasks.Before", "model=exact_parts.Capped")
    threads = parts_of((*THREADS, *words, "model.limit=1"), batch_size=12)
    fitted(threads)
    assert threads.retry.pieces > 1
    whole = result((*words, "model.limit=99"), batch_size=12)
    weights = [parameter.flatten().tolist() for parameter in threads.model.parameters()]
    assert largest_difference(weights, whole["weights"]) <= 1e-12


@pytest.mark.parametrize(
    "words",
    [
        ("model=thread_parts.Random",),
        ("model=thread_parts.Replaced",),
        ("task=thread_parts.Contrastive",),
        ("task=thread_parts.Counting",),
    ],
)
def test_what_threads_cannot_compute_is_refused(words: tuple[str, ...]) -> None:
    run = parts_of((*THREADS, *words), batch_size=6)
    with refused(PluginError, "parallel=threads"):
        fitted(run)
    run.close_workers()


def test_threads_end_with_the_run_and_leave_the_number_of_threads() -> None:
    before, num_threads = set(threading.enumerate()), torch.get_num_threads()
    run = parts_of(THREADS, batch_size=6)
    run.step(run, [next(iter(run.train.epoch(0)))])
    assert set(threading.enumerate()) > before
    assert torch.get_num_threads() == num_threads
    run.close_workers()
    assert set(threading.enumerate()) == before
