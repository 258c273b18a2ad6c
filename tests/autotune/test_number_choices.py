"""Number type and threads by a clock: the choice, that no run feels it, and that it lasts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_parts import CLASSES, FEATURES, parts_of
from quiet_runs import QUIET
from torch import nn

from trainrun.assemble import start_choices
from trainrun.autotune import number_choices, start
from trainrun.autotune.number_choices import TimedChoice, choose_fastest, find_agreed_choice
from trainrun.checkpoint.load import read_checkpoint, read_manifest, resolve_checkpoint
from trainrun.cli.main import main
from trainrun.config.schema import RunConfig, replace_values
from trainrun.folder.run_folder import RunDir, read_identity, write_identity
from trainrun.parallel.single import Single
from trainrun.precision import autocast
from trainrun.runs.restore_config import load_parts as restored
from trainrun.seeding import read_random_state
from trainrun.training.components import Components

pytestmark = pytest.mark.process

GPT = (
    "model._target_=trainrun.model.gpt.Gpt", "model.vocab_size=11", "model.layers=2", "model.width=16", "model.heads=2",
    "model.context=8", "data.train._target_=test_number_choices.few_tokens",
    "data.val._target_=test_number_choices.few_tokens", "task=language_modeling", "trainer.limit_val_batches=1",
)  # fmt: skip
CPU = Single(torch.device("cpu"))
Seconds = Callable[[], float]


class Time:
    """A clock that only steps move on; in memory that the children of this process share."""

    def __init__(self) -> None:
        self._seconds = torch.zeros((), dtype=torch.float64).share_memory_()

    @property
    def now(self) -> float:
        return float(self._seconds)

    @now.setter
    def now(self, value: float) -> None:
        self._seconds.fill_(value)

    def __call__(self) -> float:
        return self.now


class TimedTask:
    """The task, whose step takes as long as `seconds` says."""

    def __init__(self, inner: Any, time: Time, seconds: Seconds) -> None:
        self.inner, self.time, self.seconds = inner, time, seconds

    def step(self, model: nn.Module, batch: Any) -> Any:
        self.time.now += self.seconds()
        return self.inner.step(model, batch)


EMULATES = autocast.emulates_bfloat16


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever CPU the tests run on."""
    monkeypatch.setattr(autocast, "emulates_bfloat16", lambda device: False)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads are set and not used: a later fork of this process would have none of them."""
    said = [torch.get_num_threads()]
    monkeypatch.setattr(torch, "set_num_threads", said.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: said[-1])
    return said


def in_bfloat16() -> bool:
    return torch.is_autocast_enabled("cpu")


def chosen_of(
    config: RunConfig, model: nn.Module, task: Any, train: Any, time: Time, monkeypatch: pytest.MonkeyPatch,
    chosen: dict[str, str] | None = None, measures: bool = True, batches: float = math.inf, parallel: Any = CPU,
) -> tuple[RunConfig, dict[str, str], list[str]]:  # fmt: skip
    """What is chosen, by a clock of its own."""
    notes: list[str] = []
    chosen = {} if chosen is None else chosen
    with monkeypatch.context() as patch:
        patch.setattr(
            start, "choose_numbers", lambda *given: number_choices.choose_numbers(*given, clock=time)
        )
        config = start_choices.resolve_precision_and_threads(
            config, model, task, train, parallel, chosen, measures, batches, notes
        )
    return config, chosen, notes


def told(
    run: Components, seconds: Seconds, monkeypatch: pytest.MonkeyPatch, *words: str, **more: Any
) -> tuple[RunConfig, dict[str, str], list[str], float]:
    time, pairs = Time(), [word.split("=") for word in words]
    values = {f"trainer.{key}": json.loads(value) for key, value in pairs}
    config = replace_values(run.config, {"precision.mode": "auto", **values})
    task = TimedTask(run.task, time, seconds)
    return *chosen_of(config, run.model, task, run.train, time, monkeypatch, **more), time.now


@pytest.mark.parametrize(
    ("full", "mixed", "mode"),
    [(0.004, 0.002, "bf16-mixed"), (0.002, 0.004, "32-true"), (0.002, 0.0019, "32-true")],
)
def test_the_faster_type_is_taken_and_float32_where_they_are_alike(
    full: float, mixed: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parts_of((), count=64)
    config, chosen, notes, spent = told(run, lambda: mixed if in_bfloat16() else full, monkeypatch)
    assert config.precision.mode == chosen["precision"] == mode
    times = {"32-true": f"{1e3 * full:.3g} ms", "bf16-mixed": f"{1e3 * mixed:.3g} ms"}
    (other,) = times.keys() - {mode}
    assert notes == [f"precision: {mode}, {times[mode]} a step ({other}: {times[other]})"]
    assert spent < 0.6


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ((), {"batches": 400}),
        (("deterministic=true",), {}),
        (('gradient_checkpointing="full"',), {}),
        ((), {"measures": False}),
        ((), {"chosen": {"precision": "32-true"}}),
    ],
)
def test_not_measured_where_it_may_not_or_need_not_be(
    words: tuple[str, ...], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parts_of((), count=64)
    faster = told(run, lambda: 0.001 if in_bfloat16() else 0.002, monkeypatch, *words, **more)
    config, chosen, notes, spent = faster
    assert spent == 0
    assert config.precision.mode == chosen["precision"] == "32-true"  # what suits a network so small
    assert bool(notes) == ("chosen" not in more)


def test_a_type_that_is_emulated_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "emulates_bfloat16", EMULATES)
    monkeypatch.setattr(autocast, "has_cpu_feature", lambda *features: False)
    monkeypatch.setattr(autocast, "is_x86", lambda: True)
    run = parts_of((), count=64)
    config, chosen, notes, spent = told(run, lambda: 0.001 if in_bfloat16() else 0.013, monkeypatch)
    assert config.precision.mode == chosen["precision"] == "32-true"
    reason = "this cpu has no bfloat16 arithmetic for matrix products"
    assert notes == [f"precision: 32-true, not measured: {reason}"]
    assert spent == 0


@pytest.mark.parametrize("seconds", [0.07, 0.3])
def test_a_step_that_takes_long_is_left_to_the_rule(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run = parts_of((), count=4000, batch_size=64)
    config, _, notes, spent = told(run, lambda: seconds, monkeypatch)
    assert "not measured" in notes[0]
    assert config.precision.mode == "32-true"
    assert spent < 1.0


def test_the_run_does_not_feel_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = parts_of((), count=64)
    weights = [parameter.clone() for parameter in run.model.parameters()]
    before = read_random_state()["torch"]
    told(run, lambda: 0.001, monkeypatch)
    assert torch.equal(before, read_random_state()["torch"])
    assert all(torch.equal(a, b) for a, b in zip(weights, run.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in run.model.parameters())


class Head(nn.Module):
    """Reaches its last layer by a function in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        self.heads, self.calls = {"main": lambda h: self.last(self.norm(h))}, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.heads["main"](self.first(x))


@pytest.mark.usefixtures("threads")
def test_a_model_that_reaches_itself_by_a_function_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    run = parts_of((), count=64)
    run, time = dataclasses.replace(run, model=Head()), Time()
    config = replace_values(run.config, {"precision.mode": "auto"})
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    task = TimedTask(run.task, time, lambda: 0.001 if in_bfloat16() else 0.002)
    _, chosen, _ = chosen_of(config, run.model, task, run.train, time, monkeypatch)
    assert chosen["precision"] == "bf16-mixed"
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert run.model.calls == 0


def test_what_breaks_in_a_trial_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise RuntimeError("not with two samples")

    config, _, notes, _ = told(parts_of((), count=64), broken, monkeypatch)
    assert config.precision.mode == "32-true"
    assert "not measured" in notes[0]


def test_a_type_that_does_not_fit_into_memory_is_not_taken_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "trainrun.precision.autocast.choose_mode_by_rule", lambda *_: ("bf16-mixed", "as on a GPU")
    )

    def seconds() -> float:
        if not in_bfloat16():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return 0.002

    config, chosen, notes, _ = told(parts_of((), count=64), seconds, monkeypatch)
    assert config.precision.mode == chosen["precision"] == "bf16-mixed"
    assert notes == ["precision: bf16-mixed, not compared (32-true: does not fit into memory)"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["bf16-mixed", "bf16-mixed"], "bf16-mixed"),
        (["bf16-mixed", "32-true"], "32-true"),
        (["bf16-mixed", None], None),
    ],
)
def test_ranks_take_what_all_of_them_chose(names: list[str | None], chosen: str | None) -> None:
    times = {"32-true": "2 ms", "bf16-mixed": "1 ms"}
    choices = [None if name is None else TimedChoice(name, times) for name in names]
    found = find_agreed_choice(choices, "32-true")
    assert (None if found is None else found.name) == chosen


def test_where_nothing_fits_or_time_is_short_nothing_is_chosen() -> None:
    time = Time()
    assert choose_fastest({"a": lambda: math.inf, "b": lambda: math.inf}, "a", 0.1, 100.0, 2.0, time) is None
    assert choose_fastest({"a": lambda: 1.0, "b": lambda: 0.5}, "a", 0.1, 7.0, 1.0, time) is None


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("seconds", "cores", "chosen"),
    [
        (lambda n: 0.004 / n, 2, 2),  # quiet
        (lambda n: 0.001 * n**3, 2, 1),  # beside busy processes
        (lambda n: 0.001 * 1.1 ** (n - 1), 2, 2),  # nearly the same: as on a quiet machine
        (lambda n: 0.004 / min(n, 4) + 0.0003 * n, 16, 4),  # small steps on many cores
        (lambda n: 0.3 * n, 2, 2),  # too long to be measured
    ],
)
def test_fewer_threads_are_taken_where_they_are_surely_faster(
    seconds: Callable[[int], float], cores: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parts_of((), count=64)
    torch.set_num_threads(cores)
    more = ('num_threads="auto"',)
    _, found, notes, spent = told(
        run, lambda: seconds(torch.get_num_threads()), monkeypatch, *more, chosen={"precision": "32-true"}
    )
    assert torch.get_num_threads() == chosen
    assert notes == [] or notes[0].startswith(f"trainer.num_threads: {chosen}, ")
    assert bool(notes) == (found.get("num_threads") is not None) == (spent < 0.6)


@pytest.mark.usefixtures("threads")
def test_a_resume_takes_as_many_threads_as_the_run_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    run, more = parts_of((), count=64), ('num_threads="auto"',)
    for recorded, number, line in ((1, 1, ["trainer.num_threads: 1, as the run began"]), (8, 2, [])):
        torch.set_num_threads(2)
        chosen = {"precision": "32-true", "num_threads": str(recorded)}
        _, _, notes, spent = told(run, lambda: 0.001, monkeypatch, *more, chosen=chosen)
        assert (torch.get_num_threads(), notes, spent) == (number, line, 0)


def few_tokens(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(count * 8).view(count, 8) % 11
    return tokens, (tokens + 1) % 11


def weights(folder: str) -> torch.Tensor:
    shared = read_checkpoint(resolve_checkpoint(RunDir(Path(folder)).checkpoints, "last")).shared["model"]
    return torch.cat([value.flatten() for value in shared.values()])


def test_a_choice_is_written_down_and_lasts_through_resume_and_evaluation(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*GPT, *QUIET, "seed=1", "trainer.ema.enabled=true"]
    assert main([*words, "precision=bf16", "trainer.max_steps=6", "output_dir=named"]) == 0
    monkeypatch.setattr(start, "choose_numbers", lambda *given: given[7].update(precision="bf16-mixed"))
    assert main([*words, "precision=auto", "trainer.max_steps=3", "output_dir=open"]) == 0
    monkeypatch.setattr(start, "choose_numbers", lambda *_: pytest.fail("measured again"))
    assert json.loads(Path("open/RUN.json").read_text())["precision"] == "bf16-mixed"
    assert main(["resume", "open", "trainer.max_steps=6"]) == 0
    assert torch.equal(weights("open"), weights("named"))
    run, _ = restored(RunDir(Path("open").absolute()), "last", [])
    assert run.config.precision.mode == "bf16-mixed"


def test_the_number_of_threads_is_written_down_and_a_resume_uses_it(trainrun: Any, workdir: Path) -> None:
    words = (
        "hydra.run.dir=r",
        "data=synthetic",
        "model=cnn",
        "data.shape=[1,8,8]",
        "seed=1",
        "monitor.plots=false",
    )
    assert trainrun(*words, "trainer.max_steps=3", OMP_NUM_THREADS="2").returncode == 0
    run = RunDir(workdir / "r")
    assert read_identity(run)["num_threads"] == 2
    write_identity(run, read_identity(run) | {"num_threads": 1})
    done = trainrun("resume", "r", "trainer.max_steps=6", OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert "trainer.num_threads: 1, as the run began" in run.log.read_text()
    manifest = read_manifest(resolve_checkpoint(workdir / "r" / "checkpoints", "last"))
    assert manifest.fingerprint["num_threads"] == 1
    assert read_identity(run)["num_threads"] == 1
