"""A mean in the place of a sum is refused at the first step; what is no clear mean never is, and nothing remains."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from approved import refused
from exact_parts import parts_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, normalize

import trainrun as package
from trainrun.data.sequences.collate import PadCollate
from trainrun.errors import PluginError
from trainrun.interfaces import StepOutput
from trainrun.task.classification import Classification
from trainrun.training import without_trace
from trainrun.training.checks.contract import check_task
from trainrun.training.checks.padding import check_padding
from trainrun.training.components import Components
from trainrun.training.evaluate import evaluate
from trainrun.training.train_step import CountBeforeForward


class Sum:
    """Every kind of sum that is one."""

    reduction = "sum"

    def __init__(self) -> None:
        self.calls, self.generator = 0, torch.Generator().manual_seed(3)

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.calls += 1
        x, y = batch
        return self.output(model(self.changed(x)), y)

    def changed(self, x: Tensor) -> Tensor:
        return x

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        loss = cross_entropy(logits, y, reduction=self.reduction)
        return StepOutput(loss, {"acc": (logits.argmax(1) == y).sum(), "own": (float(len(y)) ** 0, 1)})


class Mean(Sum):
    reduction = "mean"


class NoisySum(Sum):
    """With numbers of torch, of its own generator, of Python and of NumPy."""

    def changed(self, x: Tensor) -> Tensor:
        noise = (
            torch.randn(x.shape, generator=self.generator)
            + random.gauss(0, 0.3)
            + numpy.random.normal(0, 0.3)
        )
        return dropout(x, 0.3) + 0.5 * noise


class Wild(Sum):
    """A sum whose noise is far larger than it is."""

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        return StepOutput(logits.sum() * 0 + (torch.randn(()) * 50).exp() * logits.sum())


class Declared(Sum):
    count = None  # type: ignore[assignment]

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        return StepOutput(loss_mean=cross_entropy(logits, y), count=len(y))


class OneItem(Mean):
    """The item is a batch, so its mean is its sum."""

    def count(self, batch: Any) -> int:
        return 1

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        return StepOutput(cross_entropy(logits, y))


class Contrastive(Sum):
    """Every sample against all others of the batch, as in CLIP."""

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        logits = normalize(logits) @ normalize(logits).T
        return StepOutput(cross_entropy(logits, torch.arange(len(y)), reduction="sum"))


class Retrieval(Sum):
    """The number of samples that are nearest to themselves."""

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        logits, own = normalize(logits) @ normalize(logits).T, torch.arange(len(y))
        return StepOutput(
            cross_entropy(logits, own, reduction="sum"), {"acc": (logits.argmax(1) == own).sum()}
        )


class ContrastiveMean(Sum):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        logits = normalize(logits) @ normalize(logits).T
        return StepOutput(cross_entropy(logits, torch.arange(len(y))))


class AllPairs(Sum):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        return StepOutput((logits[:, None] - logits).square().sum())


class Zero(Sum):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        return StepOutput(logits.sum() * 0)


class MeanInSums(Sum):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        loss = cross_entropy(logits, y, reduction="sum")
        return StepOutput(
            loss, {"acc": lambda: (logits.argmax(1) == y).float().mean(), "right": 1.0 * len(y)}
        )


class MeanVector(Sum):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        return StepOutput(
            cross_entropy(logits, y, reduction="sum"), {"probabilities": logits.softmax(1).mean(0)}
        )

    def summarize(self, sums: dict[str, Any], count: float) -> dict[str, Any]:
        return {}


class Normed(nn.Module):
    """Batch norm and dropout: one batch is not the sum of its samples in training."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(
            nn.Linear(5, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.5), nn.Linear(9, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x)


def parts_with(task: Any, rows: int = 16, **more: Any) -> tuple[Components, Any, list[str]]:
    run, notes = parts_of((), count=64, batch_size=rows), []
    torch.manual_seed(1)
    model = Normed() if more.get("normed", True) else run.model
    run.monitors.note = notes.append  # type: ignore[method-assign]
    data = next(run.train.epoch(0)).data
    return replace(run, task=task, model=model, counting=CountBeforeForward(task)), data, notes


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize("kind", [Sum, NoisySum, Wild, Zero])
def test_what_is_no_clear_mean_passes_and_leaves_no_trace(kind: type[Sum], rows: int) -> None:
    task = kind()
    run, data, notes = parts_with(task, rows)
    before = [
        *(value.clone() for value in run.model.state_dict().values()),
        *(leaf.clone() for leaf in data),
    ]
    states = [
        torch.get_rng_state(),
        task.generator.get_state(),
        random.getstate(),
        numpy.random.get_state()[1].copy(),
    ]
    check_task(run, data)
    assert not notes
    after = [*run.model.state_dict().values(), *data]
    assert all(map(torch.equal, before, after))
    assert (task.calls, run.model.calls, run.model.training) == (0, 0, True)
    assert all(p.grad is None for p in run.model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(task.generator.get_state(), states[1])
    assert random.getstate() == states[2]
    assert (numpy.random.get_state()[1] == states[3]).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
def test_a_mean_is_refused_with_both_ways_out(rows: int) -> None:
    run, data, _ = parts_with(Mean(), rows)
    with pytest.raises(PluginError, match=r"the loss of Mean\.step\(\) is a mean") as refused:
        check_task(run, data)
    text = str(refused.value)
    assert 'Return the sum (reduction="sum"), or StepOutput(loss_mean=loss, count=' in text
    assert "trainer.check_task=false" in text
    assert "\n" not in text


def test_a_mean_over_pairs_is_told() -> None:
    """It grows with the logarithm of the batch: neither a sum nor a mean of samples."""
    run, data, notes = parts_with(ContrastiveMean(), 64)
    check_task(run, data)
    (told,) = notes
    assert "the loss of ContrastiveMean.step() does not double if all rows are in the batch twice" in told
    assert "return StepOutput(loss_mean=loss, count=" in told


def test_a_count_that_does_not_grow_is_told() -> None:
    run, data, notes = parts_with(OneItem())
    check_task(run, data)
    (told,) = notes
    assert "the count of OneItem is 1 for a batch, and also for the same rows twice" in told


@pytest.mark.parametrize(("kind", "name"), [(MeanInSums, "acc"), (MeanVector, "probabilities")])
def test_a_mean_in_the_sums_is_named(kind: type[Sum], name: str) -> None:
    run, data, _ = parts_with(kind(), 64)
    with refused(PluginError, name):
        check_task(run, data)


def test_hits_among_the_samples_of_a_batch_are_told() -> None:
    run, data, notes = parts_with(Retrieval(), 16)
    check_task(run, data)
    told, _ = notes
    assert "acc of Retrieval.step() stays the same if all rows are in the batch twice" in told


def test_a_declared_mean_passes() -> None:
    run, data, notes = parts_with(Declared())
    late = parts_of(("task=exact_tasks.Mean",), count=64).counting
    check_task(replace(run, counting=late), data)
    assert not notes


class Late(Sum):
    count = None  # type: ignore[assignment]

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        out = super().step(model, batch)
        return StepOutput(loss_mean=out.loss_sum / len(batch[1]), count=len(batch[1]))


class LateContrastive(Late, Contrastive):
    pass


class BatchDice(Late):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        found, true = logits.softmax(1)[:, 1], y == 1
        return StepOutput(len(y) * (1 - 2 * (found * true).sum() / (found + true).sum()))


class MeanOfSome(Late):
    """Over the items that count, with the number of samples."""

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        return StepOutput(len(y) * cross_entropy(logits, y.where(y > 0, -100)))


class Penalty(Sum):
    """Added once, and divided by the items."""

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        out = super().step(model, batch)
        return StepOutput(out.loss_sum + 1e-3 * sum(p.abs().sum() for p in model.parameters()))


@pytest.mark.parametrize("rows", [3, 5, 16])
@pytest.mark.parametrize("kind", [Contrastive, AllPairs, LateContrastive, BatchDice, MeanOfSome, Penalty])
def test_a_loss_that_is_no_sum_over_its_rows_is_told_and_leaves_no_trace(kind: type[Sum], rows: int) -> None:
    run, data, notes = parts_with(kind(), rows)
    if issubclass(kind, Late):
        run = replace(run, counting=parts_of(("task=exact_tasks.Mean",), count=64).counting)
    data[1][:8] = torch.tensor([1, 0, 1, 2, 1, 0, 0, 0])[:rows]
    before, state = [*map(torch.clone, run.model.state_dict().values())], torch.get_rng_state()
    check_task(run, data)
    (told,) = notes
    assert f"the loss of {kind.__name__}.step() is " in told
    assert "for their two halves, so trainer.accumulate_grad_batches, ranks and data.val_batch_size" in told
    assert all(map(torch.equal, before, run.model.state_dict().values()))
    assert torch.equal(torch.get_rng_state(), state)


class Tokens(nn.Module):
    """A class of each position, or with `last` of a sample."""

    def __init__(self, last: bool = False, both_ways: bool = False) -> None:
        super().__init__()
        self.last, self.embedding = last, nn.Embedding(9, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(8 if both_ways else 4, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.head(self.rnn(self.embedding(input_ids))[0])
        return logits[:, -1] if self.last else logits


class Masked(Tokens):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None
        states, mask = self.embedding(input_ids).repeat(1, 1, 2), attention_mask[..., None].double()
        return self.head(((states * mask).sum(1) / mask.sum(1)).float())


class OwnTags(Sum):
    def count(self, batch: Any) -> int:
        return batch["tags"].numel()

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        logits = model(batch["input_ids"])
        return StepOutput(cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), reduction="sum"))


@pytest.mark.parametrize(
    ("model", "task", "labels", "is_told"),
    [
        (Tokens(last=True), Classification(), "label", True),
        (Tokens(both_ways=True), Classification(class_dim=-1), "labels", True),
        (Tokens(), OwnTags(), "tags", True),
        (Tokens(), Classification(class_dim=-1), "labels", False),
        (Masked(both_ways=True), Classification(), "label", False),
    ],
)
def test_padding_that_reaches_a_result_is_told(
    model: nn.Module, task: Any, labels: str, is_told: bool
) -> None:
    run, _, notes = parts_with(task)
    run = replace(run, model=model)
    lengths = (5, 3, 4)
    rows = [{"input_ids": torch.arange(1, n + 1), labels: torch.arange(n) % 3} for n in lengths]
    if labels == "label":
        rows = [{**row, labels: n % 3} for row, n in zip(rows, lengths, strict=True)]
    assert not check_padding(run, PadCollate(("input_ids",))(rows[:1] * 2))  # nothing is padded
    assert check_padding(run, PadCollate()(rows))
    assert len(notes) == is_told
    if is_told:
        assert notes[0].startswith("data: samples differ in length: the loss of one of 3 positions is ")


QUIET = ("monitor.plots=false", "monitor.hardware=false", "trainer.num_threads=1", "trainer.max_steps=2")
RAGGED = """
import torch
from torch import nn

class Samples:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.ones(3 + index % 5, 2), index % 2

class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])
"""


def test_a_run_tells_of_padding_that_its_model_sees(workdir: Path) -> None:
    (workdir / "my_gru.py").write_text(RAGGED)
    words = ("data.train._target_=my_gru.Samples", "data.val=null", "model=my_gru.Last", *QUIET)
    told = [row.get("text", "") for row in package.train(*words).metrics]
    assert sum("samples differ in length" in text for text in told) == 1


class Output(Sum):
    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def output(self, logits: Tensor, y: Tensor) -> Any:
        return self.out(logits)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            lambda x: {"loss": x.sum()},
            r"Output\.step\(\) gave a dict; it must return trainrun\.interfaces\.StepOutput",
        ),
        (
            lambda x: StepOutput(x.sum().item()),
            r"Output\.step\(\) gave a loss_sum as a float; it must return",
        ),
        (
            lambda x: StepOutput(x.sum(1)),
            r"Output\.step\(\) gave a loss of shape \(8,\), requires_grad=True",
        ),
        (
            lambda x: StepOutput(x.sum().detach()),
            r"Output\.step\(\) gave a loss of shape \(\), requires_grad=False",
        ),
        (lambda x: StepOutput(x.sum(), {"a": "b"}), r'Output\.step\(\) gave sums\["a"\] as a str'),
        (
            lambda x: StepOutput(x.sum(), {"a": x}),
            r'Output\.step\(\) gave sums\["a"\] of shape \(8, 3\); only its',
        ),
        (
            lambda x: StepOutput(x.sum(), count=3),
            r"Output has a method count\(batch\), and its step\(\) gave count=",
        ),
    ],
)
def test_an_output_that_the_contract_does_not_know_is_refused_in_one_line(out: Any, message: str) -> None:
    run, data, _ = parts_with(Output(out))
    with pytest.raises(PluginError, match=message) as refused:
        check_task(run, data)
    assert "\n" not in str(refused.value)


class Whole(Mean):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        if len(y) != 16:
            raise ValueError("sixteen at a time")
        return super().output(logits, y)


def test_what_cannot_be_checked_is_said() -> None:
    run, data, notes = parts_with(Whole())
    check_task(run, data)
    assert len(notes) == 1
    assert "could not be checked (ValueError: sixteen at" in notes[0]


class Locked(Mean):
    """Nobody can copy it, and it reaches the model by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.call = threading.Lock(), lambda model, x: model(x)

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        with self.lock:
            return self.output(self.call(model, batch[0]), batch[1])


@pytest.mark.parametrize("forks", [True, False])
def test_a_task_that_cannot_be_copied_is_checked(forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(without_trace, "can_fork_safely", lambda: forks)
    run, data, _ = parts_with(Locked())
    before = [value.clone() for value in run.model.state_dict().values()]
    with refused(PluginError, "Locked"):
        check_task(run, data)
    assert all(map(torch.equal, before, run.model.state_dict().values()))
    assert (run.model.calls, run.model.training) == (0, True)


class Broadcast(Sum):
    """Predictions (B, 1) against targets (B,)."""

    as_mean = False

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        error = (logits[:, :1] - y).square()
        loss = (logits[:, 0] - y).square().sum()
        return StepOutput(loss, {"mse": error.mean() * len(y) if self.as_mean else error.sum()})


class BroadcastMean(Broadcast):
    as_mean = True


class BroadcastHits(Sum):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        hits = logits.argmax(1, keepdim=True) == y
        return StepOutput(cross_entropy(logits, y, reduction="sum"), {"acc": hits.sum()})


class BroadcastPair(Sum):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        gap = (logits[:, :1] - y).abs().sum()
        return StepOutput(cross_entropy(logits, y, reduction="sum"), {"gap": (gap, len(y))})


class BatchF1(Sum):
    """Made of each batch alone, and weighted by its rows."""

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        spread = logits.std(0).sum() * len(y)
        return StepOutput(cross_entropy(logits, y, reduction="sum"), {"spread": spread})


@pytest.mark.parametrize("kind", [Broadcast, BroadcastMean, BroadcastHits, BroadcastPair, BatchF1])
def test_a_metric_that_does_not_add_up_is_refused_by_name(kind: type[Sum]) -> None:
    run, data, _ = parts_with(kind(), 32)
    name = {"BroadcastHits": "acc", "BroadcastPair": "gap", "BatchF1": "spread"}.get(kind.__name__, "mse")
    with refused(PluginError, name):
        check_task(run, data)


class AddsUp(Sum):
    """Sums over rows, ratios of sums, a mean over batches that is declared as one, and what draws random numbers."""

    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        hits, weights = logits.argmax(1) == y, 1.0 + y
        sums = {
            "acc": hits.sum(),
            "weighted": lambda: ((hits * weights).sum(), weights.sum()),
            "recall": ((hits & (y == 1)).sum(), (y == 1).sum()),
            "spread": (logits.std(), 1),
            "noise": logits.sum() * torch.rand(()),
            "none": (0.0, 0),
            "undefined": logits.sum() * float("nan"),
        }
        return StepOutput(cross_entropy(logits, y, reduction="sum"), sums)


@pytest.mark.parametrize("rows", [1, 2, 5, 32])
def test_metrics_that_add_up_pass(rows: int) -> None:
    run, data, notes = parts_with(AddsUp(), rows)
    check_task(run, data)
    assert not notes


class TakesLoss(Sum):
    def output(self, logits: Tensor, y: Tensor) -> StepOutput:
        return StepOutput(cross_entropy(logits, y, reduction="sum"), {"loss": len(y) * 9.0})


class SummarizesLoss(Sum):
    def summarize(self, sums: dict[str, Any], count: float) -> dict[str, float]:
        return {"loss": 0.0}


@pytest.mark.parametrize("kind", [TakesLoss, SummarizesLoss])
def test_the_name_of_the_loss_is_refused(kind: type[Sum]) -> None:
    run, data, _ = parts_with(kind(), 8)
    with refused(PluginError):
        evaluate(replace(run, validation={"val": run.train}), "val")
    if kind is TakesLoss:
        with refused(PluginError):
            check_task(run, data)


MEAN_TASK = """
from torch.nn.functional import cross_entropy
from trainrun.interfaces import StepOutput

class Mine:
    def count(self, batch):
        return len(batch[1])

    def step(self, model, batch{more}):
        return StepOutput(cross_entropy(model(batch[0]), batch[1]))
"""


@pytest.mark.parametrize(
    ("more", "word"),
    [("", "trainer.accumulate_grad_batches=2"), (", info", "trainer.accumulate_grad_batches=1")],
)
def test_a_run_with_a_mean_ends_before_its_first_step_unless_it_is_meant(
    workdir: Path, more: str, word: str
) -> None:
    (workdir / "my_task.py").write_text(MEAN_TASK.replace("{more}", more))
    with refused(PluginError):
        package.train("task=my_task.Mine", word, *QUIET)
    run = package.train("task=my_task.Mine", word, "trainer.check_task=false", *QUIET)
    assert run.status["step"] == 2


def test_a_run_has_the_same_bits_with_and_without_the_check(workdir: Path) -> None:
    text = MEAN_TASK.replace("{more}", "").replace("batch[1])", "batch[1], reduction='sum')")
    (workdir / "my_task.py").write_text(text.replace("len(batch[1], reduction='sum')", "len(batch[1])"))
    words = ("task=my_task.Mine", "model=cnn", "model.dropout=0.5", *QUIET)
    runs = [package.train(*words, f"trainer.check_task={word}", "seed=3") for word in ("true", "false")]
    assert not any("could not be checked" in row.get("text", "") for row in runs[0].metrics)
    models = [run.load_model("last").state_dict() for run in runs]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])


def test_a_loss_that_later_loses_its_shape_names_the_task(workdir: Path) -> None:
    text = MEAN_TASK.replace("{more}", "").replace("batch[1]))", "batch[1], reduction=self.reduction()))")
    text = text.replace("len(batch[1], reduction=self.reduction())", "len(batch[1])")
    text += "    calls = 0\n    def reduction(self):\n        self.calls += 1\n"
    text += "        return 'sum' if self.calls < 2 else 'none'\n"
    (workdir / "my_task.py").write_text(text)
    with refused(PluginError):
        package.train("task=my_task.Mine", "trainer.check_task=false", *QUIET)
