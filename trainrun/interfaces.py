"""The interfaces of tasks, steps, monitors and the parts of a run.

A task of your own takes ten lines:

    class Pairs:
        def count(self, batch):
            return len(batch[0])

        def step(self, model, batch):
            left, right, same = batch
            distance = (model(left) - model(right)).square().sum(1)
            loss = torch.where(same, distance, (1 - distance).clamp(min=0))
            return StepOutput(loss.sum(), {"acc": lambda: ((distance < 0.5) == same).sum()})

Without the method `count`, each output has the number of items: `StepOutput(loss_mean=loss.mean(), count=len(same))`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from trainrun.errors import PluginError, TrainrunError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Names of the fields for inputs and targets. If several are present, the first in this order is used.
INPUT_KEYS = ("input", "inputs", "x", "image", "images", "input_ids",
              "pixel_values", "input_values", "input_features")  # fmt: skip
TARGET_KEYS = ("target", "targets", "y", "label", "labels", "class")
IGNORED = -100  # a target that does not count: torch's ignore_index
FIELDS_BESIDE = "_batch_fields"  # the attribute of a batch's first tensor that holds them


class Contract(NamedTuple):
    """A rule that the user's code must follow.

    check: the function or class, as `module:name`, that checks the rule. when: the time of the check.
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
        "before the first step: some rows are computed once, and then twice in one batch",
    ),
    Contract(
        "metrics",
        "Sums of two batches add up to the sums of both together.",
        "trainrun.training.checks.contract:list_metrics_not_additive",
        "before the first step: a batch is compared with its two halves",
    ),
    Contract(
        "samples",
        "A sample depends on the seed, the epoch and its index alone.",
        "trainrun.data.look:inspect_source",
        "before the first step: a child process reads some samples twice",
    ),
    Contract(
        "structure",
        "All samples of a data set have the same structure.",
        "trainrun.data.sequences.collate:check_same_fields",
        "whenever samples become a batch",
    ),
    Contract(
        "state",
        "State that changes in training is in `state_dict()`, so that a checkpoint holds it.",
        "trainrun.training.checks.unsaved_state:UnsavedState",
        "after the first step and at each save: values that changed are compared with what is saved",
    ),
    Contract(
        "parameters",
        "Each parameter that requires a gradient belongs to an optimizer and gets a gradient.",
        "trainrun.training.trained_parameters:GradientCheck",
        "after the first step, until the first log point",
    ),
    Contract(
        "memory",
        "Each element of a parameter or buffer has its own memory.",
        "trainrun.runtime.memory_layout:make_dense",
        "when the model is built",
    ),
    Contract(
        "ranks",
        "All ranks call the same collective operations in the same order, and read parts of the same data.",
        "trainrun.data.same_samples:check_same_digests",
        "at the start; later a rank that waits too long ends the run and names the line where it waits",
    ),
)
Sums = Mapping[str, "float | Tensor | tuple[float | Tensor, float | Tensor] | Callable[[], Any]"]


class StepOutput:
    """The loss and the metric sums of one micro-batch. Raise PluginError for an incomplete combination.

    loss_sum: 0-d, the loss *summed* over the items of the micro-batch. The runner divides it once, by the
        count over all micro-batches and all ranks of the step.
    loss_mean: 0-d, instead of `loss_sum`: the loss averaged over `count` items. With no items it may be NaN, but
        its gradient must not be.
    sums: metrics as sums over the same items, e.g. `acc`, the number of correct items. Each is a number, a tensor of
        a fixed shape, a pair (sum, count) over other items than the loss, or a function that returns one of these.
        A function is called only if the value is needed. Numbers are shown divided by their count. Tensors with more
        than one number need a method `summarize` of the task.
    count: the number of items, if the task has no method `count`: an int, or a 0-d tensor, for which the host waits
        once at the end of a step.
    rows: values of every item, tensors (N, ...), for metrics that need all items at once (the scores of an AUROC). An
        evaluation keeps them. `summarize` receives them with the sums, joined over batches and ranks. Training
        ignores them.
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
                    "task: StepOutput takes loss_sum=, or loss_mean= together with count=, the number of items in the "
                    "mean"
                )
            if isinstance(count, int) or not hasattr(count, "gt"):
                loss_sum = loss_mean * count if count else loss_mean.nan_to_num() * 0
            else:
                loss_sum = (loss_mean * count).where(count.to(loss_mean.device).gt(0), 0.0)
        self.loss_sum, self.sums, self.count, self.rows = loss_sum, sums, count, rows


class Task(Protocol):
    """Forward and loss for one kind of problem.

    With an attribute `unit = "tokens"`, items are tokens, and throughput is shown in tokens per second.

    If `step` has a third argument `info`, it receives a `StepInfo`. Optional methods, called on every rank:
    `on_epoch_start(model, info)`, `on_epoch_end(model, info)`, and without gradients `on_validation_start(model, info)`
    and `on_validation_end(model, info)`. On rank 0, `pictures(model, batch)` is called with the first batch of each
    validation. It returns tensors by name for `report.html`: (C, H, W) or (B, C, H, W), in 0 to 1 or in bytes; or pairs
    of such a tensor and a list of B captions. `a | b` in a name stands below the left and the right half of a picture.
    """

    def count(self, batch: Any) -> int:
        """Return the number of items (samples, or target tokens) that the loss of this batch is summed over.

        If it is known only after the forward, leave this method out and give `count=` to each `StepOutput`.
        """

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Compute forward and loss of one batch on the device."""


class StepInfo(NamedTuple):
    """The position of a run at a call of the task.

    step: updates so far. epoch: finished epochs. first: this is the first batch of an epoch or validation. training:
    False in a validation. generator: random numbers of this rank on its device. It is seeded by the seed of the run and
    this position alone, so a resume draws the same numbers, and all validations draw the same numbers.
    """

    step: int
    epoch: int
    first: bool
    training: bool
    generator: torch.Generator


@runtime_checkable
class KeepsState(Protocol):
    """A task with state of its own, saved with every checkpoint and restored at a resume.

    The state consists of plain values, tensors, lists, tuples and dictionaries, like the state of an optimizer. Each
    rank gets its own state back. If the number of ranks has changed, all ranks get the state of rank 0.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@runtime_checkable
class Summarizes(Protocol):
    """A task with metrics that are not means over items (F1, perplexity), computed from sums over batches and ranks."""

    def summarize(self, sums: dict[str, Any], count: float) -> Mapping[str, float | Tensor]:
        """Return metrics by name.

        sums: the sums of the steps and `loss`, added up in float64 on the host. A pair stays a pair. In an evaluation
        they include the rows, joined on the host. count: the number of all items.
        """


@runtime_checkable
class Predicts(Protocol):
    """A task that defines predictions; without this method, predictions are the raw outputs."""

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return named columns of B rows: `prediction`, and if available `target` and `confidence`."""


@runtime_checkable
class ChecksModel(Protocol):
    """A task that checks the model before the first batch."""

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError if the model does not fit the task."""


@runtime_checkable
class CountsSamples(Protocol):
    """A task whose `count` reads values of the batch, which would make the host wait for a GPU in every step."""

    def sizes(self, batch: Any) -> Tensor | None:
        """Return the items of each row, (B,) int64, of a batch on the host; None if `count` reads no values."""


def has_count_method(task: Any) -> bool:
    """Return whether the items of a batch are known before its forward: whether the task has a method `count`."""
    return getattr(task, "count", None) is not None


class MicroBatch(NamedTuple):
    """One batch of a stream, on the device.

    data: the batch, with the structure of the samples.
    real: False if this rank has no samples left at the end of an epoch. It then repeats the data of another rank, so
        that all ranks make the same calls. Its loss and items must be multiplied by 0.
    last: this is the last batch of its epoch.
    indices: (B,) int64 on the host, the numbers of the samples in the data set; of an iterable data set their positions
        in the epoch. Seed, epoch and index determine the random augmentation.
    items: the result of `Task.count`, if it was computed on the host; else None.
    whole: a text that ranks compare if each takes a share of one batch; else "".
    """

    data: Any
    real: bool = True
    last: bool = False
    indices: Tensor | None = None
    items: int | None = None
    whole: str = ""

    def count_items(self, task: Task) -> int:
        """Return the number of items. It is 0 if the batch is not real, or if only the task's output has the count."""
        if self.items is not None or not self.real:
            return (self.items or 0) * self.real
        return task.count(self.data) if has_count_method(task) else 0


def choose_input_key(names: Iterable[Any]) -> str | None:
    """Return the first of INPUT_KEYS that is among the names; None if there is none."""
    name_set = set(names)
    return next((key for key in INPUT_KEYS if key in name_set), None)


def choose_target_key(names: Iterable[Any]) -> str | None:
    """Return the first of TARGET_KEYS that is among the names; None if there is none."""
    name_set = set(names)
    return next((key for key in TARGET_KEYS if key in name_set), None)


def batch_fields(batch: Any) -> Mapping[str, Any]:
    """Return the named fields of a batch, such as its mask, for any structure of samples.

    For a dict these are its entries. For a tensor, a pair or another structure these are the fields that padding and
    packing add (attention_mask, target_weight, segment_ids, position_ids), and the entries of inputs that are a dict.
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else None
    if hasattr(inputs, "ndim") and not isinstance(inputs, Mapping):  # the common pair, in a third of the time
        return getattr(inputs, FIELDS_BESIDE, None) or {}
    if is_mapping(batch):
        return batch
    named: Mapping[str, Any] = inputs if is_mapping(inputs) else {}
    beside = read_attached_fields(batch)
    return {**beside, **named} if beside else named


def convert_batch_to_dict(batch: Any) -> dict[str, Any]:
    """Return a batch as a dict with its fields. A pair becomes `inputs` and `target`."""
    if isinstance(batch, Mapping):
        return dict(batch)
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    return {**dict(zip(("inputs", "target"), parts, strict=False)), **batch_fields(batch)}


def read_attached_fields(data: Any) -> Mapping[str, Any]:
    """Return the fields that the first tensor of a structure carries as an attribute; {} if there are none."""
    return getattr(_first_array(data), FIELDS_BESIDE, None) or {}


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a Mapping. Testing for `keys` first takes 0.05 us instead of 0.4."""
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
        """Return the micro-batches in an epoch, the same on every rank; None if unknown."""

    @property
    def num_samples(self) -> int | None:
        """Return the samples in an epoch over all ranks; None if unknown."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of one epoch from position `start` on, without reading earlier ones."""

    def close(self) -> None:
        """End worker processes; the stream can be opened again afterwards."""


@dataclass(slots=True)
class GradReport:
    """The result of one optimizer update.

    norm: 0-d on the device, the norm of all gradients before clipping; None except at log points.
    skipped: True if the update was left out because a gradient was not finite.
    learning_rates: the rates of this update by their names in a log row; None except at log points.
    """

    norm: Tensor | None
    skipped: bool
    learning_rates: Mapping[str, float] | None = None


class Precision(Protocol):
    """The number types of the computation, and the update of the weights that fits them."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context for forward and loss, in training and in evaluation."""

    def backward(self, loss_sum: Tensor, share: float) -> None:
        """Add the gradient of `share * loss_sum` to the parameters."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, want_norm: bool) -> GradReport:
        """Unscale, check, clip, update, and clear the gradients, in this order."""

    @property
    def params_with_gradient(self) -> Collection[Tensor]:
        """Return the parameters that have had a gradient at an update so far."""

    def reload_optimizer_state(self) -> None:
        """Read groups, states and weights of the optimizer again, because the user's code may have changed them."""

    def failure(self, wait: bool) -> str:
        """Return why training cannot continue; "" if it can. `wait` allows a wait for the device."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StepAgreement(NamedTuple):
    """The result of the exchange between ranks for one step.

    items: the mean over ranks of the items of the step.
    stop, save: the largest request of any rank. validate: whether a rank requests a validation, by its clock.
    """

    items: float
    stop: int
    save: int
    validate: bool = False


NOT_AGREED = StepAgreement(-1.0, 0, 0)  # of a step that asked nobody


class TensorShard(NamedTuple):
    """Rows of a larger tensor, in the tree of a checkpoint.

    start: the first row. shape: of the whole tensor. is_written: False on ranks that hold the same rows as another.
    """

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    is_written: bool = True


class Parallel(Protocol):
    """The ranks that train the same model, and how they communicate."""

    @property
    def device(self) -> torch.device: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_world_size(self) -> int:
        """Return the number of ranks on this machine, which share its cores and memory."""

    @property
    def forward_is_collective(self) -> bool:
        """Return whether the ranks exchange weights in a forward, so that all ranks must make every forward."""

    @property
    def shares_folder(self) -> bool:
        """Return whether all ranks see the run folder. If not, only rank 0 reads and writes checkpoints."""

    def model_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which the model is built, begins with stored weights, and gets its transforms."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training, which averages gradients over the ranks."""

    def local_model(self, model: nn.Module) -> nn.Module:
        """Return the model with the parameters of this rank, for the optimizer. These may be parts of the
        parameters of the model.
        """

    def adopt_trained(self, model: nn.Module) -> bool:
        """Average the gradients of the parameters that require one now. Return whether these parameters have
        changed.
        """

    def grad_norm(self, norm: Tensor) -> Tensor:
        """Return the 2-norm of all gradients (0-d). norm: the norm for this rank, after the exchange."""

    def reduce_any(self, flag: Tensor) -> Tensor:
        """Set a flag (0-d) in place on this rank if any rank has set it. flag: about this rank's exchanged
        gradients.
        """

    def state_dict(self, tree: Any) -> Any:
        """Return a tree of state in the form of checkpoints: a tensor that is a part of another becomes a
        `TensorShard`.
        """

    def load_state_dict(self, tree: Any, like: Mapping[str, Tensor]) -> Any:
        """Return a tree of complete tensors in the form that this rank holds. like: the model's tensors by name.

        State below the name of a tensor belongs to that tensor.
        """

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return the whole of a weight of the model, or of its gradient; all ranks call it together."""

    def sync_gradients(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context for forward and backward of a micro-batch. Ranks exchange gradients only if it is the
        last one.
        """

    def zero_loss(self, model: nn.Module) -> Tensor:
        """Return a 0-d zero as the loss of a batch without items. Its backward takes part in the exchanges of the
        other ranks.
        """

    def exchange(self) -> None:
        """Average the gradients over the ranks. A second call changes nothing."""

    def explain_error(self, error: RuntimeError) -> TrainrunError | None:
        """Return an error with advice for an error of torch that this backend causes; None for any other."""

    def agree(self, items: int, stop: int, save: int) -> StepAgreement:
        """Exchange the state of a step between ranks, on the host, without waiting for the device."""

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Sum over the ranks, element by element, in float64. The result has the same bits on every rank."""

    def gather(self, value: Any) -> list[Any]:
        """Return the plain Python value of every rank, in the order of ranks, on every rank."""

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's tensors in host memory into those of the other ranks, one at a time."""

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def runs_rank_zero_forwards(parallel: Parallel) -> bool:
    """Return whether this rank must make the forwards whose results only rank 0 uses, such as those for pictures."""
    return parallel.rank == 0 or parallel.forward_is_collective


class Gradients(NamedTuple):
    """What the forward and backward of a step's micro-batches return besides the gradients; the fields of
    `StepReport`.

    items: a tensor, until it is read, if the count comes from outputs on a device.
    """

    losses: list[Tensor]
    items: int
    agreed: StepAgreement
    sums: dict[str, Tensor]


class Counting(Protocol):
    """A way to count the items of a step, by which its gradients are divided: before the forward, or from its output.

    expected: the divisor of the loss in the backward, if the count is only known after it.
    """

    @property
    def expected(self) -> float: ...

    def read_output_count(self, out: StepOutput) -> Any:
        """Return the items that only the output contains, an int or a 0-d tensor; 0 if they are known already."""


@dataclass(slots=True)
class StepReport:
    """Facts of one optimizer step. Tensors stay on the device until a monitor reads them.

    losses: one per micro-batch, 0-d and detached, or a float: the loss summed over the items of this rank.
    items: the items of this rank. agreed: the result of `run.agree`; the runner calls it if the step did not.
    sums: the task's metric sums of the step on this rank; empty unless `run.triggers.sums` is set.
    grad: the result of the update.
    """

    losses: list[Tensor]
    items: int
    agreed: StepAgreement = NOT_AGREED
    sums: dict[str, Tensor] = field(default_factory=dict)
    grad: GradReport = field(default_factory=lambda: GradReport(None, False))


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run before its first step, for monitors and the first lines on the screen.

    sample_every: metrics of training are computed in every step of this number; `train/loss` in all steps.
    max_seconds: the limit of training time over all sessions. seconds_before, epochs_before: training of earlier
        sessions.
    choices: automatic choices with their reasons, one line each. advice: what a user should know or change, one line
        each.
    update: optimizer, learning rate and schedule as text. classes: the training classes and their counts as text.
    run_id: the same after a resume. config: `config.yaml`, without secrets.
    monitor, mode: the metric of the best checkpoint, and its mode.
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
    classes: str = ""
    advice: tuple[str, ...] = ()
    run_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    sample_every: int = 1
    max_seconds: float | None = None
    seconds_before: float = 0.0
    epochs_before: float = 0.0
    monitor: str | None = None
    mode: str = ""


class Monitor(Protocol):
    """An observer of a run, which cannot change it. It is called on rank 0 only, by the thread that trains.

    A monitor of your own (`monitor.NAME._target_`) may leave out any method. A method `on_row(row)` receives every
    row of `metrics.jsonl`: those of training and validation, and those of hardware, phases and notes.

    Rows are flat: names as users type them (`train/loss`, `val/acc`, `lr`), and plain numbers.
    """

    def on_start(self, facts: RunFacts, step: int) -> None:
        """Called before the first step; `step` is above 0 after a resume."""

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        """Called at every log point. epoch: the number of finished epochs, with a fraction."""

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        """Called after every validation."""

    def on_note(self, text: str) -> None:
        """Receive a line for people, for example that a checkpoint was saved or a step was skipped."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called after the last step, also if the run was stopped. summary: the content of `status.json`."""

    def close(self) -> None:
        """Release all resources. It is always called, also after a failure."""


@dataclass(frozen=True)
class DataFacts:
    """Facts about a data set, for models and tasks.

    shape: of one input, without the batch dimension. num_classes, class_names: of integer targets. bytes_per_token: of
    a text. class_counts: training samples of each class, if labels are in memory. inputs: the input columns of a
    table, with their kinds.
    """

    shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] = ()
    bytes_per_token: float | None = None
    class_counts: tuple[int, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
