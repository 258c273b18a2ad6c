"""What a turn changed is put back to the last bit, whatever holds the state; where there is no room, nothing is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from trainrun.assemble.assemble import RunContext, build_components
from trainrun.benchmark import snapshot
from trainrun.benchmark.remote_loop import Worker
from trainrun.benchmark.snapshot import StateSnapshot, is_ordinary
from trainrun.benchmark.worker_messages import Train
from trainrun.checkpoint.save import flatten_tree
from trainrun.config.compose import compose_run
from trainrun.folder.run_folder import RunDir
from trainrun.parallel.single import Single
from trainrun.runtime.signals import StopFlag
from trainrun.train_state import TrainState
from trainrun.training.components import Components

WORDS = ["trainer.num_threads=1", "data.engine=auto", "trainer.max_epochs=1000", "monitor.plots=false",
         "checkpoint.enabled=false"]  # fmt: skip
KINDS = {
    "adam": [],
    "average": ["trainer.ema.enabled=true", "trainer.ema.decay=0.9"],
    "16 bits averaged": ["trainer.ema.enabled=true", "precision=bf16-true"],
    "scaled": ["precision=16-mixed"],
    "batch norm": ["model=cnn", "model.width=2", "trainer.channels_last=true", "data.batch_size=8"],
    "muon": ["optimizer=muon"],
    "replaced": ["optimizer=sgd", "optimizer._target_=test_snapshot.Replacing", "optimizer.momentum=0.9"],
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
        site = RunContext(RunDir(folder), "kept", Single(torch.device("cpu")), StopFlag(), [])
        self.run: Components = build_components(config, site)[0]
        self.state = TrainState()
        self.run.triggers.start(self.state)
        self.worker = Worker(self.run, self.state, folder)
        self.train()

    def train(self, variant: str = "") -> None:
        self.worker.reply(Train(3, 0, variant, restart=False))

    def found(self) -> dict[str, Tensor]:
        shared, _ = self.run.checkpoint_tree(self.state)
        kept = {name: shared[name] for name in ("model", "ema", "optimizer", "precision")}
        kept["optimizer"] = kept["optimizer"]["state"]
        _, tensors = flatten_tree(kept)
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
        run.worker.close()


def different(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_start_again_start_from_the_same_numbers(
    started: Callable[..., UnderTest], kind: str
) -> None:
    run = started(*KINDS[kind])
    kept = StateSnapshot(run.run)
    kept.restart()
    before, addresses = run.found(), [p.data_ptr() for p in run.run.model.parameters()]
    for _ in range(2):
        run.train()
        assert different(run.found(), before)
        kept.restart()
        assert different(run.found(), before) == []
    assert [p.data_ptr() for p in run.run.model.parameters()] == addresses


@pytest.mark.parametrize("variant", ["", "no_update", "one_type", "cached", "threads=2"])
def test_every_turn_starts_from_the_first(started: Callable[..., UnderTest], variant: str) -> None:
    run = started("model=cnn", "model.width=2", "data.batch_size=8", "precision=bf16-mixed")
    run.train("keeping")
    first = run.found()
    run.worker.reply(Train(1, 0, variant))  # the first keeps what it begins with
    run.train("no_logging")
    assert different(run.found(), first)
    run.worker.reply(Train(0, 0, variant))
    assert different(run.found(), first) == []


def test_state_that_appears_later_makes_a_new_start(started: Callable[..., UnderTest]) -> None:
    run = started("optimizer=sgd", "optimizer.momentum=0.9")
    run.run.optimizer.state.clear()
    kept = StateSnapshot(run.run)
    kept.restart()
    run.train()
    kept.restart()
    start = run.found()
    run.train()
    kept.restart()
    assert different(run.found(), start) == []


def test_odd_state_is_no_obstacle(started: Callable[..., UnderTest]) -> None:
    run = started("optimizer=sgd", "optimizer.momentum=0.9")
    run.run.model.register_buffer("large", torch.zeros(2**20 + 1), persistent=False)
    holder: dict[str, object] = {}
    holder["itself"] = holder
    run.run.optimizer.state["apart"] = holder  # type: ignore[index]
    before = run.found()
    kept = StateSnapshot(run.run)
    kept.restart()
    run.train()
    run.run.model.large = torch.ones(2**20 + 1, dtype=torch.float64)
    kept.restart()
    del run.run.optimizer.state["apart"]  # type: ignore[arg-type]
    assert different(run.found(), before) == []
    assert float(run.run.model.large.min()) == 1  # of another type now


@pytest.mark.parametrize("others", [True, False])
def test_without_room_on_any_rank_nothing_is_kept(
    started: Callable[..., UnderTest], monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    run = started()
    monkeypatch.setattr(snapshot, "SMALL_BYTES", 0)
    monkeypatch.setattr(snapshot, "read_free_bytes", lambda device: 2**40 if not others else 1000)
    parallel = SimpleNamespace(
        local_world_size=1, gather=lambda mine: [mine, others], device=torch.device("cpu")
    )
    kept = StateSnapshot(replace(run.run, parallel=parallel))
    kept.restart()
    run.train()
    after = run.found()
    kept.restart()
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
