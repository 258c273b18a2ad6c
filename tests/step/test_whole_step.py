"""The step as one graph equals the plain one, resumes like it, and refuses what no graph can hold."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused
from exact_parts import CLASSES, FEATURES, Capped, Net, Recorder, fitted, parts_of
from test_resume import OWN, WORDS, facts_of, same, stop_at
from torch import Tensor, nn

from trainrun.cli.main import main
from trainrun.errors import ConfigError, PluginError, TrainingError
from trainrun.step.graphs import record_graph
from trainrun.train_state import TrainState
from trainrun.training.components import Components

__all__ = ["OWN", "Capped"]  # the code for the fixture `own`
STEP = ("trainer.compile=step", "trainer.compile.backend=eager")  # traced like any other, and run as traced
DOUBLE = ("precision=64-true", "trainer.max_epochs=4")


def adamw(params: Any, lr: float, momentum: float, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr / 30, betas=(momentum, 0.999), fused=fused)


ADAMW = ("optimizer=custom", "optimizer._target_=test_whole_step.adamw", "optimizer.momentum=0.9")


def run(*words: str, **data: Any) -> tuple[Components, TrainState, Recorder]:
    recorder = Recorder()
    components = parts_of(words, recorder, **data)
    return components, fitted(components), recorder


def weights_of(components: Components) -> list[Tensor]:
    with components.evaluating() as model:
        averaged = [parameter.detach().clone() for parameter in model.parameters()]
    return [*components.model.parameters(), *components.model.buffers(), *averaged]


def compare(
    words: tuple[str, ...], backend: tuple[str, ...] = STEP, tolerance: float = 1e-12, **data: Any
) -> None:
    plain, state, rows = run(*DOUBLE, *words, **data)
    whole, other, others = run(*DOUBLE, *words, *backend, **data)
    assert whole.compile_log.summary()["compiled_graphs"] == 1  # whatever came between
    for one, wanted in zip(weights_of(whole), weights_of(plain), strict=True):
        torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance)
    assert (other.step, other.items, other.skipped_steps) == (state.step, state.items, state.skipped_steps)
    assert [row.keys() for row in others.train] == [row.keys() for row in rows.train]
    for mine, his in zip(others.train, rows.train, strict=True):
        assert mine == pytest.approx(his, rel=1e-10, abs=1e-10, nan_ok=True)


class Normed(Net):
    """With a buffer that is written into, one that is replaced, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("seen", torch.zeros(()))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(FEATURES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.mean().detach()
        return super().forward(self.norm(x) * self.frozen)


class Alike(Net):
    """Two parameters with one gradient, and one whose gradient lies in another order than itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(CLASSES)), nn.Parameter(torch.zeros(CLASSES))
        self.turned = nn.Parameter(torch.eye(FEATURES, 5).T.contiguous().T)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.turned @ self.turned.T) + (self.one + self.two)


class Both(Normed, Alike):
    """One after the other."""


CLIPPED = ("trainer.gradient_clip_val=0.05",)


@pytest.mark.parametrize(
    "words",
    [
        (*ADAMW, "scheduler=onecycle", "scheduler.max_lr=0.1"),  # which moves the momentum too
        ("optimizer=muon", "model=test_whole_step.Normed", "optimizer.lr=0.02", "scheduler=cosine"),
        ("trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value", "trainer.ema=true"),
        ("model=test_whole_step.Alike", *ADAMW, *CLIPPED),
    ],
)
def test_one_graph_equals_the_plain_step(words: tuple[str, ...]) -> None:
    compare(words, batch_size=5)  # 13 samples: the last batch of each epoch is ragged


def test_windows_equal_the_plain_ones() -> None:
    compare((*ADAMW, *CLIPPED), batch_size=2, accumulate=3)


def test_a_step_that_is_not_finite_is_left_out() -> None:
    words = ("trainer.nan_policy=skip", "data.shuffle=false", "model=test_whole_step.Normed")
    compare(words, batch_size=4, count=12, bad=5)


def test_a_step_whose_memory_ends_runs_again_in_pieces() -> None:
    words = (*DOUBLE, "model=exact_parts.Capped")
    plain, _, _ = run(*words, "model.limit=99", batch_size=4)
    whole, _, _ = run(*words, *STEP, "model.limit=2", batch_size=4)
    assert whole.retry.pieces == 2
    for one, wanted in zip(weights_of(whole), weights_of(plain), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.process
@pytest.mark.slow
def test_compiled_code_equals_the_plain_step() -> None:
    words = ("model=test_whole_step.Both", *ADAMW, *CLIPPED)
    compare(words, ("trainer.compile=step",), 1e-12, batch_size=4, count=12)


@pytest.mark.process
def test_a_stopped_run_ends_with_the_same_bits(own: Path) -> None:
    words = [*WORDS, *STEP]
    assert main([*words, *stop_at(-1, "SIGINT"), "output_dir=whole"]) == 0
    assert main([*words, *stop_at(4, "SIGINT"), "output_dir=stopped"]) == 130
    assert main(["resume", "stopped"]) == 0
    whole, resumed = facts_of(own / "whole"), facts_of(own / "stopped")
    same(whole[0], resumed[0])
    assert whole[1] == resumed[1]


class Counts(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.calls


class Draws(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Asks(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("Counts", "changes its Python attribute calls"),
        ("Draws", "draws from Python's"),
        ("Asks", "do not become one graph"),  # the rest is torch's text
    ],
)
def test_what_no_graph_can_hold_is_refused(model: str, text: str) -> None:
    with pytest.raises(PluginError, match=f"{text}.*trainer.compile.scope=model"):
        run(*STEP, f"model=test_whole_step.{model}", batch_size=4)


def ragged(count: int = 40) -> Any:
    """Sequences of ten lengths, one length a batch of four."""
    return [(torch.randn(1 + i // 4, FEATURES), torch.randint(CLASSES, (1 + i // 4,))) for i in range(count)]


def test_more_shapes_than_graphs_are_refused() -> None:
    words = ("data.train._target_=test_whole_step.ragged", "data.shuffle=false")
    with refused(TrainingError):
        run(*STEP, *words, batch_size=4, count=40)


def on_cpu(run_step: Any) -> Any:
    """A stand-in for a CUDA graph: warms up, and a replay writes into the outputs of the recording."""
    for _ in range(3):
        run_step()
    outputs = [output.clone() for output in run_step()]

    def replay() -> None:
        for output, new in zip(outputs, run_step(), strict=True):
            output.copy_(new)

    return replay, outputs


class Moving(nn.Module):
    """A recurrent network that moves its weights when it is evaluated, as cuDNN's do after a functional call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(FEATURES, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            for weight in self.layer.parameters():
                weight.data = weight.data.clone()
        return self.head(self.layer(x[:, None])[0][:, 0])


@pytest.mark.parametrize(
    ("model", "recorded", "accumulate"),
    [("exact_parts.Net", True, 1), ("test_whole_step.Normed", True, 2)]
    + [("test_whole_step.Moving", recorded, 1) for recorded in (False, True)],
)
def test_a_recorded_step_equals_the_plain_one_also_where_a_validation_moves_weights(
    model: str, recorded: bool, accumulate: int
) -> None:
    words = (*DOUBLE, *ADAMW, *CLIPPED, f"model={model}", "data.val._target_=exact_parts.samples")
    plain, _, rows = run(*words, batch_size=4, count=12, accumulate=accumulate)
    recorder = Recorder()
    components = parts_of((*words, *STEP), recorder, batch_size=4, count=12, accumulate=accumulate)
    if recorded:
        step: Any = components.step
        step._engine = lambda function, inputs, held: record_graph(function, inputs, held, on_cpu)
        step._fixed = True
    fitted(components)
    for one, other in zip(weights_of(components), weights_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    losses = [[row["val/loss"] for row in one.eval] for one in (recorder, rows)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


def test_what_cannot_be_recorded_is_refused() -> None:
    weights, count = torch.zeros(2), torch.zeros((), device="meta")
    with refused(PluginError, "trainer.cuda_graphs"):
        record_graph(lambda *flat: [flat[0]], [weights, count], 2, on_cpu)

    def asks(*flat: Tensor) -> list[Tensor]:
        try:
            raise RuntimeError("a value was asked for")
        except RuntimeError:
            raise RuntimeError(
                "the recording is void"
            ) from None  # as CUDA says it when the recording is ended

    with refused(PluginError):
        record_graph(asks, [weights], 1, on_cpu)
    with refused(ConfigError, "trainer.cuda_graphs"):
        parts_of(("trainer.cuda_graphs=true",), batch_size=4)
