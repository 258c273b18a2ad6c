"""The network to export, with scaling and normalisation of its inputs, and real samples of the run."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainrun.assemble.assemble import build_task
from trainrun.assemble.data_pipeline import (
    build_sources,
    build_stream_options,
    find_transform_key,
    open_split,
    parse_split_kind,
)
from trainrun.checkpoint.load import LoadedCheckpoint
from trainrun.cli.run_arguments import build_missing_split_error
from trainrun.config.saved_values import separate_secrets
from trainrun.config.schema import RunConfig, read_value, replace_values
from trainrun.data.augment.augmented import NamedAugmentation
from trainrun.data.augment.draws import Draws
from trainrun.data.augment.noise import LatentNoise, SampleNumbers, WordDropout
from trainrun.data.facts import collect_facts
from trainrun.data.pipeline import open_batches
from trainrun.data.scale import Scale
from trainrun.data.split_batch import list_tensors
from trainrun.data.tensor_dataset import find_byte_pictures
from trainrun.errors import ConfigError
from trainrun.parallel.single import Single
from trainrun.runs.restore_config import restore_task_state
from trainrun.task.batches import describe_form
from trainrun.training.task_calls import RunPosition, TaskCalls

BATCH, BATCHES = 32, 3  # of real samples; the batches after the first have its shapes
CPU = torch.device("cpu")
CONSTANTS = bool | int | float | str | None  # of a call: they become a part of the graph
# Augmentations that are inputs of the graph where the network takes them.
EXTRA_INPUTS = (LatentNoise, SampleNumbers, WordDropout)


@dataclass(frozen=True)
class ModelCall:
    """The arguments of a call of the network, with `...` in the place of each tensor."""

    args: tuple[Any, ...] = (...,)
    named: Mapping[str, Any] = field(default_factory=dict)

    def fill(self, tensors: Iterable[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return all arguments with the tensors filled in."""
        rest = iter(tensors)
        args = [next(rest) if value is ... else value for value in self.args]
        return args, {name: next(rest) if value is ... else value for name, value in self.named.items()}


class ServedModel(nn.Module):
    """The network together with the changes that the run applies to its inputs on the device.

    scale: the scaling of image bytes. changes: augmentations that also apply in evaluation (normalisation).
    """

    def __init__(
        self, model: nn.Module, call: ModelCall, scale: Scale | None = None, changes: Sequence[NamedAugmentation] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.call = model, call
        self.scale, self.changes, self.dtype = scale, tuple(changes), dtype
        self.draws = Draws(0, 0, torch.zeros(1, dtype=torch.int64), CPU, dtype)

    def forward(self, *inputs: Tensor) -> Any:
        first, *rest = inputs
        if self.scale is not None:
            first = self.scale(first).to(self.dtype)
        for key, change, _ in self.changes:
            first = change((first,), self.draws.derive(key))[0]
        args, named = self.call.fill([first, *rest])
        return output_tensors(self.model(*args, **named))


def output_tensors(output: Any) -> Any:
    """Return the output tensor, or a tuple of the tensors in a tuple, dictionary or output object."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):  # what the task takes
        return output.logits
    tensors = tuple(list_tensors(output))
    if not tensors:
        raise ConfigError(
            f"model: returns a {type(output).__name__} without tensors, which no format can hold"
        )
    return tensors[0] if len(tensors) == 1 else tensors


@dataclass(frozen=True)
class RealSamples:
    """Real samples, to check an exported network.

    served: the network to export. inputs: batches of real samples. expected: the outputs of the run's own pipeline and
        network. untried: why there are no samples, if only weights are written.
    """

    served: ServedModel
    inputs: list[tuple[Tensor, ...]]
    expected: list[tuple[Tensor, ...]]
    untried: str = ""

    @property
    def names(self) -> list[str]:
        call = self.served.call
        positional = (f"input{i or ''}" for i in range(call.args.count(...)))
        return [*positional, *(name for name, value in call.named.items() if value is ...)]


def build_input_functions(config: RunConfig, split: str) -> dict[str, Any]:
    """Return the user's functions that change samples of a split before the network, as settings."""
    keys = (find_transform_key(config, parse_split_kind(split)), "data.collate_fn")
    config = separate_secrets(config)[0]
    nodes = {key: read_value(config, key) for key in keys if key is not None}
    return {key: node for key, node in nodes.items() if node}


@torch.no_grad()
def load_real_samples(
    config: RunConfig, model: nn.Module, split: str, loaded: LoadedCheckpoint
) -> RealSamples:
    """Return real samples of a split with the outputs of the network.

    loaded: the checkpoint, with the state of the task. Raise ConfigError if there are no samples, or if the call of
        the network cannot be exported.
    """
    config, parallel = build_full_precision_config(config), Single(CPU)
    dtype = torch.float64 if config.precision.mode == "64-true" else torch.float32
    sources, _ = build_sources(config, [])
    split = choose_existing_split(sources, split)
    task = build_loaded_task(config, sources, model, loaded)
    source, options = sources[split], build_stream_options(config, parallel, split, lambda line: None)
    changes = [
        change for change in options.augment if not (change.random or isinstance(change.apply, EXTRA_INPUTS))
    ]
    is_transformed = options.transform is not None or options.collate_fn is not None
    raw_source, scale = (source, None) if is_transformed else find_byte_pictures(source)
    second_source = build_sources(config, [])[0][split] if isinstance(source, IterableDataset) else source
    raw_stream, _ = open_batches(raw_source, replace(options, augment=()))
    ready_stream = open_split(config, parallel, split, second_source, [], lambda line: None)
    assert ready_stream is not None
    tried: list[tuple[ServedModel, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for raw, ready in islice(zip(raw_stream.epoch(0), ready_stream.epoch(0), strict=False), BATCHES):
        tensors, call = record_call(model, task, ready.data)
        served = ServedModel(model, call, scale, changes, dtype)
        begins_raw = scale is not None or changes
        inputs = (first_tensor(raw.data) if begins_raw else tensors[0], *tensors[1:])
        args, named = call.fill(tensors)
        expected = output_tensors(model(*args, **named))
        served(*inputs)  # constants of augmentations are made at their first call: not while it is traced
        tried.append((served, inputs, list_outputs(expected)))
    for stream in (raw_stream, ready_stream):
        stream.close()
    if not tried:
        raise ConfigError(f"--split {split}: holds no samples to try the exported model on")
    first_shapes = [tensor.shape for tensor in tried[0][1]]
    alike = [batch for batch in tried if [tensor.shape for tensor in batch[1]] == first_shapes]
    return RealSamples(tried[0][0], [inputs for _, inputs, _ in alike], [outputs for *_, outputs in alike])


def build_full_precision_config(config: RunConfig) -> RunConfig:
    """Return the config for reading samples: small batches in this process, 16-bit weights as float32."""
    changes: dict[str, Any] = {"data.val_batch_size": BATCH, "data.num_workers": 0}
    if config.precision.mode in ("bf16-true", "16-true"):
        changes["precision.mode"] = "32-true"
    return replace_values(config, changes)


def choose_existing_split(sources: Mapping[str, Any], split: str) -> str:
    """Return the split, or the first of several named ones. Raise ConfigError if there is none."""
    present = [name for name, source in sources.items() if source is not None and name != "train"]
    names = [split] if split in present else [name for name in present if name.startswith(f"{split}/")]
    if not names:
        raise build_missing_split_error(present, split)
    return names[0]


def build_loaded_task(
    config: RunConfig, sources: Mapping[str, Any], model: nn.Module, loaded: LoadedCheckpoint
) -> Any:
    """Return the task with its state from the checkpoint, and with `info` if its step takes it."""
    train = build_stream_options(config, Single(CPU), "train", lambda line: None)
    task = build_task(config, collect_facts(sources, train))
    calls = TaskCalls(task, model, RunPosition(config.seed or 0, 0, CPU), None)
    restore_task_state(task, calls, loaded, CPU)
    return task


@torch.no_grad()  # a task that teaches looks its answers up where gradients are wanted
def record_call(model: nn.Module, task: Any, batch: Any) -> tuple[list[Tensor], ModelCall]:
    """Record the tensors and arguments with which the task calls the network.

    Flags about the output (`return_...`, `output_...`) are left at their defaults. Raise ConfigError if the task does
    not call the network, or passes values that cannot be exported.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        task.step(model, batch)
    finally:
        handle.remove()
    if not calls:
        raise ConfigError("task: its step does not call the model, so nobody knows its inputs")
    args, kwargs = calls[0]
    named = {
        name: value for name, value in kwargs.items()
        if not (name.startswith(("return_", "output_")) and isinstance(value, bool | None))
    }  # fmt: skip
    values = [*args, *named.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or not all(isinstance(value, Tensor | CONSTANTS) for value in values):
        raise ConfigError(
            "model: the task gives it something else than tensors, numbers and flags, which cannot be exported"
        )
    slots = [... if isinstance(value, Tensor) else value for value in values]
    return tensors, ModelCall(tuple(slots[: len(args)]), dict(zip(named, slots[len(args) :], strict=True)))


def first_tensor(batch: Any) -> Tensor:
    """Return the first tensor of a batch, which is its input. Raise ConfigError without one."""
    if tensors := list_tensors(batch):
        return tensors[0]
    raise ConfigError(
        f"data: a batch is {describe_form(batch)}, and its inputs are not known; let data.collate_fn give a "
        "tuple, a list or "
        "a mapping"
    )


def list_outputs(output: Any) -> tuple[Tensor, ...]:
    return (output,) if isinstance(output, Tensor) else tuple(output)


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress prints, logs and warnings of torch's tracer and exporters."""
    before, nowhere = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def half_batch(samples: RealSamples) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return half of the first batch with its outputs, to check another batch size."""
    inputs = samples.inputs[0]
    size = max(1, len(inputs[0]) // 2)
    inputs = tuple(
        tensor[:size] if has_rows else tensor
        for tensor, has_rows in zip(inputs, is_per_sample(inputs), strict=True)
    )
    return inputs, list_outputs(samples.served(*inputs))


def is_per_sample(inputs: tuple[Tensor, ...]) -> list[bool]:
    """Return for each input whether it has one row per sample, unlike a temperature or a mask that all samples
    share.
    """
    return [tensor.ndim > 0 and len(tensor) == len(inputs[0]) for tensor in inputs]
