"""What the training computes, against arithmetic written down a second time."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import exact_parts
import pytest
import torch
from exact_groups import BY_SETTINGS
from exact_parts import fitted, parts_of, result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainrun.config.schema import PRECISIONS
from trainrun.folder.run_folder import RunDir, read_json, write_json
from trainrun.parallel.launch import launch_ranks
from trainrun.seeding import derive_seed, seed_everything
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.evaluate import evaluate
from trainrun.training.loop import iterate_windows

FIXED = [mode for mode in PRECISIONS if mode != "auto"]  # which is one of the others

# The largest difference between two ways to sum, as a part of the largest weight. In the 16-bit modes
# every micro-batch rounds its own gradient (8 bits of bfloat16, 11 of float16); bf16-true rounds the
# sum of gradients and the weights too.
TOLERANCES = {"32-true": 1e-6, "64-true": 1e-12, "bf16-mixed": 1e-2, "bf16-true": 5e-2, "16-mixed": 2e-3}
LOSS_TOLERANCES = {"32-true": 1e-6, "64-true": 1e-12, "bf16-mixed": 2e-2, "bf16-true": 5e-2, "16-mixed": 2e-3}
TOKENS = ("data.train._target_=exact_parts.tokens",)


def numbers(values: list[Tensor] | list[list[float]]) -> Tensor:
    return torch.cat([torch.as_tensor(value, dtype=torch.float64).detach().flatten() for value in values])


def difference(left: Any, right: Any) -> float:
    a, b = numbers(left), numbers(right)
    return float((a - b).abs().max() / b.abs().max())


def same_rows(left: list[dict[str, float]], right: list[dict[str, float]], tolerance: float) -> None:
    assert [sorted(row) for row in left] == [sorted(row) for row in right]
    for one, other in zip(left, right, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance, nan_ok=True)


@pytest.mark.parametrize("kind", ["samples", "tokens"])
@pytest.mark.parametrize("precision", FIXED)
@settings(derandomize=True, deadline=None, max_examples=12)
@given(data=st.data())
def test_micro_batches_equal_one_big_batch(precision: str, kind: str, data: st.DataObject) -> None:
    accumulate = data.draw(st.integers(2, 5), "accumulate")
    size = data.draw(st.integers(1, 4), "batch_size")
    count = data.draw(st.integers(size * accumulate, 3 * size * accumulate), "count")
    words = (f"precision={precision}", f"data.train._target_=exact_parts.{kind}")
    many = result(words, count=count, batch_size=size, accumulate=accumulate)
    one = result(words, count=count, batch_size=size * accumulate)
    assert len(one["train"]) == math.ceil(count / (size * accumulate))
    assert difference(many["weights"], one["weights"]) <= TOLERANCES[precision]
    losses = [[row["train/loss"] for row in run["train"]] for run in (many, one)]
    assert losses[0] == pytest.approx(losses[1], rel=LOSS_TOLERANCES[precision])


def reference(run: Components, accumulate: int, algorithm: str, limit: float) -> list[Tensor]:
    """The same epoch by hand, in float32: mean over counted items, clip, SGD."""
    seed_everything(derive_seed(run.config.seed))
    model = exact_parts.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    batches = [batch.data for batch in run.train.epoch(0)]
    for first in range(0, len(batches), accumulate):
        x = torch.cat([x for x, _ in batches[first : first + accumulate]]).float()
        y = torch.cat([y for _, y in batches[first : first + accumulate]]).flatten()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y, ignore_index=-100).backward()
        if algorithm == "norm":
            assert nn.utils.clip_grad_norm_(model.parameters(), limit) > limit
        else:
            nn.utils.clip_grad_value_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", FIXED)
def test_gradients_are_clipped_after_unscale_as_by_hand(precision: str, algorithm: str) -> None:
    limit = 0.05 if algorithm == "norm" else 0.02
    words = (
        *TOKENS, f"precision={precision}", f"trainer.gradient_clip_val={limit}",
        f"trainer.gradient_clip_algorithm={algorithm}",
        "data.train.count=29", "data.batch_size=3", "trainer.accumulate_grad_batches=4",
    )  # fmt: skip
    run = parts_of(words)
    start = [p.detach().clone() for p in run.model.parameters()]
    by_hand = reference(run, 4, algorithm, limit)
    fitted(run)
    tolerance = max(1e-6, TOLERANCES[precision])
    assert difference(list(run.model.parameters()), by_hand) <= tolerance
    if precision != "bf16-true":  # whose weights hardly feel so small updates
        moved = [[a.double() - b.double() for a, b in zip(end, start, strict=True)]
                 for end in (run.model.parameters(), by_hand)]  # fmt: skip
        assert difference(*moved) <= 30 * tolerance


class Trace:
    """The rate before every update that was made, and the weights after it."""

    def __init__(self, run: Components) -> None:
        self.rates: list[float] = []
        self.weights: list[Tensor] = []
        self._params = list(run.model.parameters())
        run.optimizer.register_step_pre_hook(self._before)
        run.optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def _after(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.weights.append(numbers([p.detach() for p in self._params]))


@pytest.mark.parametrize("cause", ["nan", "overflow"])
def test_rates_and_average_know_made_updates_only(cause: str) -> None:
    total, warmup, decay = 16, 3, 0.7  # 4 epochs of 4 windows
    words = (
        "data.train.count=23", "data.batch_size=2", "trainer.accumulate_grad_batches=3", "trainer.max_epochs=4",
        "scheduler=cosine", f"scheduler.warmup_steps={warmup}", "ema=true", f"trainer.ema.decay={decay}",
    )  # fmt: skip
    extra = ("data.train.bad=5", "trainer.nan_policy=skip") if cause == "nan" else ("precision=16-mixed",)
    run = parts_of((*words, *extra))
    if cause == "overflow":
        saved = run.precision.state_dict()
        run.precision.load_state_dict(saved | {"scaler": saved["scaler"] | {"scale": 2.0**22}})
    trace = Trace(run)
    state = fitted(run)
    assert state.step == total
    made = total - state.skipped_steps
    assert state.skipped_steps == 4 if cause == "nan" else 2 <= state.skipped_steps <= 8
    curve = [0.5 * (1 + math.cos(math.pi * s / (total - warmup))) for s in range(total)]
    closed = [0.3 * (s + 1) / warmup if s < warmup else 0.3 * curve[s - warmup] for s in range(made)]
    assert trace.rates == pytest.approx(closed, rel=1e-12)
    shares = torch.tensor([decay ** (made - 1 - i) for i in range(made)], dtype=torch.float64)
    average = (torch.stack(trace.weights) * shares[:, None]).sum(0) / shares.sum()
    assert torch.isfinite(average).all()
    with run.evaluating() as model:
        torch.testing.assert_close(numbers(list(model.parameters())), average, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["resident", "workers"])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    count=st.integers(1, 40), size=st.integers(1, 12), accumulate=st.integers(1, 5), drop_last=st.booleans(),
    shuffle=st.booleans(),
)  # fmt: skip
def test_an_epoch_is_every_sample_once(
    engine: str, count: int, size: int, accumulate: int, drop_last: bool, shuffle: bool
) -> None:
    size = min(size, count)
    words = ("data.train._target_=exact_parts.samples", f"data.engine={engine}", "data.num_workers=0")
    run = parts_of(
        words, count=count, batch_size=size, accumulate=accumulate, drop_last=drop_last, shuffle=shuffle
    )
    every = exact_parts.samples(count)[0].float()
    orders = []
    for epoch in (0, 1):
        windows = iterate_windows(run, TrainState(epoch=epoch))
        seen = []
        while True:
            seen.append(next(windows))
            if seen[-1][-1].last:
                break
        assert [len(window) for window in seen[:-1]] == [accumulate] * (len(seen) - 1)
        sizes = [len(batch.data[1]) for window in seen for batch in window]
        assert sizes[:-1] == [size] * (len(sizes) - 1)
        x = torch.cat([batch.data[0] for window in seen for batch in window])
        orders.append((x[:, None] == every).all(2).int().argmax(1).tolist())
        used = count - count % size if drop_last else count
        assert len(orders[-1]) == used == len(set(orders[-1]))
        assert shuffle or orders[-1] == list(range(used))
    run.train.close()
    assert count < 12 or drop_last or not shuffle or orders[0] != orders[1]


@pytest.mark.parametrize("kind", ["samples", "tokens"])
@settings(derandomize=True, deadline=None, max_examples=15)
@given(count=st.integers(1, 30), size=st.integers(1, 12))
def test_evaluation_counts_every_sample_once(kind: str, count: int, size: int) -> None:
    words = ("precision=64", f"data.train._target_=exact_parts.{kind}")
    val = {"_target_": f"exact_parts.{kind}", "count": count, "seed": 9}
    run = parts_of(words, batch_size=1, val=val, val_batch_size=size)
    metrics = evaluate(run, "val")
    x, y = getattr(exact_parts, kind)(count, 9)
    with torch.no_grad():
        logits = run.model(x).flatten(0, -2)
    y = y.flatten()
    counted = y != -100
    loss = nn.functional.cross_entropy(logits, y).item()
    assert metrics["val/loss"] == pytest.approx(loss, rel=1e-12)
    right = (logits.argmax(1) == y)[counted].double().mean().item()
    assert metrics["val/acc"] == pytest.approx(right, rel=1e-12)


def test_a_step_without_any_counted_token_changes_nothing_but_momentum() -> None:
    words = (
        *TOKENS,
        "data.train.count=4",
        "+data.train.empty_below=2",
        "data.shuffle=false",
        "optimizer.momentum=0",
    )
    recorder = exact_parts.Recorder()
    run = parts_of(words, recorder, batch_size=2)
    trace = Trace(run)
    start = numbers([p.detach().clone() for p in run.model.parameters()])
    fitted(run)
    assert torch.equal(trace.weights[0], start)
    assert not torch.equal(trace.weights[1], start)
    assert "train/loss" not in recorder.train[0]
    assert math.isfinite(recorder.train[1]["train/loss"])


TWO_RANKS = {
    # 17 = 2 * 8 + 1: the last global batch is smaller than the number of ranks
    "filler": ("data.train.count=17",),
    "filler at the end of a window": ("data.train.count=17", "trainer.accumulate_grad_batches=3"),
    "filler, two epochs, averaged": ("data.train.count=9", "trainer.max_epochs=3", "ema=true", "ema.decay=0.5",
                                     "trainer.ema.update_every_n_steps=2"),
    "tokens": (*TOKENS, "data.train.count=29", "trainer.accumulate_grad_batches=2"),
    "tokens, clipped": (*TOKENS, "data.train.count=27", "trainer.gradient_clip_val=0.05"),
    "samples, clipped by value": ("data.train.count=21", "trainer.gradient_clip_val=0.02",
                                  "trainer.gradient_clip_algorithm=value"),
    "one sample to evaluate": ("data.train.count=16", "data.val._target_=exact_parts.samples", "data.val.count=1"),
    "tokens to evaluate": (*TOKENS, "data.train.count=16", "data.val._target_=exact_parts.tokens",
                           "data.val.count=23", "data.val.seed=3", "ema=true", "trainer.val_check_interval=1"),
    "named sets to evaluate": ("data.train.count=16", "data.val.day._target_=exact_parts.samples",
                               "data.val.day.count=7", "data.val.night._target_=exact_parts.samples",
                               "data.val.night.count=1"),
    "counts with the outputs": (*TOKENS, "task=exact_tasks.Rich", "data.train.count=29",
                                "trainer.accumulate_grad_batches=2", "data.val._target_=exact_parts.tokens",
                                "data.val.count=9", "trainer.gradient_clip_val=0.05"),
    "skipped": ("data.train.count=19", "data.train.bad=3", "trainer.nan_policy=skip", "trainer.max_epochs=2",
                "scheduler=cosine", "ema=true"),
}  # fmt: skip
GROUPED = {
    "groups": (*BY_SETTINGS, "data.train.count=29", "trainer.accumulate_grad_batches=2", "trainer.max_epochs=2",
               "scheduler=cosine", "scheduler.warmup_steps=2", "ema=true")
}  # fmt: skip
SPARSE_LOG = {"filler, logged at the end": ("data.train.count=17", "monitor.log_every_n_steps=2")}
SCENARIOS = {
    **{f"{name}, 64-true": (*words, "precision=64") for name, words in (TWO_RANKS | SPARSE_LOG | GROUPED).items()},
    **{f"tokens, {mode}": (*TWO_RANKS["tokens, clipped"], f"precision={mode}") for mode in FIXED},
}  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all scenarios, batch 4 on each of two ranks; one start for all of them."""
    run = RunDir(tmp_path_factory.mktemp("two_ranks"))
    write_json(run.root / "scenarios.json", {n: [*w, "data.batch_size=4"] for n, w in SCENARIOS.items()})
    root = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root
    try:
        command = [sys.executable, exact_parts.__file__, str(run.root)]
        assert launch_ranks(lambda attempt: command, 2, run, grace_seconds=5, alone_seconds=60) == 0
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return read_json(run.root / "results.json")


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_one(name: str, two_ranks: dict[str, Any]) -> None:
    one = json.loads(json.dumps(result((*SCENARIOS[name], "data.batch_size=8"))))
    two = two_ranks[name]
    mode = next(mode for mode in FIXED if name.endswith(mode))
    assert one["train"]
    assert difference(two["weights"], one["weights"]) <= TOLERANCES[mode]
    assert difference(two["averaged"], one["averaged"]) <= TOLERANCES[mode]
    same_rows(two["train"], one["train"], max(LOSS_TOLERANCES[mode], 1e-11))
    same_rows(two["eval"], one["eval"], 1e-12)
    assert two["skipped"] == one["skipped"]


UNACCUMULATED = [
    name for name, words in SCENARIOS.items() if not any("accumulate_grad_batches" in word for word in words)
]


@pytest.mark.parametrize("name", UNACCUMULATED)
def test_two_ranks_have_the_bits_of_accumulation(name: str, two_ranks: dict[str, Any]) -> None:
    words = (*SCENARIOS[name], "data.batch_size=4", "trainer.accumulate_grad_batches=2")
    one, two = json.loads(json.dumps(result(words))), two_ranks[name]
    assert two["weights"] == one["weights"]
    assert two["averaged"] == one["averaged"]
    assert [row["train/loss"] for row in two["train"]] == [row["train/loss"] for row in one["train"]]
