"""What the benchmarks against hand-written loops share: turns in one process, and ratios with intervals."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from trainrun.assemble.assemble import RunContext, build_components
from trainrun.assemble.monitors import RunMonitors
from trainrun.config.compose import compose_run
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.runs.run import create_run
from trainrun.runtime.collector import collect_between_steps, restore_collector
from trainrun.runtime.signals import StopFlag
from trainrun.seeding import derive_seed, seed_everything
from trainrun.timing.phases import PhaseTimer
from trainrun.train_state import TrainState
from trainrun.training import loop
from trainrun.training.components import Components

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
    """A monitor: whenever the runner has validated, every hand-written loop does the same."""

    def __init__(self, hands: Mapping[str, Hand], state: TrainState) -> None:
        self.hands, self.state = dict(hands), state
        self.ours: list[Turn] = []
        self.theirs: dict[str, list[Turn]] = {name: [] for name in hands}
        self.mark = self.items = 0.0

    def on_start(self, facts: object, step: int) -> None:
        for hand in self.hands.values():
            next(hand)

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        """Nothing: turns end where both validate."""

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._turn(row["val/loss"])
        self.mark = now()

    def _turn(self, loss: float) -> None:
        self.ours.append(Turn(now() - self.mark, loss, self.state.items - self.items))
        self.items = self.state.items
        for name, hand in self.hands.items():
            started = now()
            found = next(hand)
            self.theirs[name].append(Turn(now() - started, *found))
        self.mark = now()

    def on_note(self, text: str) -> None: ...

    def on_end(self, summary: object) -> None: ...

    def close(self) -> None: ...


class Round(NamedTuple):
    turns: TakesTurns
    run: Components
    state: TrainState


def one_round(words: list[str], folder: Path, hands: Callable[[Components], Mapping[str, Hand]],
              device: str = "cpu") -> Round:  # fmt: skip
    """The runner's `loop.fit` with all that its config switches on, and the hand-written loops in its pauses."""
    composition = compose_run([*words, on(device), f"seed={SEED}", f"output_dir={folder / 'run'}"])
    config = composition.config
    run_dir = create_run(composition, words)
    phases = PhaseTimer()
    listeners = RunMonitors(run_dir, config, phases)
    monitors = list(listeners.monitors)
    parallel, heard = Single(choose_device(device)), (listeners.on_position, listeners.on_log)
    site = RunContext(run_dir, "bench", parallel, StopFlag(), monitors, *heard, phases=phases, measures=True)
    before = torch.get_num_threads()
    closing = contextlib.ExitStack()
    closing.enter_context(restore_collector())
    try:
        seed_everything(derive_seed(SEED))
        run, facts = build_components(config, site)
        state = TrainState()
        turns = TakesTurns(hands(run), state)
        monitors.append(turns)
        listeners.attach(run, state)
        collect_between_steps()
        run.triggers.start(state)
        seed_everything(derive_seed(SEED))
        run.monitors.on_start(facts, state)
        turns.mark = now()
        loop.fit(run, state)
        run.checkpoints.close()  # what is still being written counts
        last = turns.ours.pop()  # with the best and the last checkpoint
        turns.ours.append(last._replace(seconds=last.seconds + now() - turns.mark))
        return Round(turns, run, state)
    finally:
        closing.close()
        listeners.close()
        torch.set_num_threads(before)


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
