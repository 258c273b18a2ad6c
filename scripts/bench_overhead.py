"""The runner against the best hand-written loop for the same work, interleaved in one process.

    python scripts/bench_overhead.py [--rounds 7] [--epochs 60] [--wide]

Work: scikit-learn's digits, batch 32, AdamW, one validation an epoch, a log line every 50 steps. The
hand-written loop keeps the data in memory, uses the fused AdamW, never waits for the device inside a
step, keeps the best state in memory, and writes the best and the last with torch.save at its end (the
runner writes its two with checksums and fsync). Both end with the same loss. They take turns after
every epoch, so that whatever else the machine does falls on both. `--wide` widens the network until
a step takes about 2 ms. What is printed is the ratio of all seconds, checkpoints included, with an
interval of 95 %, and the median over the epochs. One thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.nn import functional

from trainrun import loop
from trainrun.build import Site, build_parts
from trainrun.compose import compose_run
from trainrun.data import digits
from trainrun.ledger import Ledger
from trainrun.listeners import Listeners
from trainrun.model.mlp import Mlp
from trainrun.parallel.single import Single
from trainrun.randomness import derive_seed, seed_everything
from trainrun.runner import new_run
from trainrun.signals import StopFlag
from trainrun.state import TrainState

SEED = 42


def hand_written(epochs: int, hidden: list[int], folder: Path) -> Iterator[tuple[float, int]]:
    """Validation loss and steps after each epoch, which runs when it is asked for; then writes its files."""
    model = Mlp([1, 8, 8], 10, hidden)
    x, y = (tensor for tensor in tensors(digits.load("train")))
    x_val, y_val = (tensor for tensor in tensors(digits.load("val")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    best, losses, step = 0.0, [], 0
    kept: list[torch.Tensor] = []
    yield 0.0, 0
    with (folder / "log.jsonl").open("a") as log:
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(derive_seed(SEED, epoch))
            order = torch.randperm(len(x), generator=generator)
            for index in order.split(32):
                loss = functional.cross_entropy(model(x.index_select(0, index)), y.index_select(0, index))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())
                step += 1
                if step % 50 == 0:
                    mean = torch.stack(losses).mean().item()
                    log.write(json.dumps({"step": step, "train/loss": mean}) + "\n")
                    losses.clear()
            model.eval()
            with torch.no_grad():
                logits = model(x_val)
                val_loss = functional.cross_entropy(logits, y_val).item()
                accuracy = (logits.argmax(1) == y_val).float().mean().item()
            model.train()
            log.write(json.dumps({"step": step, "val/loss": val_loss, "val/acc": accuracy}) + "\n")
            if accuracy > best:
                best = accuracy
                kept = state_of(model, optimizer, clone=True)
            if epoch < epochs - 1:
                yield val_loss, step
    torch.save(kept, folder / "best.pt")
    torch.save(state_of(model, optimizer, clone=False), folder / "last.pt")
    yield val_loss, step


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, clone: bool) -> list[torch.Tensor]:
    """Weights and moments, as a hand-written loop would keep them."""
    found = [*model.state_dict().values(), *(v for group in optimizer.state.values() for v in group.values())]
    return [tensor.clone() if clone else tensor for tensor in found]


def tensors(source: object) -> tuple[torch.Tensor, ...]:
    found = source if isinstance(source, tuple) else source.tensors  # type: ignore[attr-defined]
    return tuple(torch.as_tensor(item) for item in found)


class TakesTurns:
    """A monitor: after each epoch of the runner, the same epoch of the hand-written loop."""

    def __init__(self, hand: Iterator[tuple[float, int]]) -> None:
        self.hand, self.last = hand, (0.0, 0)
        self.ours: list[float] = []  # seconds of each epoch
        self.theirs: list[float] = []
        self.mark = 0.0

    def on_start(self, facts: object, step: int) -> None:
        next(self.hand)  # builds its model

    def on_step(self, step: int, epoch: float, row: object) -> None: ...

    def on_eval(self, step: int, epoch: float, row: object) -> None:
        started = time.perf_counter()
        self.ours.append(started - self.mark)
        self.last = next(self.hand)
        self.mark = time.perf_counter()
        self.theirs.append(self.mark - started)

    def on_note(self, text: str) -> None: ...

    def on_end(self, summary: object) -> None: ...

    def close(self) -> None: ...


def one_round(epochs: int, hidden: list[int], folder: Path, words: list[str]) -> TakesTurns:
    """The runner's `loop.fit` with all defaults on, and the hand-written loop in its pauses."""
    words = [
        f"trainer.max_epochs={epochs}",
        f"model.hidden={hidden}".replace(" ", ""),
        f"seed={SEED}",
        *words,
    ]
    composition = compose_run([*words, f"output_dir={folder / 'run'}"])
    config = composition.config
    run = new_run(composition, words)
    parallel, flag = Single(torch.device("cpu")), StopFlag()
    turns = TakesTurns(hand_written(epochs, hidden, folder))
    ledger = Ledger()
    listeners = Listeners(run, config, ledger)
    monitors = [*listeners.monitors, turns]
    site = Site(
        run, "bench", parallel, flag, monitors, listeners.on_position, listeners.on_log, ledger=ledger
    )
    try:
        seed_everything(derive_seed(SEED))
        parts, facts = build_parts(config, site)
        state = TrainState()
        listeners.attach(parts, state)
        parts.cadence.start(state)
        seed_everything(derive_seed(SEED))
        parts.board.on_start(facts, state)
        turns.mark = time.perf_counter()
        loop.fit(parts, state)
        parts.checkpoints.close()
        turns.ours[-1] += time.perf_counter() - turns.mark  # the best and the last checkpoint
        val_loss, steps = turns.last
        assert steps == state.step
        assert abs(val_loss - state.last_metrics["val/loss"]) < 1e-3 * max(1.0, val_loss)
        return turns
    finally:
        listeners.close()


def interval(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """95 % of the ratio of the sums, by resampling the pairs of epochs."""
    draw = random.Random(0)
    pairs = list(zip(ours, theirs, strict=True))
    ratios = []
    for _ in range(1000):
        sample = draw.choices(pairs, k=len(pairs))
        ratios.append(sum(one for one, _ in sample) / sum(other for _, other in sample))
    ratios.sort()
    return ratios[25], ratios[974]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--wide", action="store_true", help="a network whose step takes about 2 ms")
    parser.add_argument("words", nargs="*", help="further overrides of the runner's side")
    given = parser.parse_args()
    hidden = [1024, 512] if given.wide else [128]
    torch.set_num_threads(1)
    ours: list[float] = []
    theirs: list[float] = []
    null = os.open(os.devnull, os.O_WRONLY)
    for number in range(given.rounds + 1):
        with tempfile.TemporaryDirectory() as temporary:
            stdout = os.dup(1)
            os.dup2(null, 1)
            turns = one_round(given.epochs, hidden, Path(temporary), given.words)
            os.dup2(stdout, 1)
        runner, hand, micro = sum(turns.ours), sum(turns.theirs), 1e6 / turns.last[1]
        note = "  (warm-up, not counted)" if number == 0 else ""
        print(
            f"round {number}: hand {hand * micro:7.1f} us/step  runner {runner * micro:7.1f} us/step  "
            f"{runner / hand:.3f}x  load {os.getloadavg()[0]:.1f}{note}",
            flush=True,
        )
        if number:
            ours += turns.ours
            theirs += turns.theirs
    low, high = interval(ours, theirs)
    epochs = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    print(f"runner / hand {sum(ours) / sum(theirs):.3f} ({low:.3f} to {high:.3f}, {len(ours)} pairs of epochs); "
          f"median epoch {epochs:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
