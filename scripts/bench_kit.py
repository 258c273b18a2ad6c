"""What the benchmarks against hand-written loops share: turns in one process, and ratios with intervals."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from trainrun import loop
from trainrun.build.listeners import Listeners
from trainrun.build.parts import Site, build_parts
from trainrun.lab.statistics import resampled
from trainrun.ledger import Ledger
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.process.collector import collect_between_steps, kept_collector
from trainrun.process.signals import StopFlag
from trainrun.randomness import derive_seed, seed_everything
from trainrun.rundir import RunDir
from trainrun.runner import new_run
from trainrun.start.stage import Stage
from trainrun.start.threads import choose_threads
from trainrun.state import TrainState
from trainrun.words.compose import compose_run

SEED = 42


def now() -> float:
    """Seconds, once all that was asked of a GPU is done."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both sides")


def on(device: str) -> str:
    return f"parallel.accelerator={device}"


class Turn(NamedTuple):
    """What one side did until it was the other's turn. items: what the loss was averaged over."""

    seconds: float
    loss: float
    items: float = 0.0


Hand = Iterator[tuple[float, float]]  # loss and items since the last turn; the first `next` builds


class TakesTurns:
    """A monitor: whenever the runner has done its part, every hand-written loop does the same.

    at: `eval`, where both validate, or `step`: log points, without the validation of either.
    """

    def __init__(self, hands: Mapping[str, Hand], state: TrainState, at: str, threads: int | None) -> None:
        self.hands, self.state, self.at, self.threads = dict(hands), state, at, threads
        self.ours: list[Turn] = []
        self.theirs: dict[str, list[Turn]] = {name: [] for name in hands}
        self.mark = self.items = 0.0

    def on_start(self, facts: object, step: int) -> None:
        for hand in self.hands.values():
            next(hand)

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        if self.at == "step":
            self._turn(row["train/loss"])

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        if self.at == "eval":
            self._turn(row["val/loss"])
        self.mark = now()

    def _turn(self, loss: float) -> None:
        self.ours.append(Turn(now() - self.mark, loss, self.state.items - self.items))
        self.items = self.state.items
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads or threads)
        for name, hand in self.hands.items():
            started = now()
            found = next(hand)
            self.theirs[name].append(Turn(now() - started, *found))
        torch.set_num_threads(threads)
        self.mark = now()

    def on_note(self, text: str) -> None: ...

    def on_end(self, summary: object) -> None: ...

    def close(self) -> None: ...


class Round(NamedTuple):
    turns: TakesTurns
    parts: Parts
    state: TrainState


def one_round(words: list[str], folder: Path, hands: Callable[[Parts], Mapping[str, Hand]], at: str = "eval",
              threads: int | None = None, device: str = "cpu") -> Round:  # fmt: skip
    """The runner's `loop.fit` with all that its config switches on, and the hand-written loops in its pauses.

    threads: of the hand-written loops; None: as many as the runner takes.
    """
    composition = compose_run([*words, on(device), f"seed={SEED}", f"output_dir={folder / 'run'}"])
    config = composition.config
    run = new_run(composition, words)
    ledger = Ledger()
    listeners = Listeners(run, config, ledger)
    monitors = list(listeners.monitors)
    site = Site(
        run,
        "bench",
        Single(choose_device(device)),
        StopFlag(),
        monitors,
        listeners.on_position,
        listeners.on_log,
        ledger=ledger,
    )
    before = torch.get_num_threads()
    closing = contextlib.ExitStack()
    closing.enter_context(kept_collector())
    try:
        seed_everything(derive_seed(SEED))
        parts, facts = build_parts(config, site)
        with Stage(parts) as stage:
            choose_threads(parts, None, stage)
        state = TrainState()
        turns = TakesTurns(hands(parts), state, at, threads)
        monitors.append(turns)
        listeners.attach(parts, state)
        if config.trainer.python_gc == "between_steps":
            collect_between_steps()
        parts.cadence.start(state)
        seed_everything(derive_seed(SEED))
        parts.board.on_start(facts, state)
        turns.mark = now()
        loop.fit(parts, state)
        parts.checkpoints.close()  # what is still being written counts
        if at == "eval":  # the best and the last checkpoint
            last = turns.ours.pop()
            turns.ours.append(last._replace(seconds=last.seconds + now() - turns.mark))
        return Round(turns, parts, state)
    finally:
        closing.close()
        listeners.close()
        torch.set_num_threads(before)


def built(words: list[str], device: str = "cpu") -> Parts:
    """Parts for their data and model; nothing is trained or written with them."""
    composition = compose_run([*words, on(device), f"seed={SEED}"])
    site = Site(RunDir(Path("nowhere")), "bench", Single(choose_device(device)), StopFlag(), [])
    return build_parts(composition.config, site)[0]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hide everything that is printed inside."""
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(null)
        os.close(stdout)


def spread(values: list[float]) -> str:
    low, high = resampled(values, 0.95)
    return f"{statistics.median(values):.3f} ({low:.3f} to {high:.3f}, {len(values)} pairs)"


def machine() -> str:
    """One line for every table: without it a ratio says nothing."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    kinds = [
        kind for kind in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if any(kind in line for line in lines)
    ]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{name} ({', '.join(kinds[:2])}), {os.cpu_count()} cores, torch {torch.__version__}, Python " \
           f"{platform.python_version()}, load {load}"  # fmt: skip
