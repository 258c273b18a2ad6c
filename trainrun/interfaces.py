"""The contracts between the rooms: the one page that the author of a plug-in reads.

A task of one's own is ten lines:

    class Pairs:
        def count(self, batch):
            return len(batch[0])

        def step(self, model, batch):
            left, right, same = batch
            distance = (model(left) - model(right)).square().sum(1)
            loss = torch.where(same, distance, (1 - distance).clamp(min=0))
            return StepOutput(loss.sum(), {"acc": lambda: ((distance < 0.5) == same).sum()})

Without `count`, the step says what its loss is over: `StepOutput(loss_mean=loss.mean(), count=len(same))`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from trainrun.errors import PluginError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# What inputs and targets of a batch, a sample or a table may be called; of several the first in this order is it.
INPUT_KEYS = ("input", "inputs", "x", "image", "images", "input_ids",
              "pixel_values", "input_values", "input_features")  # fmt: skip
TARGET_KEYS = ("target", "targets", "y", "label", "labels", "class")
IGNORED = -100  # a target that counts nothing: torch's ignore_index
FIELDS_BESIDE = "_batch_fields"  # the attribute of a batch's first tensor that holds them


class Contract(NamedTuple):
    """What the runner asks of code that is not its own.

    check: the function or class, `module:name`, that compares what such code does with it. when: at which time.
    """

    name: str
    text: str
    check: str
    when: str


# All that the runner guards. Each has one check, by observation: it calls the code and compares results.
CONTRACTS = (
    Contract(
        "loss",
        "A loss is a sum over the items of a batch, or a mean together with its count.",
        "trainrun.training.checks.contract:check_task",
        "before the first step: some rows, and the same rows given twice",
    ),
    Contract(
        "metrics",
        "Sums of two batches add up to the sums of both together.",
        "trainrun.training.checks.contract:not_additive",
        "before the first step: a batch, and its two halves",
    ),
    Contract(
        "samples",
        "A sample depends on the seed, the epoch and its index alone.",
        "trainrun.data.look:look_at",
        "before the first step, in a child process: some samples, each read twice",
    ),
    Contract(
        "structure",
        "All samples of a data set have the same structure, and a batch has it too.",
        "trainrun.data.sequences.collate:check_same_fields",
        "in every batch of samples of several lengths",
    ),
    Contract(
        "state",
        "State that changes in training is in `state_dict()`, so that a checkpoint holds it.",
        "trainrun.training.checks.unsaved_state:UnsavedState",
        "after the first step and at each save: attributes and tensors, and what is saved",
    ),
    Contract(
        "parameters",
        "Each parameter that requires a gradient belongs to an optimizer and gets a gradient.",
        "trainrun.training.checks.missing_gradients:WatchGradients",
        "after the first step and up to the first log point",
    ),
    Contract(
        "memory",
        "Each element of a parameter or buffer has memory of its own.",
        "trainrun.runtime.memory_layout:make_dense",
        "when the model is built",
    ),
    Contract(
        "ranks",
        "All ranks make the same exchanges in the same order, and read parts of the same data.",
        "trainrun.data.same_samples:check_same",
        "at the start; later a rank that waits too long ends the run with the line where it waits",
    ),
)
Sums = Mapping[str, "float | Tensor | tuple[float | Tensor, float | Tensor] | Callable[[], Any]"]


class StepOutput:
    """What a task makes of one micro-batch.

    loss_sum: 0-d, the loss *summed* over the items of the micro-batch; it is divided once, by the
        count over all micro-batches and all ranks of the step.
    loss_mean: 0-d, in place of `loss_sum`: the loss averaged over `count` items. Of no items it may be NaN, but
        its gradient must not be.
    sums: further sums over the same items (`acc`: how many were right), each a number, a tensor of a fixed
        shape, a pair (sum, count) where it is over other items than the loss, or a function that makes one
        of these, which is called only when somebody looks. Numbers are shown divided by their count; tensors
        of more than one number are what the task's `summarize` makes metrics of.
    count: the number of items, of a task that has no method `count`: an int, or a 0-d tensor, for which the
        host waits once at the end of a step.
    rows: what a metric needs of every item at once (the scores of an AUROC): tensors (N, ...), which an evaluation
        keeps. `summarize` gets them among the sums, joined over batches and ranks. Training looks at none.
    """

    __slots__ = ("count", "loss_sum", "rows", "sums")

    def __init__(
        self,
        loss_sum: Tensor | None = None,
        sums: Sums = {},  # noqa: B006 - only read
        *,
        loss_mean: Tensor | None = None,
        count: int | Tensor | None = None,
        rows: Mapping[str, Tensor] = {},
    ) -> None:
        if loss_sum is None or loss_mean is not None:
            if loss_sum is not None or loss_mean is None or count is None:
                raise PluginError(
                    "task: StepOutput takes loss_sum=, or loss_mean= together with count=, the number of items "
                    "that the mean is over"
                )
            if isinstance(count, int) or not hasattr(count, "gt"):
                loss_sum = loss_mean * count if count else loss_mean.nan_to_num() * 0
            else:
                loss_sum = (loss_mean * count).where(count.to(loss_mean.device).gt(0), 0.0)
        self.loss_sum, self.sums, self.count, self.rows = loss_sum, sums, count, rows


class Task(Protocol):
    """Forward and loss for one kind of problem.

    An attribute `unit = "tokens"` says that `count` counts tokens: throughput is then shown in those.

    Where `step` has a third argument `info`, it gets a `StepInfo`. Optional methods, called on every rank:
    `on_epoch_start(model, info)` and `on_epoch_end(model, info)`; `on_validation_start(model, info)` and
    `on_validation_end(model, info)`, without gradients; and on rank 0 `pictures(model, batch)`, of the first batch of
    each validation: tensors by name, (C, H, W) or (B, C, H, W) in 0 to 1 or in bytes, for `report.html`.
    """

    def count(self, batch: Any) -> int:
        """How many items (samples, or target tokens) the loss of this batch is summed over.

        A task that knows it only after the forward leaves this method out: each `StepOutput` has `count=`.
        """

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Forward and loss of one batch that lies on the device already."""


class StepInfo(NamedTuple):
    """Where a task is asked.

    step: updates made so far. epoch: epochs finished so far. first: no batch of this epoch, or of this validation,
    came before. training: False in a validation. generator: of this rank, on its device, seeded from the run's
    seed and this place alone, so a resume draws the same numbers, and every validation the same as all others.
    """

    step: int
    epoch: int
    first: bool
    training: bool
    generator: torch.Generator


@runtime_checkable
class KeepsState(Protocol):
    """A task with state of its own, saved with every checkpoint and restored at a resume.

    The state is made of plain values, tensors, lists, tuples and dictionaries, as optimizers' state dicts are. Each
    rank gets its own again; where their number changed, all get that of rank 0.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@runtime_checkable
class Summarizes(Protocol):
    """A task with metrics that are no mean over items (F1, perplexity), made once from sums over batches and ranks."""

    def summarize(self, sums: dict[str, Any], count: float) -> Mapping[str, float | Tensor]:
        """Metrics by name. sums: as the steps gave them (and `loss`), added up in float64 on the host; a pair stays a
        pair; in an evaluation also the rows, joined on the host. count: of all items."""


@runtime_checkable
class Predicts(Protocol):
    """A task that can also say what the model predicts; without it, predictions are raw outputs."""

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Named columns of B rows: `prediction`, and where there is one `target`, `confidence`."""


@runtime_checkable
class ChecksModel(Protocol):
    """A task that knows before the first batch what it needs of a model."""

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError if the model does not have it."""


@runtime_checkable
class CountsSamples(Protocol):
    """A task whose `count` reads values, for which the host would wait for a GPU in every step."""

    def sizes(self, batch: Any) -> Tensor | None:
        """(B,) int64: the items of each row of a batch on the host; None if `count` reads no values of it."""


def counts_before(task: Any) -> bool:
    """Whether the items of a batch are known before its forward, because the task has a method `count`."""
    return getattr(task, "count", None) is not None


class MicroBatch(NamedTuple):
    """One batch of a stream, on the device.

    real: False if this rank only keeps step with the others: the last samples of an epoch were
        fewer than the ranks, so the data is another rank's and counts nothing.
    last: no batch of this epoch comes after this one.
    indices: (B,) int64 on the host, the numbers of its samples in the data set (of an iterable one, their
        positions in the epoch): with seed and epoch they are what random augmentation is drawn from.
    items: what `Task.count` says of it, where that was found on the host; else None.
    whole: what ranks compare who each take a share of one batch; "" where there is nothing to compare.
    """

    data: Any
    real: bool = True
    last: bool = False
    indices: Tensor | None = None
    items: int | None = None
    whole: str = ""

    def counted_by(self, task: Task) -> int:
        """The items of it; the task is asked where nobody has counted yet. 0 if its outputs will say, or not real."""
        if self.items is not None or not self.real:
            return (self.items or 0) * self.real
        return task.count(self.data) if counts_before(task) else 0


def input_key(names: Iterable[Any]) -> str | None:
    """Return which of the names is that of the inputs; None if none is."""
    known = set(names)
    return next((key for key in INPUT_KEYS if key in known), None)


def target_key(names: Iterable[Any]) -> str | None:
    """Return which of the names is that of the target; None if none is."""
    known = set(names)
    return next((key for key in TARGET_KEYS if key in known), None)


def batch_fields(batch: Any) -> Mapping[str, Any]:
    """Return the named fields of a batch; a task finds its mask here, whatever form the samples have.

    Of a dict they are its entries. Of a tensor, a pair or any other structure they are what padding and packing put
    beside it (attention_mask, target_weight, segment_ids, position_ids), and the entries of inputs that are a dict.
    """
    if is_mapping(batch):
        return batch
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else None
    named: Mapping[str, Any] = inputs if is_mapping(inputs) else {}
    beside = fields_beside(batch)
    return {**beside, **named} if beside else named


def batch_by_name(batch: Any) -> dict[str, Any]:
    """Return a tensor, a pair or a dict as a dict, with its fields: a pair has `inputs` and `target`."""
    if isinstance(batch, Mapping):
        return dict(batch)
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    return {**dict(zip(("inputs", "target"), parts, strict=False)), **batch_fields(batch)}


def fields_beside(data: Any) -> Mapping[str, Any]:
    """Return the fields that the first tensor of a structure carries; empty if there are none."""
    return getattr(_first_array(data), FIELDS_BESIDE, None) or {}


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a Mapping. Every Mapping has `keys`: that question takes 0.05 us, the other one 0.4."""
    return hasattr(value, "keys") and isinstance(value, Mapping)


def _first_array(data: Any) -> Any:
    if isinstance(data, (tuple, list)):
        parts: Iterable[Any] = data
    elif is_mapping(data):
        parts = data.values()
    else:
        return data if hasattr(data, "ndim") else None
    for part in parts:
        array = _first_array(part)
        if array is not None:
            return array
    return None


class Batches(Protocol):
    """A stream of micro-batches that is a pure function of seed, epoch and position."""

    @property
    def num_batches(self) -> int | None:
        """Micro-batches in an epoch, the same on every rank; None if the source cannot say."""

    @property
    def num_samples(self) -> int | None:
        """Samples in an epoch over all ranks; None if the source cannot say."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """The micro-batches of one epoch from position `start` on, found without reading those before."""

    def close(self) -> None:
        """End worker processes; the stream can be opened again afterwards."""


@dataclass(slots=True)
class GradReport:
    """What became of one optimizer step.

    norm: 0-d on the device, the total gradient norm before clipping; None if nobody asked.
    skipped: True if the update was left out because a gradient was not finite.
    learning_rates: those of the update, as the row of a log point names them; None if nobody asked.
    """

    norm: Tensor | None
    skipped: bool
    learning_rates: Mapping[str, float] | None = None


class Precision(Protocol):
    """Which numbers are computed in which type, and the guarded update that goes with it."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Surrounds forward and loss, in training and in evaluation."""

    def backward(self, loss_sum: Tensor, share: float) -> None:
        """Add the gradient of `share * loss_sum` to the parameters."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, want_norm: bool) -> GradReport:
        """Unscale, check, clip, update, and clear the gradients, in this order."""

    @property
    def had_gradient(self) -> Collection[Tensor]:
        """Parameters that have had a gradient at an update so far."""

    def look_again(self) -> None:
        """Code of the user's own ran: groups, states and weights may be others than the last update left."""

    def failure(self, wait: bool) -> str:
        """Why training cannot go on ("" while it can). `wait` allows a wait for the device."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Agreed(NamedTuple):
    """What the ranks agreed on for one step.

    items: the mean over ranks of the items of the step.
    stop, save: the largest request of any rank. validate: whether one asks for a validation, by its clock.
    """

    items: float
    stop: int
    save: int
    validate: bool = False


NOT_AGREED = Agreed(-1.0, 0, 0)  # of a step that asked nobody


class Parallel(Protocol):
    """Who else trains the same model, and how the ranks talk to each other."""

    @property
    def device(self) -> torch.device: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_world_size(self) -> int:
        """Ranks on this machine: they share its cores and memory."""

    def materialize(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The new model, its tensors where this backend wants them."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training: it averages gradients over the ranks."""

    def adopt_trained(self, model: nn.Module) -> bool:
        """Average the gradients of the parameters that require one now; return whether these are others than before."""

    def grad_norm(self, norm: Tensor) -> Tensor:
        """The 2-norm of all gradients (0-d), from that of the gradients of this rank after their exchange."""

    def any_rank(self, flag: Tensor) -> Tensor:
        """Raise a flag (0-d, of this rank's gradients after their exchange) in place where any rank raised it."""

    def state_dict(self, tree: Any) -> Any:
        """A tree of state as checkpoints hold it: every tensor whole. All ranks call it together."""

    def load_state_dict(self, tree: Any, like: Mapping[str, Tensor]) -> Any:
        """The tree again as this rank holds it. like: the model's tensors by name; state below such a name belongs to
        that tensor."""

    def sync_gradients(self, last: bool) -> AbstractContextManager[Any]:
        """Surrounds forward and backward of a micro-batch; ranks exchange gradients in the last only."""

    def expect_backward(self, loss: Tensor) -> None:
        """Announce the backward of a loss that no forward of the wrapped model belongs to."""

    def exchange(self) -> None:
        """Average the gradients that are there over the ranks; once more changes nothing."""

    def agree(self, items: int, stop: int, save: int) -> Agreed:
        """One exchange per step, on the host: the device is not waited for."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Element by element, in float64, the same bits on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """The plain Python value of every rank, in the order of ranks, on every rank."""

    def barrier(self) -> None: ...

    def close(self) -> None: ...


class Gradients(NamedTuple):
    """What forward and backward of a window give besides the gradients; the fields of `StepReport`.

    items: a tensor until they are settled, where outputs on a device say them.
    """

    losses: list[Tensor]
    items: int
    agreed: Agreed
    sums: dict[str, Tensor]


class Counting(Protocol):
    """When the items that the gradients are divided by are known: before the forward, or with its output.

    expected: what the loss is divided by in the backward where the count is not known there.
    """

    @property
    def expected(self) -> float: ...

    def late(self, out: StepOutput) -> Any:
        """The items that only the output says, an int or a 0-d tensor; 0 if they are known already."""


@dataclass(slots=True)
class StepReport:
    """Facts of one optimizer step. Tensors stay on the device until a monitor asks.

    losses: per micro-batch, 0-d and detached, or a float, summed over the items of this rank.
    items: items of this rank; agreed: what all ranks agreed on, by `run.agree`; asked after the step if it did not.
    sums: the task's sums over the step on this rank; empty unless `run.triggers.sums` asks for them.
    """

    losses: list[Tensor]
    items: int
    agreed: Agreed = NOT_AGREED
    sums: dict[str, Tensor] = field(default_factory=dict)
    grad: GradReport = field(default_factory=lambda: GradReport(None, False))


@dataclass(frozen=True)
class RunFacts:
    """What is known when the ranks are built, for the first lines on the screen.

    sample_every: of so many training steps one is sampled for `train/acc` and its like; `train/loss` is over all.
    max_seconds: of training in all sessions, which end the run; seconds_before, epochs_before: what earlier
    sessions have done.
    choices: what was chosen for the user, with the reason, one line each. update: optimizer, learning rate and
    schedule in words. run_id: the same after a resume. config: as in `config.yaml`, without secrets.
    """

    name: str
    folder: str
    device: str
    world_size: int
    batch_size: int
    accumulate: int
    num_train: int | None
    num_val: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    total_epochs: int | None
    model_summary: str
    num_parameters: int
    num_trainable: int
    choices: tuple[str, ...] = ()
    update: str = ""
    run_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    sample_every: int = 1
    max_seconds: float | None = None
    seconds_before: float = 0.0
    epochs_before: float = 0.0


class Monitor(Protocol):
    """Listens to a run; it cannot change it. Called on rank 0 only, by the thread that trains.

    One of the user's own (`monitor.NAME._target_`) may leave out any method. A method `on_row(row)` gets every row
    as it stands in `metrics.jsonl`: those of training and validation again, and those of hardware, phases and notes.

    Rows are flat: names as users type them (`train/loss`, `val/acc`, `lr`), plain numbers.
    """

    def on_start(self, facts: RunFacts, step: int) -> None:
        """Before the first step; `step` is above 0 after a resume."""

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        """At every log point. epoch: how many epochs are done, with fraction."""

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        """After every validation."""

    def on_note(self, text: str) -> None:
        """One line for the people who watch: a checkpoint was saved, a step was skipped."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """After the last step, also when the run was stopped; the summary as in `status.json`."""

    def close(self) -> None:
        """Always called, after a failure too."""


@dataclass(frozen=True)
class DataFacts:
    """What a data set says of itself, for models and tasks that ask: of one input without the batch, of integer
    targets, of a text. class_counts: the training samples of each class, where their labels are in memory. inputs: the
    input columns of a table, each with what it holds."""

    shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    bytes_per_token: float | None = None
    class_counts: tuple[int, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
