"""The loss contract in all its ways: a sum or a mean, counted before the forward or with its output."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import exact_parts
import pytest
import torch
from approved import refused
from exact_parts import fitted, parts_of, result
from torch import nn

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import StepOutput
from trainrun.train_state import TrainState
from trainrun.training.evaluate import evaluate
from trainrun.training.recovery.restore import load_train_state
from trainrun.training.train_step import accumulate_gradients

TOKENS = ("data.train._target_=exact_parts.tokens", "data.train.count=29", "data.batch_size=4")
CLIPPED = ("trainer.gradient_clip_val=0.05",)


def weights(task: str, *words: str, **data: Any) -> torch.Tensor:
    run = parts_of((*TOKENS, f"task=exact_tasks.{task}", *words), **data)
    if scaler := (saved := run.precision.state_dict())[
        "scaler"
    ]:  # low enough for all of a batch in one product
        run.precision.load_state_dict(saved | {"scaler": scaler | {"scale": 2.0**8}})
    assert fitted(run).skipped_steps == 0
    return torch.cat([p.detach().double().flatten() for p in run.model.parameters()])


def largest(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("task", ["After", "Mean"])
@pytest.mark.parametrize("words", [CLIPPED, ("trainer.nan_policy=ignore",)])
def test_a_count_with_the_output_gives_the_weights_of_one_known_before(
    task: str, words: tuple[str, ...]
) -> None:
    for accumulate in (1, 3):
        before = weights("Before", "precision=64-true", *words, accumulate=accumulate)
        assert largest(weights(task, "precision=64-true", *words, accumulate=accumulate), before) <= 1e-12


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("32-true", 1e-6), ("16-mixed", 2e-3), ("bf16-mixed", 1e-2)]
)
def test_micro_batches_counted_late_equal_one_large_batch(precision: str, tolerance: float) -> None:
    words = (f"precision={precision}", *CLIPPED)
    many = weights("Mean", *words, batch_size=2, accumulate=4)
    assert largest(many, weights("Mean", *words, batch_size=8)) <= tolerance
    assert largest(many, weights("Before", *words, batch_size=8)) <= tolerance


@pytest.mark.parametrize("task", ["Before", "After"])
def test_batch_of_another_rank_adds_nothing_to_the_gradient(task: str) -> None:
    """A rank without samples at the end of an epoch computes on such a batch, and each count must stay as it was."""
    gradients = []
    for repeats in (0, 1):
        run = parts_of((*TOKENS, f"task=exact_tasks.{task}", "precision=64-true"))
        batches = run.train.epoch(0)
        first, second = next(batches), next(batches)
        fillers = [second._replace(real=False)] * repeats
        found = accumulate_gradients(run, [first, *fillers])
        run.train.close()
        gradients.append(torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]))
        assert [float(loss) for loss in found.losses[1:]] == [0.0] * repeats
    assert gradients[0].any()
    assert torch.equal(gradients[0], gradients[1])


def test_a_window_that_is_cut_has_the_gradient_of_the_whole() -> None:
    words = ("model=exact_parts.Capped", "precision=64-true")
    run = parts_of((*TOKENS, "task=exact_tasks.Mean", *words, "model.limit=1"), accumulate=2)
    state = fitted(run)
    assert run.retry.pieces == 4
    cut = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    assert largest(cut, weights("Before", *words, "model.limit=99", accumulate=2)) <= 1e-12
    whole = parts_of((*TOKENS, "task=exact_tasks.Before", *words, "model.limit=99"), accumulate=2)
    assert state.items == fitted(whole).items


def test_rows_and_validation_divide_by_the_late_counts() -> None:
    words = (
        "precision=64-true",
        "data.val._target_=exact_parts.tokens",
        "data.val.count=7",
        "data.val.seed=5",
    )
    runs = {
        task: result((*TOKENS, f"task=exact_tasks.{task}", *words)) for task in ("Before", "After", "Mean")
    }
    for task in ("After", "Mean"):
        for rows in ("train", "eval"):
            for one, other in zip(runs[task][rows], runs["Before"][rows], strict=True):
                assert one == pytest.approx(other, rel=1e-12)


class Odd:
    """count: what the output says, as a function of the batch."""

    def __init__(self, out: Any) -> None:
        self.out = out

    def step(self, model: nn.Module, batch: Any) -> Any:
        return self.out(model(batch[0]).square().sum())


class Counted(Odd):
    def count(self, batch: Any) -> int:
        return len(batch[1])


@pytest.mark.parametrize(
    "task",
    [
        Odd(lambda loss: StepOutput(loss)),
        Odd(lambda loss: StepOutput(loss, count=1.5)),
        Counted(lambda loss: StepOutput(loss, count=4)),
        Odd(lambda loss: StepOutput(loss, loss_mean=loss, count=4)),
        Odd(lambda loss: StepOutput(count=4)),
    ],
)
def test_what_says_no_count_or_two_is_refused(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainrun.assemble.assemble.build_task", lambda config, facts: task)
    with refused(PluginError):
        fitted(parts_of(TOKENS))


@pytest.mark.parametrize("word", ["trainer.compile.scope=step", "trainer.cuda_graphs=true"])
def test_settings_that_need_the_count_before_are_refused_before_the_training(word: str) -> None:
    with refused(ConfigError, word):
        parts_of((*TOKENS, "task=exact_tasks.After", word))


def test_metrics_of_several_counts_and_of_a_matrix_are_those_of_all_samples() -> None:
    """However the validation is cut: accuracy by token and by sample, perplexity, and F1 of each class."""
    words = (
        "precision=64-true",
        "data.val._target_=exact_parts.tokens",
        "data.val.count=23",
        "data.val.seed=5",
    )
    found = []
    for size in (23, 4):
        run = parts_of((*TOKENS, "task=exact_tasks.Rich", *words), val_batch_size=size)
        found.append(evaluate(run, "val"))

    x, y = exact_parts.tokens(23, 5)
    with torch.no_grad():
        logits = run.model(x)
    real, right = y != -100, logits.argmax(-1) == y
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
    scores = []
    for name in range(3):
        told, is_so = (logits.argmax(-1) == name) & real, y == name
        scores.append(2 * float((told & is_so).sum()) / float(told.sum() + is_so.sum()))
    wanted = {
        "val/loss": float(loss), "val/perplexity": float(loss.exp()), "val/f1": sum(scores) / 3,
        "val/acc": float(right[real].double().mean()), "val/samples": 23 / float(real.sum()),
        "val/sample_acc": float((right | ~real).all(1).double().mean()),
    }  # fmt: skip
    for metrics in found:
        assert metrics.pop("val/seconds") > 0
        assert metrics == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("count", [0, torch.tensor(0)])
def test_a_mean_over_no_items_adds_nothing(count: Any) -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    mean = torch.nn.functional.cross_entropy(logits, torch.full((2,), -100))
    assert mean.isnan()
    out = StepOutput(loss_mean=mean, count=count)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


@pytest.mark.parametrize("count", [torch.tensor(12), 12.0])
def test_a_run_whose_task_counts_with_tensors_or_fractions_goes_on(count: Any) -> None:
    state, resumed = TrainState(), TrainState()
    state.logged_items += count
    load_train_state(resumed, state.state_dict())
    assert resumed.logged_items == 12


def test_a_validation_stream_of_which_ranks_read_different_samples_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = parts_of((*TOKENS, "data.val._target_=exact_parts.tokens", "data.val.count=6"), val_batch_size=3)
    batches = list(run.validation["val"].epoch(0))
    shares = SimpleNamespace(
        num_batches=len(batches), epoch=lambda epoch: (batch._replace(whole="mine") for batch in batches)
    )
    run = replace(run, validation={"val": shares})
    evaluate(run, "val")
    monkeypatch.setattr(type(run.parallel), "gather", lambda self, mine: [mine, (*mine[:-1], "another's")])
    with refused(DataError, "data.val"):
        evaluate(run, "val")
