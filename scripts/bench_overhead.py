"""The runner against the best hand-written loop for the same work, interleaved in one process.

    python scripts/bench_overhead.py [--rounds 7] [--epochs 60] [--wide]

Work: scikit-learn's digits, batch 32, AdamW, one validation an epoch, a log line every 50 steps. The
hand-written loop keeps the data in memory, uses the fused AdamW, never waits for the device inside a
step, keeps the best state in memory, and writes the best and the last with torch.save at its end (the
runner writes its two with checksums and fsync). Both end with the same loss. `--wide`
widens the network until a step takes about 2 ms. What is printed is the median of the paired ratios
with its range, and the ratio of the fastest rounds. One thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.nn import functional

from trainrun import loop
from trainrun.build import Site, build_parts
from trainrun.compose import compose_run
from trainrun.data import digits
from trainrun.listeners import Listeners
from trainrun.model.mlp import Mlp
from trainrun.parallel.single import Single
from trainrun.parts import TrainState
from trainrun.randomness import derive_seed, seed_everything
from trainrun.runner import new_run
from trainrun.signals import StopFlag

SEED = 42


def hand_written(epochs: int, hidden: list[int], folder: Path) -> tuple[float, float, int]:
    """Seconds, final validation loss, steps."""
    seed_everything(derive_seed(SEED))
    model = Mlp([1, 8, 8], 10, hidden)
    x, y = (tensor for tensor in tensors(digits.load("train")))
    x_val, y_val = (tensor for tensor in tensors(digits.load("val")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    best, losses, step, val_loss = 0.0, [], 0, 0.0
    kept: list[torch.Tensor] = []
    started = time.perf_counter()
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
                    log.write(
                        json.dumps({"step": step, "train/loss": torch.stack(losses).mean().item()}) + "\n"
                    )
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
    torch.save(kept, folder / "best.pt")
    torch.save(state_of(model, optimizer, clone=False), folder / "last.pt")
    return time.perf_counter() - started, val_loss, step


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, clone: bool) -> list[torch.Tensor]:
    """Weights and moments, as a hand-written loop would keep them."""
    found = [*model.state_dict().values(), *(v for group in optimizer.state.values() for v in group.values())]
    return [tensor.clone() if clone else tensor for tensor in found]


def tensors(source: object) -> tuple[torch.Tensor, ...]:
    found = source if isinstance(source, tuple) else source.tensors  # type: ignore[attr-defined]
    return tuple(torch.as_tensor(item) for item in found)


def runner(epochs: int, hidden: list[int], folder: Path, words: list[str]) -> tuple[float, float, int]:
    """The same work through `loop.fit`, with all defaults on."""
    words = [
        f"trainer.max_epochs={epochs}",
        f"model.hidden={hidden}".replace(" ", ""),
        f"seed={SEED}",
        *words,
    ]
    composition = compose_run([*words, f"output_dir={folder / 'run'}"])
    config = composition.config
    run = new_run(composition, words)
    seed_everything(derive_seed(SEED))
    parallel, flag = Single(torch.device("cpu")), StopFlag()
    listeners = Listeners(run, config)
    site = Site(
        run, "bench", parallel, flag, listeners.monitors,
        listeners.on_position, listeners.on_log,
    )  # fmt: skip
    try:
        parts, facts = build_parts(config, site)
        state = TrainState()
        listeners.attach(parts, state)
        parts.cadence.start(state)
        parts.board.on_start(facts, state)
        started = time.perf_counter()
        loop.fit(parts, state)
        seconds = time.perf_counter() - started
        return seconds, state.last_metrics["val/loss"], state.step
    finally:
        listeners.close()


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
    pairs, fastest = [], [float("inf"), float("inf")]
    null = os.open(os.devnull, os.O_WRONLY)
    for number in range(given.rounds + 1):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            stdout = os.dup(1)
            os.dup2(null, 1)
            if number % 2:
                first = hand_written(given.epochs, hidden, folder)
                second = runner(given.epochs, hidden, folder, given.words)
            else:
                second = runner(given.epochs, hidden, folder, given.words)
                first = hand_written(given.epochs, hidden, folder)
            os.dup2(stdout, 1)
        (hand, hand_loss, steps), (ours, our_loss, our_steps) = first, second
        assert steps == our_steps
        assert abs(hand_loss - our_loss) < 1e-3 * max(1.0, hand_loss), (hand_loss, our_loss)
        micro = 1e6 / steps
        note = "  (warm-up, not counted)" if number == 0 else ""
        print(
            f"round {number}: hand {hand * micro:7.1f} us/step  runner {ours * micro:7.1f} us/step  "
            f"{ours / hand:.3f}x  load {os.getloadavg()[0]:.1f}{note}",
            flush=True,
        )
        if number:
            pairs.append(ours / hand)
            fastest = [min(fastest[0], hand), min(fastest[1], ours)]
    print(f"median of paired ratios {statistics.median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f}); "
          f"fastest rounds {fastest[1] / fastest[0]:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
