"""The step as one graph equals the plain one, saves and resumes like it, and refuses what no graph can hold."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from exact_parts import CLASSES, FEATURES, Net, Recorder, fitted, parts_of
from torch import Tensor, nn

from trainrun.errors import ConfigError, PluginError, TrainingError
from trainrun.step.body import Holdings
from trainrun.step.captured import AHEAD, Queue, captured
from trainrun.step.traceable import is_ready
from trainrun.training.components import Components
from trainrun.training.state import TrainState

STEP = ("trainer.compile=step", "trainer.compile.backend=eager")  # traced like any other, and run as traced
DOUBLE = ("precision=64-true", "trainer.max_epochs=4")


def adamw(params: Any, lr: float, momentum: float, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr / 30, betas=(momentum, 0.999), fused=fused)


def adam(params: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr / 30, betas=(momentum, 0.999), amsgrad=True, weight_decay=0.1)


def nadam(params: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=lr / 30, betas=(momentum, 0.99))


def optimizer(name: str) -> tuple[str, ...]:
    return ("optimizer=custom", f"optimizer._target_=test_whole_step.{name}")


ADAMW = optimizer("adamw")


def run(*words: str, **data: Any) -> tuple[Components, TrainState, Recorder]:
    recorder = Recorder()
    components = parts_of(words, recorder, **data)
    return components, fitted(components), recorder


def weights_of(components: Components) -> list[Tensor]:
    return [*components.model.parameters(), *components.model.buffers(), *components.averaged.parameters()]


def compare(
    words: tuple[str, ...], backend: tuple[str, ...] = STEP, tolerance: float = 1e-12, **data: Any
) -> None:
    plain, state, rows = run(*DOUBLE, *words, **data)
    whole, same, others = run(*DOUBLE, *words, *backend, **data)
    assert whole.compile_log.graphs == (2 if data.get("accumulate", 1) > 1 else 1)  # whatever came between
    for one, other in zip(weights_of(whole), weights_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert (same.step, same.items, same.skipped_steps) == (state.step, state.items, state.skipped_steps)
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


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("optimizer.momentum=0",),
        ADAMW,
        (*optimizer("adam"), "scheduler=warmup_cosine", "scheduler.warmup_steps=3"),
        optimizer("nadam"),
        ("optimizer=custom", "optimizer._target_=torch.optim.RMSprop", "optimizer.lr=0.01"),
        ("optimizer=muon", "optimizer.lr=0.02"),
        ("optimizer=muon", "model=test_whole_step.Normed", "optimizer.lr=0.02", "scheduler=cosine"),
        ("trainer.gradient_clip_val=0.05",),
        ("trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value", "trainer.ema=true"),
        ("trainer.nan_policy=ignore",),
        ("model=test_whole_step.Normed", *ADAMW),
    ],
)
def test_one_graph_equals_the_plain_step(words: tuple[str, ...]) -> None:
    tolerance = 1e-9 if words == optimizer("nadam") else 1e-12  # it keeps a product in float32
    compare(words, tolerance=tolerance, batch_size=5)  # 13 samples: the last batch of each epoch is ragged


@pytest.mark.parametrize("accumulate", [2, 3])
def test_windows_equal_the_plain_ones(accumulate: int) -> None:
    compare((*ADAMW, "trainer.gradient_clip_val=0.5"), batch_size=2, accumulate=accumulate)


def test_a_step_that_is_not_finite_is_left_out() -> None:
    compare(("trainer.nan_policy=skip", "data.shuffle=false"), batch_size=4, bad=5)


@pytest.mark.process
@pytest.mark.slow
def test_compiled_code_equals_the_plain_step() -> None:
    compare((*ADAMW, "trainer.gradient_clip_val=0.5"), ("trainer.compile=step",), 1e-12, batch_size=4)
    plain, _, _ = run(*ADAMW, batch_size=4)
    whole, _, _ = run(*ADAMW, "trainer.compile=step", batch_size=4)
    for one, other in zip(weights_of(whole), weights_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_off_is_the_plain_step() -> None:
    from trainrun.training.train_step import train_step

    assert parts_of((), batch_size=4).step is train_step


def test_it_stops_where_the_plain_step_stops() -> None:
    errors = []
    for words in ((), STEP):
        with pytest.raises(TrainingError, match="not finite") as caught:
            run(*DOUBLE, "data.shuffle=false", *words, batch_size=4, bad=5)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


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
        ("Asks", "do not become one graph"),
    ],
)
def test_what_no_graph_can_hold_is_refused(model: str, text: str) -> None:
    with pytest.raises(PluginError, match=f"{text}.*trainer.compile.scope=model"):
        run(*STEP, f"model=test_whole_step.{model}", batch_size=4)


class Keeps(torch.optim.SGD):
    """Knows its parameters from a list of its own."""

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self.mine = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.mine:
            if param.grad is not None:
                param -= 0.1 * param.grad


class Counts2(torch.optim.SGD):
    """Every second update is twice as long, by a number that it counts for itself; where it counts differs."""

    place = "self"

    def __init__(self, params: Any, lr: float, momentum: float) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self.calls, self.table = 0, [0]
        self.tensor = torch.zeros(())
        self.param_groups[0]["calls"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        if self.place == "self":
            self.calls += 1
        elif self.place == "group":
            group["calls"] += 1
        elif self.place == "list":
            self.table[0] += 1
        elif self.place == "tensor":
            self.tensor += 1
        often = self.calls + group["calls"] + self.table[0] + self.tensor
        for param in group["params"]:
            if param.grad is not None:
                param -= group["lr"] * (1 + often % 2) * param.grad


class InGroup(Counts2):
    place = "group"


class InList(Counts2):
    place = "list"


class InTensor(Counts2):
    place = "tensor"


class Replaces(Counts2):
    """The count is another tensor after each step."""

    place = "none"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.tensor = self.tensor + 1
        super().step()


class Prepares(torch.optim.SGD):
    """Makes something once, in its first step, and never changes it again."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made = getattr(self, "made", None) or 2.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= self.made * group["lr"] * param.grad


class Centred(torch.optim.SGD):
    """Of each gradient without its mean: none is left of one that is the same everywhere."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(group["lr"] * (param.grad - param.grad.mean()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Keeps", "Keeps updates no other parameters"),
        ("Counts2", "keeps calls beside its state"),
        ("InGroup", "keeps calls of group 0 beside its state"),
        ("InList", "keeps table beside its state"),
        ("InTensor", "keeps tensor beside its state"),
        ("Replaces", "keeps tensor beside its state"),
    ],
)
def test_an_optimizer_that_is_not_of_its_groups_and_state_alone_is_refused(name: str, text: str) -> None:
    """In a graph its weights, or what it counts, would stand still."""
    words = (*optimizer(name), "optimizer.lr=0.1")
    run(*words, batch_size=4)
    with pytest.raises(PluginError, match=f"{text}.*trainer.compile.scope=model"):
        run(*STEP, *words, batch_size=4)


def test_to_ask_an_optimizer_changes_nothing_of_it_and_takes_no_one_for_idle() -> None:
    for name in ("Centred", "Prepares"):
        compare(optimizer(name), batch_size=5)
    param = nn.Parameter(torch.ones(3))
    one = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.ones(3)
    one.step()
    before = copy.deepcopy(one.state_dict())
    assert is_ready(one)
    assert torch.equal(one.state[param]["momentum_buffer"], before["state"][0]["momentum_buffer"])
    assert torch.equal(param, torch.full((3,), 0.9))


def test_the_flag_of_a_fused_kernel_is_not_taken_into_a_graph() -> None:
    """A GPU's fused optimizer carries one; written out for a graph, torch would refuse it."""
    param = nn.Parameter(torch.ones(3))
    fused = torch.optim.AdamW([param], fused=True)
    param.grad = torch.ones(3)
    fused.step()
    fused.found_inf, fused.grad_scale = torch.zeros(()), None  # type: ignore[attr-defined]
    assert is_ready(fused)


def ragged(count: int = 40) -> Any:
    """Sequences of ten lengths, one length a batch of four."""
    return [(torch.randn(1 + i // 4, FEATURES), torch.randint(CLASSES, (1 + i // 4,))) for i in range(count)]


def test_more_shapes_than_graphs_are_refused() -> None:
    words = ("data.train._target_=test_whole_step.ragged", "data.shuffle=false")
    with pytest.raises(TrainingError, match="more than 8 shapes"):
        run(*STEP, *words, batch_size=4, count=40)


def test_two_graphs_for_windows_however_many_steps() -> None:
    components, _, _ = run(*DOUBLE, *STEP, batch_size=2, accumulate=3)
    assert components.compile_log.graphs == 2
    assert components.compile_log.summary()["compiled_graphs"] == 2


def on_cpu(run_step: Any) -> Any:
    """A stand-in for a CUDA graph: warms up, and a replay writes into the outputs of the recording."""
    for _ in range(3):
        run_step()
    outputs = [output.clone() for output in run_step()]

    def replay() -> None:
        for output, new in zip(outputs, run_step(), strict=True):
            output.copy_(new)

    return replay, outputs


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_recorded_step_equals_the_plain_one(accumulate: int) -> None:
    words = (*DOUBLE, *ADAMW, "scheduler=cosine", "trainer.gradient_clip_val=0.5")
    plain, _, rows = run(*words, batch_size=4, accumulate=accumulate)
    recorder = Recorder()
    components = parts_of((*words, *STEP), recorder, batch_size=4, accumulate=accumulate)
    recorded: list[int] = []

    def engine(function: Any, inputs: list[Tensor], num_held: int) -> Any:
        recorded.append(num_held)
        return captured(function, inputs, num_held, on_cpu)

    components.step._engine, components.step._fixed = engine, True  # type: ignore[attr-defined]
    fitted(components)
    for one, other in zip(weights_of(components), weights_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for mine, his in zip(recorder.train, rows.train, strict=True):
        assert mine == pytest.approx(his, rel=1e-10)
    assert len(recorded) == accumulate  # one graph for each place in a window; ragged batches run plain


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


@pytest.mark.parametrize("fixed", [False, True])
def test_weights_that_a_validation_moves_are_trained_where_they_lie_now(fixed: bool) -> None:
    words = (
        *DOUBLE,
        *ADAMW,
        "model=test_whole_step.Moving",
        "data.val._target_=exact_parts.samples",
    )
    plain, _, rows = run(*words, batch_size=4, count=12)
    recorder = Recorder()
    components = parts_of((*words, *STEP), recorder, batch_size=4, count=12)
    if fixed:
        step: Any = components.step
        step._engine = lambda function, inputs, held: captured(function, inputs, held, on_cpu)
        step._fixed = True
    fitted(components)
    for one, other in zip(weights_of(components), weights_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    losses = [[row["val/loss"] for row in one.eval] for one in (recorder, rows)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)


def test_the_host_is_a_few_recorded_steps_ahead_of_the_device_at_most() -> None:
    class Event:
        def record(self) -> None:
            given.append(self)

        def synchronize(self) -> None:
            done.append(self)

    given: list[Event] = []
    done: list[Event] = []
    queue = Queue(Event)
    for _ in range(20):
        queue.note()
        assert len(given) - len(done) <= AHEAD
    assert done == given[: 20 - AHEAD]


def test_what_cannot_be_recorded_is_refused() -> None:
    weights, count = torch.zeros(2), torch.zeros((), device="meta")
    with pytest.raises(PluginError, match="keeps a tensor on the host.*use trainer.cuda_graphs=false"):
        captured(lambda *flat: [flat[0]], [weights, count], 2, on_cpu)

    def asks(*flat: Tensor) -> list[Tensor]:
        try:
            raise RuntimeError("a value was asked for")
        except RuntimeError:
            raise RuntimeError(
                "the recording is void"
            ) from None  # as CUDA says it when the recording is ended

    with pytest.raises(PluginError, match="cannot be recorded .a value was asked for"):
        captured(asks, [weights], 1, on_cpu)


def test_a_tensor_that_was_moved_is_not_overlooked() -> None:
    weights = torch.zeros(2)
    step = captured(lambda *flat: [flat[0].add_(flat[1])], [weights, torch.ones(2)], 1, on_cpu)
    assert step(weights.detach(), torch.full((2,), 3.0))[0].tolist() == [3.0, 3.0]
    assert step(weights, torch.ones(2))[0].tolist() == [4.0, 4.0]
    with pytest.raises(AssertionError, match="lies elsewhere now"):
        step(weights.clone(), torch.ones(2))


def moved(components: Components) -> None:
    weight = next(components.model.parameters())
    weight.data = weight.data.clone()


def loaded(components: Components) -> None:
    components.optimizer.load_state_dict(copy.deepcopy(components.optimizer.state_dict()))


def replaced(components: Components) -> None:
    components.model.seen = components.model.seen + 1


@pytest.mark.parametrize("change", [moved, loaded, replaced])
def test_what_is_held_is_made_anew_once_a_tensor_is_another(change: Any) -> None:
    components = parts_of((*ADAMW, "model=test_whole_step.Normed", *STEP), batch_size=5)
    fitted(components)
    held = Holdings(components, components.precision, {}, [])  # type: ignore[arg-type]
    assert held.are_current()
    change(components)
    assert not held.are_current()


def test_a_cpu_has_no_cuda_graphs() -> None:
    with pytest.raises(ConfigError, match="this run is on cpu; use trainer.cuda_graphs=false"):
        parts_of(("trainer.cuda_graphs=true",), batch_size=4)
