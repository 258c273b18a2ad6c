"""What a turn changed is put back to the last bit, whatever holds the state; where there is no room, nothing is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from trainrun.build.parts import Site, build_parts
from trainrun.checkpoint import snapshot
from trainrun.checkpoint.tree import flatten
from trainrun.lab import kept_state
from trainrun.lab.kept_state import KeptState, is_ordinary
from trainrun.lab.orders import WHOLE, Train
from trainrun.lab.subject import Subject
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.process.signals import StopFlag
from trainrun.rundir import RunDir
from trainrun.state import TrainState
from trainrun.words.compose import compose_run

WORDS = ["trainer.num_threads=1", "data.engine=auto", "trainer.max_epochs=1000", "monitor.plots=false",
         "checkpoint.enabled=false"]  # fmt: skip
KINDS = {
    "adam": [],
    "average": ["trainer.ema.enabled=true", "trainer.ema.decay=0.9"],
    "16 bits averaged": ["trainer.ema.enabled=true", "precision=bf16-true"],
    "masters": ["precision=bf16-true", "precision.master_weights=true"],
    "scaled": ["precision=16-mixed"],
    "batch norm": ["model=cnn", "model.width=2", "trainer.channels_last=true", "data.batch_size=8"],
    "in backward": [
        "trainer.optimizer_in_backward=true",
        "trainer.nan_policy=ignore",
        "trainer.out_of_memory=stop",
    ],
    "muon": ["optimizer=muon"],
    "replaced": ["optimizer=sgd", "optimizer._target_=test_kept_state.Replacing", "optimizer.momentum=0.9"],
}


class Replacing(torch.optim.SGD):
    """Puts other tensors in the places of its state instead of writing into them."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for entry in self.state.values():
            entry.update({name: value.clone() for name, value in entry.items() if isinstance(value, Tensor)})


class UnderTest:
    """A run of these words, some steps behind its beginning."""

    def __init__(self, words: list[str], folder: Path) -> None:
        torch.manual_seed(3)
        config = compose_run([*WORDS, *words]).config
        site = Site(RunDir(folder), "kept", Single(torch.device("cpu")), StopFlag(), [])
        self.parts: Parts = build_parts(config, site)[0]
        self.state = TrainState()
        self.parts.cadence.start(self.state)
        self.subject = Subject(self.parts, self.state, folder)
        self.train()

    def train(self, variant: str = "", again: bool = False) -> None:
        self.subject.obey(Train(3, 0, variant, again))

    def found(self) -> dict[str, Tensor]:
        shared, _ = self.parts.checkpoint_tree(self.state)
        parts = {name: shared[name] for name in ("model", "ema", "optimizer", "precision")}
        parts["optimizer"] = parts["optimizer"]["state"]
        _, tensors = flatten(parts)
        scale = torch.tensor([float(shared["precision"].get("scale", 0.0))])
        return {name: tensor.clone() for name, tensor in tensors.items()} | {"scale": scale}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., UnderTest]]:
    runs: list[UnderTest] = []

    def start(*words: str) -> UnderTest:
        runs.append(UnderTest(list(words), tmp_path))
        return runs[-1]

    yield start
    for run in runs:
        run.subject.close()


def different(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_start_again_start_from_the_same_numbers(
    started: Callable[..., UnderTest], kind: str
) -> None:
    run = started(*KINDS[kind])
    kept = KeptState(run.parts)
    kept.start_again()
    before, addresses = run.found(), [p.data_ptr() for p in run.parts.model.parameters()]
    for _ in range(2):
        run.train()
        assert different(run.found(), before)
        kept.start_again()
        assert different(run.found(), before) == []
    assert [p.data_ptr() for p in run.parts.model.parameters()] == addresses


@pytest.mark.parametrize("variant", ["without_update", "forward_only", "one_type", "cached", "threads=2"])
def test_a_removal_leaves_no_trace(started: Callable[..., UnderTest], variant: str) -> None:
    run = started("model=cnn", "model.width=2", "data.batch_size=8", "precision=bf16-mixed")
    before = run.found()
    run.train(variant)
    assert different(run.found(), before) == []
    run.train()
    assert different(run.found(), before)


def test_the_run_itself_goes_on_unless_it_is_told_to_start_again(started: Callable[..., UnderTest]) -> None:
    run = started()
    run.train(again=True)
    first = run.found()
    run.train()
    assert different(run.found(), first)
    run.train(WHOLE)
    steps = run.state.step
    run.train(again=True)
    assert run.state.step == steps + 3  # counts go on


def test_state_that_appears_later_makes_a_new_start(started: Callable[..., UnderTest]) -> None:
    run = started("optimizer=sgd", "optimizer.momentum=0.9")
    run.parts.optimizer.state.clear()
    kept = KeptState(run.parts)
    kept.start_again()
    run.train()
    kept.start_again()
    start = run.found()
    run.train()
    kept.start_again()
    assert different(run.found(), start) == []


def test_odd_state_is_no_obstacle(started: Callable[..., UnderTest]) -> None:
    run = started("optimizer=sgd", "optimizer.momentum=0.9")
    run.parts.model.register_buffer("large", torch.zeros(2**20 + 1), persistent=False)
    holder: dict[str, object] = {}
    holder["itself"] = holder
    run.parts.optimizer.state["apart"] = holder  # type: ignore[index]
    before = run.found()
    with KeptState(run.parts).without_trace():
        run.train()
        run.parts.model.large = torch.ones(2**20 + 1, dtype=torch.float64)
    del run.parts.optimizer.state["apart"]  # type: ignore[arg-type]
    assert different(run.found(), before) == []
    assert float(run.parts.model.large.min()) == 1  # of another type now


@pytest.mark.parametrize("others", [True, False])
def test_without_room_on_any_rank_nothing_is_kept(
    started: Callable[..., UnderTest], monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    run = started()
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 0)
    monkeypatch.setattr(kept_state, "free_bytes", lambda device: 2**40 if not others else 4 * 1000)
    parallel = SimpleNamespace(world_size=1, local_world_size=1, gather=lambda mine: [mine, others])
    parts = SimpleNamespace(
        **{name: getattr(run.parts, name) for name in ("model", "optimizer", "ema", "precision")}
    )
    parts.parallel = parallel
    kept = KeptState(parts)  # type: ignore[arg-type]
    kept.start_again()
    with kept.without_trace():
        run.train()
    after = run.found()
    kept.start_again()
    assert different(run.found(), after) == []


def test_what_a_step_cannot_write_into_is_left_out() -> None:
    plain = torch.zeros(3)
    assert all(
        is_ordinary(each) for each in (plain, nn.Parameter(plain), plain.expand(1, 3), torch.zeros(2, 3).t())
    )
    with torch.inference_mode():
        made = torch.zeros(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the end of such tensors
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        quantized = torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8)
    shown = torch.zeros(2, dtype=torch.complex64).conj()
    odd = [
        shown,
        shown.imag,
        nested,
        plain.expand(2, 3),
        plain.to_sparse(),
        nn.UninitializedBuffer(),
        plain.to("meta"),
        made,
        quantized,
    ]
    assert not any(is_ordinary(each) for each in odd)
