"""Number type and attention kernel by a clock: the choice, that the run does not feel it, and that it lasts."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_parts import parts_of
from torch import nn

import trainrun as package
from trainrun.checkpoint.format import read_checkpoint
from trainrun.checkpoint.resume import resolve
from trainrun.cli import main
from trainrun.config import RunConfig
from trainrun.errors import ConfigError
from trainrun.interfaces import MicroBatch
from trainrun.model import gpt
from trainrun.model.attention import causal_attention
from trainrun.model.gpt import Gpt
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.precision import amp
from trainrun.randomness import random_state
from trainrun.restore import parts_of as restored
from trainrun.rundir import RunDir
from trainrun.start import attention_kernel, number_type, settle
from trainrun.start.settle import settled
from trainrun.start.trial import Trial, agreed_times, best_of, fastest_times
from trainrun.task.language_modeling import LanguageModeling
from trainrun.words.compose import compose_run

QUIET = (
    "monitor.plots=false",
    "monitor.progress_bar=false",
    "monitor.hardware=false",
    "trainer.num_threads=1",
)
GPT = (
    "model._target_=trainrun.model.gpt.Gpt", "model.vocab_size=11", "model.layers=2", "model.width=16", "model.heads=2",
    "model.context=8", "data.train._target_=test_settle.few_tokens", "data.val._target_=test_settle.few_tokens",
    "task=language_modeling", "trainer.limit_val_batches=1",
)  # fmt: skip
CPU = Single(torch.device("cpu"))
BFLOAT = torch.bfloat16
Seconds = Callable[[], float]


class Time:
    """A clock that only steps move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedTask:
    """The task, whose step takes as long as `seconds` says."""

    def __init__(self, inner: Any, time: Time, seconds: Seconds) -> None:
        self.inner, self.time, self.seconds = inner, time, seconds

    def __deepcopy__(self, memo: Any) -> TimedTask:
        return TimedTask(copy.deepcopy(self.inner, memo), self.time, self.seconds)

    def step(self, model: nn.Module, batch: Any) -> Any:
        self.time.now += self.seconds()
        return self.inner.step(model, batch)


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever CPU the tests run on."""
    monkeypatch.setattr(settle, "emulates_bfloat16", lambda device: False)


def in_bfloat16() -> bool:
    return torch.is_autocast_enabled("cpu")


def told(parts: Parts, seconds: Seconds, *words: str, batches: float = math.inf, measure: bool = True,
         chosen: dict[str, str] | None = None) -> tuple[RunConfig, dict[str, str], list[str], float]:  # fmt: skip
    """What `settled` makes of a config and of a model, by a clock of its own."""
    time, notes = Time(), []
    chosen = {} if chosen is None else chosen
    config = copy.deepcopy(parts.config)
    config.precision.mode = "auto"
    for word in words:
        key, _, value = word.partition("=")
        setattr(config.trainer, key, json.loads(value))
    task = TimedTask(parts.task, time, seconds)
    config = settled(config, parts.model, task, parts.train, CPU, chosen, measure, batches, notes, time)
    return config, chosen, notes, time.now


@pytest.mark.parametrize(
    ("full", "mixed", "mode"),
    [(0.004, 0.002, "bf16-mixed"), (0.002, 0.004, "32-true"), (0.002, 0.0019, "32-true")],
)
def test_the_faster_type_is_taken_and_float32_where_they_are_alike(
    full: float, mixed: float, mode: str
) -> None:
    config, chosen, notes, spent = told(parts_of((), count=64), lambda: mixed if in_bfloat16() else full)
    assert config.precision.mode == chosen["precision"] == mode
    assert notes == [
        f"precision: {mode}, " + (f"{1e3 * mixed:.3g} ms a step (32-true: {1e3 * full:.3g} ms)" if mode != "32-true"
                                  else f"{1e3 * full:.3g} ms a step (bf16-mixed: {1e3 * mixed:.3g} ms)")
    ]  # fmt: skip
    assert spent < 0.6


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ((), {"batches": 400}),
        (("deterministic=true",), {}),
        (('gradient_checkpointing="full"',), {}),
        ((), {"measure": False}),
        ((), {"chosen": {"precision": "32-true"}}),
    ],
)
def test_not_measured_where_it_may_not_or_need_not_be(words: tuple[str, ...], more: dict[str, Any]) -> None:
    config, chosen, notes, spent = told(
        parts_of((), count=64), lambda: 0.001 if in_bfloat16() else 0.002, *words, **more
    )
    assert spent == 0
    assert config.precision.mode == chosen["precision"] == "32-true"  # what suits a network so small
    assert bool(notes) == ("chosen" not in more)


def test_a_type_that_is_emulated_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "emulates_bfloat16", amp.emulates_bfloat16)
    for room in (amp, number_type):
        monkeypatch.setattr(room, "cpu_has", lambda *features: False)
    monkeypatch.setattr(amp, "is_x86", lambda: True)
    config, chosen, notes, spent = told(parts_of((), count=64), lambda: 0.001 if in_bfloat16() else 0.013)
    assert config.precision.mode == chosen["precision"] == "32-true"
    assert notes == [
        "precision: 32-true, not measured: this cpu has no bfloat16 arithmetic for matrix products"
    ]
    assert spent == 0


def test_a_step_that_takes_long_is_heard_on_few_samples_or_not_at_all() -> None:
    parts = parts_of((), count=4000, batch_size=64)
    config, _, notes, spent = told(parts, lambda: 0.05 if in_bfloat16() else 0.07)
    assert notes == ["precision: bf16-mixed, 50 ms a step of 1 sample (32-true: 70 ms)"]
    assert spent < 1.2
    config, _, notes, spent = told(parts, lambda: 0.3)
    assert "not measured" in notes[0]
    assert config.precision.mode == "32-true"
    assert spent < 1.0


def test_few_samples_that_are_slower_in_bfloat16_do_not_speak_for_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settle, "type_by_rule", lambda *model: ("bf16-mixed", "the rule"))
    parts = parts_of((), count=4000, batch_size=64)
    config, _, notes, _ = told(parts, lambda: 0.07 if in_bfloat16() else 0.05)
    assert config.precision.mode == "bf16-mixed"
    heard = "50 ms a step of 1 sample in 32-true (bf16-mixed: 70 ms)"
    assert notes == [f"precision: bf16-mixed, by rule: {heard} says too little of 64"]
    config, _, notes, _ = told(parts, lambda: 0.007 if in_bfloat16() else 0.005)
    assert notes == ["precision: 32-true, 5 ms a step (bf16-mixed: 7 ms)"]


@pytest.mark.parametrize("disturbed", [{2}, {2, 3}, {4}])
def test_a_step_that_was_disturbed_does_not_make_the_samples_few(disturbed: set[int]) -> None:
    calls = 0

    def seconds() -> float:
        nonlocal calls
        calls += 1
        return 0.06 if calls in disturbed else 0.002

    _, _, notes, _ = told(parts_of((), count=4000, batch_size=64), seconds)
    assert notes == ["precision: 32-true, 2 ms a step (bf16-mixed: 2 ms)"]


def test_the_run_does_not_feel_it() -> None:
    parts = parts_of((), count=64)
    weights = [parameter.clone() for parameter in parts.model.parameters()]
    before = random_state()["torch"]
    told(parts, lambda: 0.001)
    assert torch.equal(before, random_state()["torch"])
    assert all(torch.equal(a, b) for a, b in zip(weights, parts.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in parts.model.parameters())


def test_what_breaks_in_a_trial_ends_no_run() -> None:
    def broken() -> float:
        raise RuntimeError("not with two samples")

    config, _, notes, _ = told(parts_of((), count=64), broken)
    assert config.precision.mode == "32-true"
    assert "not measured" in notes[0]


def test_a_type_that_does_not_fit_into_memory_is_not_taken_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settle, "type_by_rule", lambda *_: ("bf16-mixed", "as on a GPU"))

    def seconds() -> float:
        if not in_bfloat16():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return 0.002

    config, chosen, notes, _ = told(parts_of((), count=64), seconds)
    assert config.precision.mode == chosen["precision"] == "bf16-mixed"
    assert notes == ["precision: bf16-mixed, 2 ms a step (32-true: does not fit into memory)"]


def test_memory_that_ends_in_a_later_round_counts_as_well() -> None:
    rounds = iter([0.001, 0.001])

    def small() -> float:
        if (seconds := next(rounds, None)) is None:
            raise MemoryError
        return seconds

    def broken() -> float:
        raise RuntimeError("shapes differ")

    assert fastest_times({"small": small, "large": lambda: 0.002}, 1.0) == {"small": math.inf, "large": 0.002}
    assert fastest_times({"small": small}, 1.0) == {}
    with pytest.raises(RuntimeError, match="shapes differ"):
        fastest_times({"broken": broken}, 1.0)


def test_what_does_not_fit_on_one_rank_is_taken_on_none() -> None:
    times = {"32-true": 1.0, "bf16-mixed": 2.0}
    assert agreed_times(times, lambda own: [own, {"32-true": math.inf, "bf16-mixed": 1.5}]) == {
        "32-true": math.inf, "bf16-mixed": 2.0,
    }  # fmt: skip
    assert agreed_times(times, lambda own: [own, dict.fromkeys(own, math.inf)]) == {}


def test_cudnn_searches_no_kernels_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of((), count=64)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen: set[bool] = set()

    def seconds() -> float:
        seen.add(torch.backends.cudnn.benchmark)
        return 0.002

    told(parts, seconds)
    assert seen == {False}
    assert torch.backends.cudnn.benchmark is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_tried_with_the_whole_batch_at_once() -> None:
    device = torch.device("cuda")
    parts = parts_of((), count=64)
    rows: list[int] = []
    model = parts.model.to(device)
    model.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    data = tuple(part.to(device) for part in next(parts.train.epoch(0)).data)
    size = Trial(model, parts.task, data, device).size(10.0, None)
    assert size is not None
    assert {size.few, size.rows, size.count} == {len(data[0])}
    assert set(rows) == {len(data[0])}


def test_the_slowest_rank_counts_and_one_without_a_time_decides() -> None:
    times = {"flash": 1.0, "plain": 2.0}
    assert agreed_times(times, lambda own: [own, {"flash": 3.0, "plain": 1.0}]) == {
        "flash": 3.0,
        "plain": 2.0,
    }
    assert agreed_times(times, lambda own: [own, {}]) == {}
    assert best_of({"flash": 1.0, "plain": 1.05}, usual="plain") == "plain"
    assert best_of({"flash": 1.0, "plain": 1.5}, usual="plain") == "flash"


def few_tokens(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(count * 8).view(count, 8) % 11
    return tokens, (tokens + 1) % 11


class OneBatch:
    """A stream of tokens."""

    def __init__(self, rows: int = 4) -> None:
        self.rows = rows

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        yield MicroBatch(few_tokens(self.rows))

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("half", "seconds", "kernel"),
    [
        (False, {"flash": 3, "plain": 2, "math": 1}, "math"),
        (False, {"flash": 1.05, "plain": 3, "math": 1}, "flash"),  # the rule's, nearly as fast
        (True, {"flash": 9, "fp32": 1, "plain": 2, "math": 3}, "fp32"),
    ],
)
def test_the_fastest_kernel_of_the_type_is_set(
    half: bool, seconds: dict[str, float], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, time, notes, chosen = copy.deepcopy(parts_of((), count=64).config), Time(), [], {}
    model = Gpt(11, context=8, layers=2, width=16, heads=2)

    def timed(*given: Any) -> torch.Tensor:
        time.now += 1e-4 * seconds.get(given[5], 1)
        return causal_attention(*given)

    monkeypatch.setattr(gpt, "causal_attention", timed)
    config.precision.mode = "bf16-mixed" if half else "32-true"
    found = settled(config, model, LanguageModeling(), OneBatch(), CPU, chosen, True, math.inf, notes, time)
    assert found is config
    assert chosen == {"attention": kernel}
    assert {block.attention.kernel for block in model.blocks} == {kernel}
    kind = " in bfloat16" if half else ""
    assert notes[0].startswith(f"model.attention: {kernel}, {0.1 * seconds[kernel]:.3g} ms a layer{kind} (flash: " if
                               kernel != "flash" else "model.attention: flash, 0.105 ms a layer (plain: ")  # fmt: skip
    assert ("fp32" in notes[0]) == half


@pytest.mark.parametrize(("factor", "kernel"), [(1, "plain"), (6, "fp32")])
def test_few_samples_that_hardly_take_time_do_not_speak_against_the_rule(
    factor: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call costs the same whatever comes in: 1 ms in one kernel, 2 ms in the rule's, or six times that."""
    config, time, notes, chosen = copy.deepcopy(parts_of((), count=64).config), Time(), [], {}
    model, rows = Gpt(11, context=8, layers=2, width=16, heads=2), set()

    def timed(*given: Any) -> torch.Tensor:
        rows.add(len(given[0]))
        time.now += 1e-3 * factor * {"fp32": 1, "plain": 2}.get(given[5], 3)
        return causal_attention(*given)

    monkeypatch.setattr(gpt, "causal_attention", timed)
    config.precision.mode = "bf16-mixed"
    settled(config, model, LanguageModeling(), OneBatch(64), CPU, chosen, True, math.inf, notes, time)
    assert chosen == {"attention": kernel}
    assert max(rows - {64}) < 32, "the premise: few of the 64 samples are heard"
    assert ("of 64 in bfloat16 say too little" in notes[0]) == (kernel == "plain")


@pytest.mark.parametrize(("flash", "kernel"), [(9, "fp32"), (9000, "flash")])  # the second leaves no time
def test_a_table_without_room_is_not_taken_by_rule_or_by_clock(
    flash: float, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, time, notes, chosen = copy.deepcopy(parts_of((), count=64).config), Time(), [], {}
    model, used = Gpt(11, context=8, layers=2, width=16, heads=2), set()

    def timed(*given: Any) -> torch.Tensor:
        used.add(given[5])
        time.now += 1e-4 * {"flash": flash, "fp32": 2}.get(given[5], 1)
        return causal_attention(*given)

    monkeypatch.setattr(gpt, "causal_attention", timed)
    monkeypatch.setattr(attention_kernel, "free_bytes", lambda device: 1000)
    config.precision.mode = "bf16-mixed"
    settled(config, model, LanguageModeling(), OneBatch(), CPU, chosen, True, math.inf, notes, time)
    assert chosen == {"attention": kernel}
    assert not used & {"plain", "math"}


def weights(folder: str) -> torch.Tensor:
    shared = read_checkpoint(resolve(RunDir(Path(folder)).checkpoints, "last")).shared["model"]
    return torch.cat([value.flatten() for value in shared.values()])


def test_a_choice_is_written_down_and_lasts_through_resume_and_evaluation(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*GPT, *QUIET, "seed=1", "trainer.ema.enabled=true"]
    named = ["precision=bf16", "model.attention=math"]
    assert main([*words, *named, "trainer.max_steps=6", "output_dir=named"]) == 0
    monkeypatch.setattr(settle.Settling, "decide", lambda self, chosen, *_: chosen.update(
        precision="bf16-mixed", attention="math"))  # fmt: skip
    assert main([*words, "precision=auto", "trainer.max_steps=3", "output_dir=open"]) == 0
    monkeypatch.setattr(settle.Settling, "decide", lambda *_: pytest.fail("measured again"))
    told = json.loads(Path("open/RUN.json").read_text())
    assert (told["precision"], told["attention"]) == ("bf16-mixed", "math")
    assert main(["resume", "open", "trainer.max_steps=6"]) == 0
    assert torch.equal(weights("open"), weights("named"))
    parts, _, _ = restored(RunDir(Path("open").absolute()), "last", [])
    assert parts.config.precision.mode == "bf16-mixed"
    assert {block.attention.kernel for block in parts.model.blocks} == {"math"}
    assert package.load_run("open").load_model("last").blocks[0].attention.kernel == "auto"


def test_a_run_too_short_for_it_stays_with_the_rule_when_it_goes_on(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*GPT, *QUIET, "trainer.max_steps=2", "output_dir=short"]) == 0
    assert json.loads(Path("short/RUN.json").read_text())["attention"] == "auto"
    monkeypatch.setattr(settle.Settling, "decide", lambda *_: pytest.fail("measured"))
    assert main(["resume", "short", "trainer.max_steps=1000", "trainer.max_time=0.2s"]) == 0


@pytest.mark.parametrize("word", ["precision.fp8=true", "precision.master_weights=true"])
def test_what_needs_a_type_by_name_is_refused_beside_auto(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        compose_run(["precision=auto", word])
