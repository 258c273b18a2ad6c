"""The runner with its speed options against the best hand-written loop for the same work.

    python scripts/bench_speed.py cnn|gpt|gpt_small|lstm|mlp|mlp_step|mlp_busy|memory|waiting
                                  [--rounds 3] [--device cuda] [WORD ...]

The hand-written loop starts from the same weights, finds the batches of the runner ready in memory, uses the
fused AdamW and all cores (mlp: one), and never waits for a number inside a step. It takes turns with
`loop.fit` every few steps in one process, so that whatever else the machine does falls on both. Printed are
medians of the paired ratios with an interval of 95 %, and what both have learned at the end.
lstm: lines of a text (`--text`, `bible -f gen1:1-rev22:21 > FILE`), bucketed, in useful tokens a second, against
batches of other lines padded to their longest. mlp_busy: with two busy processes next to it, against without.
memory: the peak of whole processes. waiting: by the way in which threads wait for each other.
Further words are overrides of the runner's side.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import as_the_command  # noqa: F401  # ahead of torch
import bench_kit
import bench_overhead
import bench_processes
import torch
from bench_kit import Hand, TakesTurns, spread
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.errors import ConfigError
from trainrun.instantiate import build
from trainrun.loop import evaluate
from trainrun.parts import Parts
from trainrun.task.language_modeling import tokens_and_target


@dataclass(frozen=True)
class HandSpec:
    """precision: of the hand-written loop. model: what it says otherwise to the model's constructor."""

    precision: torch.dtype = torch.float32
    model: dict[str, Any] = field(default_factory=dict)
    channels_last: bool = False
    batches: tuple[str, ...] = ()  # words of the stream it reads, where it is another than the runner's


@dataclass(frozen=True)
class Workload:
    """words: of the runner. every: steps of a turn. must: ratios of speed that are wanted, by loop."""

    words: tuple[str, ...]
    hands: dict[str, HandSpec]
    steps: int
    every: int
    must: dict[str, float]
    per_item: bool = False


FLASH = {"attention": "flash"}
TEXT = ("data=text", "task=language_modeling", "data.train.max_bytes=1000000")
GPT_HANDS = {"fp32": HandSpec(model=FLASH), "bf16": HandSpec(torch.bfloat16, FLASH)}
LINES = (
    "data=text",
    "task=language_modeling",
    "data.train.kind=lines",
    "data.train.max_bytes=2000000",
    "data.batch_size=32",
)
WORKLOADS = {
    "cnn": Workload(
        ("data=fashion_mnist", "model=cnn", "scheduler=constant", "preset=fast", "data.batch_size=128"),
        {"fp32": HandSpec(), "fp32 channels-last": HandSpec(channels_last=True)},
        469, 20, {"fp32": 1.55},
    ),
    "gpt": Workload(
        (*TEXT, "model=gpt", "model.size=3M", "precision=bf16-mixed", "data.batch_size=16"),
        GPT_HANDS, 60, 5, {"fp32": 2.1, "bf16": 0.98},
    ),
    "gpt_small": Workload(
        (*TEXT, "model=gpt", "model.size=0.8M", "model.heads=4", "model.context=64", "data.train.block_size=64",
         "precision=bf16-mixed", "data.batch_size=12"),
        GPT_HANDS, 300, 10, {"fp32": 1.45},
    ),
    "lstm": Workload(
        (*LINES, "model=lstm", "precision=bf16-mixed", "data.padding=bucket"),
        {"fp32 padded": HandSpec(batches=LINES)}, 200, 10, {"fp32 padded": 3.5}, per_item=True,
    ),
}  # fmt: skip


def hand_written(model: nn.Module, batches: list[tuple[Tensor, Tensor]], every: int, spec: HandSpec,
                 options: dict[str, Any]) -> Hand:  # fmt: skip
    """Mean loss and items of each `every` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
    half = spec.precision is torch.bfloat16
    layout = torch.channels_last if spec.channels_last else torch.contiguous_format
    yield 0.0, 0.0
    for first in range(0, len(batches), every):
        losses, items = [], 0
        for x, y in batches[first : first + every]:
            if x.ndim == 4:
                x = x.contiguous(memory_format=layout)
            with torch.autocast(x.device.type, torch.bfloat16) if half else nullcontext():
                logits = model(x)
                loss = cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")
            count = int((y != -100).sum()) if y.ndim > 1 else len(y)
            (loss / count).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            items += count
        yield torch.stack(losses).sum().item() / items, items


def hands_for(
    workload: Workload, words: list[str], kept: dict[str, nn.Module]
) -> Callable[[Parts], dict[str, Hand]]:
    """kept: gets the models, to be judged at the end."""

    def hands(parts: Parts) -> dict[str, Hand]:
        node = parts.config.optimizer
        options = {name: node[name] for name in ("lr", "betas", "eps", "weight_decay")}
        made = {}
        for name, spec in workload.hands.items():
            model = build({**parts.config.model, **spec.model, **facts_of(parts)}, "model")
            model.load_state_dict(parts.model.state_dict())
            layout = torch.channels_last if spec.channels_last else torch.contiguous_format
            kept[name] = model.to(parts.parallel.device, memory_format=layout)
            source = parts
            if spec.batches:
                source = bench_kit.built([*spec.batches, "model=lstm", *words], parts.parallel.device.type)
            pairs = [pair_of(batch.data) for batch in islice(source.train.epoch(0), workload.steps)]
            made[name] = hand_written(model, pairs, workload.every, spec, options)
        return made

    return hands


def facts_of(parts: Parts) -> dict[str, Any]:
    """What the runner fills in for null."""
    facts, node = parts.data_facts, parts.config.model
    known = {"in_shape": facts.shape, "num_classes": facts.num_classes, "vocab_size": facts.num_classes}
    return {name: value for name, value in known.items() if name in node and node[name] is None}


def pair_of(data: Any) -> tuple[Tensor, Tensor]:
    if isinstance(data, tuple) and data[0].ndim == 4:
        return data[0], data[1]
    return tokens_and_target(data)


def judged(parts: Parts, model: nn.Module) -> str:
    """In float32, as the runner validates."""
    plain = SimpleNamespace(autocast=nullcontext)
    found = evaluate(replace(parts, ema=SimpleNamespace(module=model), precision=plain), "val")  # type: ignore[arg-type]
    return "  ".join(f"{name} {value:.4f}" for name, value in found.items() if not name.endswith("seconds"))


def compare(name: str, rounds: int, words: list[str], given: argparse.Namespace) -> None:
    workload = WORKLOADS[name]
    workload = replace(workload, steps=given.steps or workload.steps)
    if name == "lstm":
        if given.text is None:
            raise ConfigError("needs --text FILE")
        words = [f"data.path={Path(given.text).resolve()}", *words]
    words = words if given.threads is None else [f"trainer.num_threads={given.threads}", *words]
    own = [*workload.words, "trainer.max_epochs=null", "monitor.plots=false"]
    own += [f"trainer.max_steps={workload.steps}", f"trainer.val_check_interval={workload.steps}"]
    own += [f"monitor.log_every_n_steps={workload.every}", *words]
    ratios: dict[str, list[float]] = {hand: [] for hand in workload.hands}
    for number in range(1, rounds + 1):
        kept: dict[str, nn.Module] = {}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            with bench_kit.silence():
                turns, parts, _ = bench_kit.one_round(
                    own,
                    folder,
                    hands_for(workload, words, kept),
                    "step",
                    given.threads or os.cpu_count(),
                    given.device,
                )
        print(f"round {number}: {workload.steps} steps, {bench_kit.machine()}")
        print(f"  runner {describe(turns.ours)}  {judged(parts, parts.model)}")
        for hand, theirs in turns.theirs.items():
            print(f"  {hand:6} {describe(theirs)}  {judged(parts, kept[hand])}")
            ratios[hand] += speedups(turns, hand, workload.per_item)
    for hand, values in ratios.items():
        must = f", must be {workload.must[hand]} or more" if hand in workload.must else ""
        print(f"{name}: runner / hand {hand}, in speed: {spread(values)}{must}")


def describe(turns: list[bench_kit.Turn]) -> str:
    seconds, items = sum(turn.seconds for turn in turns[1:]), sum(turn.items for turn in turns[1:])
    return f"{items / seconds:9.0f} items/s  last train/loss {turns[-1].loss:.4f}"


def speedups(turns: TakesTurns, hand: str, per_item: bool) -> list[float]:
    """Return the gain of every turn but the first. per_item: batches differ, so items a second are compared."""
    pairs = list(zip(turns.ours, turns.theirs[hand], strict=True))[1:]
    if per_item:
        return [(ours.items / ours.seconds) / (theirs.items / theirs.seconds) for ours, theirs in pairs]
    assert all(ours.items == theirs.items for ours, theirs in pairs), "both must do the same work"
    return [theirs.seconds / ours.seconds for ours, theirs in pairs]


def mlp(rounds: int, words: list[str], must: float, device: str, epochs: int = 60, skipped: int = 1) -> None:
    """skipped: epochs at the start of a round that do not count, for compilation."""
    torch.set_num_threads(1)
    ratios: list[float] = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as temporary, bench_kit.silence():
            turns = bench_overhead.one_round(epochs, [128], Path(temporary), words, device)
        if number:  # the first is a warm-up
            pairs = zip(turns.ours[skipped:], turns.theirs["hand"][skipped:], strict=True)
            ratios += [ours.seconds / theirs.seconds for ours, theirs in pairs]
        last = turns.ours[-1].loss, turns.theirs["hand"][-1].loss
        print(
            f"round {number}: val/loss runner {last[0]:.5f}, hand {last[1]:.5f}; {bench_kit.machine()}",
            flush=True,
        )
    print(f"mlp {' '.join(words)}: runner / hand, in time: {spread(ratios)}, must be {must} or less")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=[*WORKLOADS, "mlp", "mlp_step", "mlp_busy", "memory", "waiting"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", help="for lstm: a file of lines")
    parser.add_argument(
        "--threads", type=int, help="of both sides; else all cores, and what the runner chooses"
    )
    parser.add_argument("--steps", type=int, help="of a round")
    bench_kit.add_device(parser)
    given, words = parser.parse_known_args()
    try:
        if given.workload in WORKLOADS:
            compare(given.workload, given.rounds, words, given)
        elif given.workload == "memory":
            bench_processes.memory([*TEXT, "model=gpt", "model.size=11M"], words)
        elif given.workload == "waiting":
            bench_processes.waiting(given.rounds, words, given.steps)
        elif given.workload == "mlp_busy":
            bench_processes.busy(given.rounds, words)
        elif given.workload == "mlp_step":
            mlp(
                given.rounds,
                ["trainer.compile=step", *words],
                0.55,
                given.device,
                skipped=5,
            )
        else:
            mlp(given.rounds, words, 1.1, given.device)
    except ConfigError as error:
        sys.exit(f"bench_speed.py {given.workload}: {error}")


if __name__ == "__main__":
    main()
