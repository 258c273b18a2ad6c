"""Small networks, data and runs in memory; as a script, what one of several ranks does with them.

`exact_parts.py RUN_DIR`: RUN_DIR/scenarios.json maps names to words; rank 0 writes results.json.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.assemble.assemble import RunContext, build_components
from trainrun.config.compose import compose_run
from trainrun.config.schema import ParallelConfig, RunConfig, replace_values
from trainrun.folder.run_folder import RunDir, write_text
from trainrun.interfaces import Parallel
from trainrun.model.cnn import Cnn
from trainrun.parallel.single import Single
from trainrun.parallel.worker import run_as_rank
from trainrun.runtime.signals import StopFlag
from trainrun.seeding import derive_seed, seed_everything
from trainrun.timing.phases import PhaseTimer
from trainrun.train_state import TrainState
from trainrun.training import loop
from trainrun.training.components import Components

FEATURES, CLASSES, TOKENS = 5, 3, 7
WORDS = (
    "model=exact_parts.Net", "task.class_dim=-1", "optimizer=sgd", "optimizer.lr=0.3", "optimizer.momentum=0.9",
    "data.train._target_=exact_parts.samples", "trainer.max_epochs=1", "trainer.num_threads=1",
    "checkpoint.enabled=false", "monitor.log_every_n_steps=1", "monitor.hardware=false", "monitor.plots=false",
)  # fmt: skip
FOLDER = Path(
    tempfile.gettempdir(), f"exact-parts-{os.getpid()}"
)  # of steps that are not finite, if there are any
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
WALL_CLOCK = {"samples_per_second", "items_per_second", "tokens_per_second", "step_seconds",
              "val/seconds", "test/seconds", "val/day/seconds", "val/night/seconds"}  # fmt: skip


class Net(nn.Module):
    """(B, ..., FEATURES) -> (B, ..., CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class PictureNet(Cnn):
    """(B, 2, 8, 8) -> (B, CLASSES), with weights in channels_last."""

    def __init__(self) -> None:
        super().__init__([2, 8, 8], CLASSES, width=4, norm="layer")


class Capped(Net):
    """A network for which memory ends in training above `limit` samples; of one rank where `only_rank` is set."""

    def __init__(self, limit: int, only_rank: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.limit, self.only_rank = limit, only_rank
        self.dropout = nn.Dropout(dropout)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        here = self.only_rank is None or torch.distributed.get_rank() == self.only_rank
        x = self.layers[:2](x)  # some of the forward is done, and has drawn random numbers, when memory ends
        x = self.dropout(x)
        if self.training and here and len(x) > self.limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        self.seen += [len(x)] if self.training else []
        return self.layers[2:](x)


def samples(count: int = 13, seed: int = 1, bad: int | None = None) -> tuple[Tensor, Tensor]:
    """x (N, FEATURES), y (N,). bad: the index of a sample that is not a number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    if bad is not None:
        x[bad] = torch.nan
    return x, torch.randint(CLASSES, (count,), generator=generator)


def pictures(count: int = 13, seed: int = 1) -> tuple[Tensor, Tensor]:
    """x (N, 2, 8, 8), y (N,)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def tokens(count: int = 13, seed: int = 1, empty_below: int = 0) -> tuple[Tensor, Tensor]:
    """x (N, TOKENS, FEATURES), y (N, TOKENS); from 1 to TOKENS of them count, none of the first `empty_below`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (count, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (count,), generator=generator)
    lengths[:empty_below] = 0
    y[torch.arange(TOKENS) >= lengths[:, None]] = -100
    return x, y


class Recorder:
    """A monitor that keeps the rows, without wall-clock times."""

    def __init__(self) -> None:
        self.train: list[dict[str, float]] = []
        self.eval: list[dict[str, float]] = []

    def on_start(self, facts: Any, step: int) -> None: ...

    def on_step(self, step: int, epoch: float, row: Any) -> None:
        self.train.append({"step": step, **{k: v for k, v in row.items() if k not in WALL_CLOCK}})

    def on_eval(self, step: int, epoch: float, row: Any) -> None:
        self.eval.append({"step": step, **{k: v for k, v in row.items() if k not in WALL_CLOCK}})

    def on_note(self, text: str) -> None: ...

    def on_end(self, summary: Any) -> None: ...

    def close(self) -> None: ...


@functools.cache
def composed(words: tuple[str, ...]) -> RunConfig:
    has_momentum = not {"optimizer=adamw", "optimizer=muon", "optimizer=custom"} & {*words}
    return compose_run([word for word in WORDS if has_momentum or "momentum" not in word] + [*words]).config


def parts_of(words: tuple[str, ...], recorder: Recorder | None = None, parallel: Parallel | None = None,
             phases: PhaseTimer | None = None, write: Any = None, **data: Any) -> Components:  # fmt: skip
    """Real `Components`. data: fields of the section `data`, and `accumulate`, without composing anew."""
    config = composed(words)
    inner = {f"data.train.{name}": data.pop(name) for name in ("count", "bad") if name in data}
    more = {"trainer.accumulate_grad_batches": data.pop("accumulate")} if "accumulate" in data else {}
    config = replace_values(config, inner | more | {f"data.{name}": value for name, value in data.items()})
    seed_everything(derive_seed(config.seed))
    ranks = parallel or Single(torch.device("cpu"))
    site = RunContext(RunDir(FOLDER), "exact", ranks, StopFlag(), [recorder] if recorder else [],
                phases=phases or PhaseTimer(), write=write)  # fmt: skip
    return build_components(config, site)[0]


def fitted(run: Components) -> TrainState:
    state = TrainState()
    run.triggers.start(state)
    state = loop.fit(run, state)
    run.checkpoints.close()
    run.train.close()
    return state


def result(words: tuple[str, ...], parallel: Parallel | None = None, **data: Any) -> dict[str, Any]:
    """What a run ends with: weights, averaged weights and all rows."""
    recorder = Recorder()
    run = parts_of(words, recorder, parallel, **data)
    state = fitted(run)
    with run.evaluating() as model:
        averaged = whole_weights(model)
    return {
        "weights": whole_weights(run.model),
        "averaged": averaged,
        "train": recorder.train,
        "eval": recorder.eval,
        "skipped": state.skipped_steps,
    }


def histograms_of(parallel: Parallel | None, batch_size: int) -> dict[str, Any]:
    """Return the last row of histograms of a short run whose gradients are clipped."""
    words = ("precision=64", "data.train.count=16", "trainer.gradient_clip_val=0.05",
             "monitor.histograms_every_n_steps=1")  # fmt: skip
    rows: list[dict[str, Any]] = []
    run = parts_of(words, None, parallel, write=rows.append, batch_size=batch_size)
    fitted(run)
    tables = [row["histograms"] for row in rows if row["kind"] == "histogram"]
    return tables[-1] if tables else {}


def whole_weights(model: nn.Module) -> list[list[float]]:
    """Return the weights; of a model in shards the whole ones."""
    params = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [param.double().flatten().tolist() for param in params]


def work(parallel: Parallel, flag: StopFlag) -> int:
    folder = Path(sys.argv[1])
    scenarios = json.loads((folder / "scenarios.json").read_text())
    results = {name: result(tuple(words), parallel) for name, words in scenarios.items()}
    if parallel.rank == 0:
        write_text(folder / "results.json", json.dumps(results))
    return 0


if __name__ == "__main__":
    OPTIONS = ParallelConfig(mode="ddp", accelerator="cpu", timeout_seconds=600.0)
    sys.exit(run_as_rank(RunDir(Path(sys.argv[1])), OPTIONS, work))
