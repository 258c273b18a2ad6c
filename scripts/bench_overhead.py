"""The runner against the best hand-written loop for the same work, interleaved in one process.

    python scripts/bench_overhead.py [--rounds 7] [--epochs 60] [--skip 0] [--wide] [--cpu] [--device cuda] [word ...]

Work: scikit-learn's digits, batch 32, AdamW, one validation an epoch, a log line every 50 steps. The
hand-written loop keeps the data in memory, uses the fused AdamW, never waits for the device inside a
step, keeps the best state in memory, and writes the best and the last with torch.save at its end (the
runner writes its two with checksums and fsync). Both end with the same loss. They take turns after
every epoch, so that whatever else the machine does falls on both. `--wide` widens the network until
a step takes about 2 ms. What is printed is the ratio of all seconds, checkpoints included, with an
interval of 95 %, and the median over the epochs. One thread each. `--cpu` takes the processor time of the
training thread in place of the clock: other programs on the machine change it less.
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

import bench_kit
import torch
from bench_kit import SEED, TakesTurns
from torch import nn
from torch.nn import functional

from trainrun.comparison.paired import TimedItems, compute_total_ratio
from trainrun.data.readers.builtin import digits
from trainrun.model.mlp import Mlp
from trainrun.seeding import derive_seed


def hand_written(epochs: int, hidden: list[int], folder: Path, device: str = "cpu") -> bench_kit.Hand:
    """Validation loss and steps of each epoch, which runs when it is asked for; then writes its files."""
    model = Mlp([1, 8, 8], 10, hidden).to(device)
    x, y = (tensor.to(device) for tensor in tensors(digits.load()["train"]))
    x_val, y_val = (tensor.to(device) for tensor in tensors(digits.load()["val"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    best, losses, step, before = 0.0, [], 0, 0
    kept: list[torch.Tensor] = []
    yield 0.0, 0
    with (folder / "log.jsonl").open("a") as log:
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(derive_seed(SEED, epoch))
            order = torch.randperm(len(x), generator=generator).to(device)
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
                yield val_loss, step - before
                before = step
    torch.save(kept, folder / "best.pt")
    torch.save(state_of(model, optimizer, clone=False), folder / "last.pt")
    yield val_loss, step - before


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, clone: bool) -> list[torch.Tensor]:
    """Weights and moments, as a hand-written loop would keep them."""
    found = [*model.state_dict().values(), *(v for group in optimizer.state.values() for v in group.values())]
    return [tensor.clone() if clone else tensor for tensor in found]


def tensors(source: object) -> tuple[torch.Tensor, ...]:
    found = source if isinstance(source, tuple) else source.tensors  # type: ignore[attr-defined]
    return tuple(torch.as_tensor(item) for item in found)


def one_round(
    epochs: int, hidden: list[int], folder: Path, words: list[str], device: str = "cpu"
) -> TakesTurns:
    """The runner's `loop.fit` with all defaults on, and the hand-written loop in its pauses."""
    words = [f"trainer.max_epochs={epochs}", f"model.hidden={hidden}".replace(" ", ""), *words]
    turns, _, state = bench_kit.one_round(
        words, folder, lambda _: {"hand": hand_written(epochs, hidden, folder, device)}, device=device
    )
    last = turns.theirs["hand"][-1]
    assert sum(turn.items for turn in turns.theirs["hand"]) == state.step
    assert abs(last.loss - state.last_metrics["val/loss"]) < 1e-3 * max(1.0, last.loss)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--wide", action="store_true", help="a network whose step takes about 2 ms")
    parser.add_argument(
        "--skip", type=int, default=0, help="epochs of each round that do not count (compiling)"
    )
    parser.add_argument("--cpu", action="store_true", help="processor time of the training thread")
    bench_kit.add_device(parser)
    parser.add_argument("words", nargs="*", help="further overrides of the runner's side")
    given = parser.parse_args()
    hidden = [1024, 512] if given.wide else [128]
    torch.set_num_threads(1)
    if given.cpu:
        bench_kit.now = time.thread_time
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(given.rounds + 1):
        with tempfile.TemporaryDirectory() as temporary, bench_kit.silence():
            turns = one_round(given.epochs, hidden, Path(temporary), given.words, given.device)
        one = [turn.seconds for turn in turns.ours[given.skip :]]
        other = [turn.seconds for turn in turns.theirs["hand"][given.skip :]]
        micro = 1e6 / sum(turn.items for turn in turns.theirs["hand"][given.skip :])
        note = "  (warm-up, not counted)" if number == 0 else ""
        print(
            f"round {number}: hand {sum(other) * micro:7.1f} us/step  runner {sum(one) * micro:7.1f} us/step  "
            f"{sum(one) / sum(other):.3f}x  load {os.getloadavg()[0]:.1f}{note}",
            flush=True,
        )
        if number:
            ours += one
            theirs += other
    pairs = [(TimedItems(one, 1.0), TimedItems(other, 1.0)) for one, other in zip(theirs, ours, strict=True)]
    over = compute_total_ratio(pairs).inverse()
    epochs = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    interval = f"{over.low:.3f} to {over.high:.3f}, {len(ours)} pairs of epochs"
    print(f"runner / hand {sum(ours) / sum(theirs):.3f} ({interval}); median epoch {epochs:.3f}")


if __name__ == "__main__":
    main()
