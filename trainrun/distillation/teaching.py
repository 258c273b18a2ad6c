"""The teacher of `task=distillation`: load it, compare it with its student, and compute its answers once if
possible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainrun.config.schema import RunConfig
from trainrun.data.augment.nodes import build_augmentations
from trainrun.data.cache.probe import probe_samples
from trainrun.data.look import read_in_child
from trainrun.data.readers.text.tokenizer import open_tokenizer
from trainrun.data.readers.text.trained_tokenizer import is_trained
from trainrun.data.split_batch import count_rows, select_rows
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import find_columns
from trainrun.errors import ConfigError, DataError
from trainrun.instantiate import TARGET, build_node
from trainrun.interfaces import Batches, Parallel, batch_fields
from trainrun.output import format_count
from trainrun.precision.autocast import cast_inputs
from trainrun.precision.update import AUTOCAST_TYPES
from trainrun.runtime.machine import read_free_bytes
from trainrun.seeding import evaluation_mode, restore_random_state
from trainrun.task.batches import split_inputs_and_target
from trainrun.task.classification import check_logit_shapes
from trainrun.task.distillation import LOGITS, Distillation, Teacher, check_layer, collect_outputs

if TYPE_CHECKING:
    from trainrun.training.triggers import Intervals

KEY, MOST_OF_FREE = "task.teacher", 1 / 8  # of the device's memory, for the answers
NORMALIZE = "trainrun.data.augment.normalize.Normalize"
LoadRun = Callable[[str], tuple[nn.Module, RunConfig]]


def attach_teacher(
    task: Distillation, config: RunConfig, model: nn.Module, source: Any, in_order: Callable[[], Batches],
    parallel: Parallel, load_run: LoadRun, rhythm: Intervals,
) -> str:  # fmt: skip
    """Give the task its teacher, or the teacher's answers to all samples. Return a line that describes it.

    in_order: returns all training samples once, without randomness. Every rank computes the same answers. Raises
        ConfigError.
    """
    if task.hidden and config.trainer.compile.scope != "off":
        raise ConfigError(
            "task.hidden: reads the outputs of layers, which a compiled model has no more; use "
            "trainer.compile.scope=off"
        )
    for name in task.hidden:
        check_layer(model, name, "task.hidden: the student")
    answers, right, why = None, "", "an iterable data set"
    with restore_random_state():
        network, mode = resolve_network(task.asked, config, load_run)
        if config.precision.mode == "64-true":  # or its answers would depend on the other samples of a batch
            network, mode = network.double(), "64-true"
        weight = next((weight.dtype for weight in network.parameters()), torch.float32)
        network.register_forward_pre_hook(partial(cast_inputs, weight), with_kwargs=True)
        teacher = Teacher(
            network.to(parallel.device), AUTOCAST_TYPES.get(mode), list(dict.fromkeys(task.hidden.values()))
        )
        if not isinstance(source, IterableDataset):
            stream = in_order()
            try:
                check_answers(task, teacher, model, next(iter(stream.epoch(0))).data)
                why = explain_no_cached_answers(
                    config, source, stream.num_samples, rhythm, parallel.world_size
                )
                if not why:
                    answers, right, why = compute_all_answers(teacher, stream, parallel)
            finally:
                stream.close()
    task.set_teacher(teacher, answers)
    weights = format_count(sum(weight.numel() for weight in network.parameters()), "parameter")
    about = f"{KEY}: {type(network).__name__}, {weights}, {mode}"
    if answers is None:
        return f"{about}; asked in every step: {why}"
    size = sum(rows.nbytes for rows in answers.values()) / 1e6
    return f"{about}; its answers to {format_count(len(answers[LOGITS]), 'sample')} are kept ({size:.3g} MB){right}"


def resolve_network(teacher: Any, config: RunConfig, load_run: LoadRun) -> tuple[nn.Module, str]:
    """Return the network of the teacher and its precision mode.

    teacher: a run folder, a target, or the object that a node described.
    """
    if isinstance(teacher, str):
        if (
            Path(teacher).expanduser().is_dir()
            or os.sep in teacher
            or not teacher.replace(".", "_").isidentifier()
        ):
            network, trained = load_run(teacher)
            check_normalization(trained, config)
            check_tokenizer(trained, config)
            return network, trained.precision.mode
        if "." not in teacher:
            raise ConfigError(
                f"{KEY}={teacher}: no such run folder; a function is written with its module, as my_net.teacher"
            )
        teacher = build_node({TARGET: teacher}, KEY)
    if not isinstance(teacher, nn.Module):
        kind = "null" if teacher is None else f"a {type(teacher).__name__}"
        raise ConfigError(
            f"{KEY}: is {kind}; it must be a run folder, as outputs/first, or a function that returns a "
            "torch.nn.Module with its weights, as my_net.teacher"
        )
    weight = next((p.dtype for p in teacher.parameters()), torch.float32)
    return teacher, str(weight).removeprefix("torch.")


def check_normalization(trained: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError if teacher and student were trained with different normalisation: both get the same batch."""
    of_teacher, of_run = (
        [node for node in each_config.data.augment.values() if node and node.get(TARGET) == NORMALIZE]
        for each_config in (trained, config)
    )
    if of_teacher != of_run:
        raise ConfigError(
            f"{KEY}: was trained on inputs normalised by {of_teacher or 'nothing'}, and here by "
            f"{of_run or 'nothing'}; use the data.augment.normalize of the teacher"
        )


def check_tokenizer(trained: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError if teacher and student have different tokenizers.

    Comparing vocabulary sizes is not enough: two tokenizers of one size number tokens differently.
    """
    nodes = [run_config.data.train or {} for run_config in (trained, config)]
    if not all("tokenizer" in node for node in nodes):
        return
    specs = [node["tokenizer"] for node in nodes]
    files = [spec.partition("@")[2] if is_trained(spec) else spec for spec in specs]
    teacher_tokens, student_tokens = (None if file is None else open_tokenizer(file)[1] for file in files)
    if teacher_tokens != student_tokens:
        way_out = "null" if teacher_tokens is None else files[0]
        raise ConfigError(f"{KEY}: uses another tokenizer than this run; set data.train.tokenizer={way_out}")


def check_answers(task: Distillation, teacher: Teacher, model: nn.Module, batch: Any) -> None:
    """Compute the answers of teacher and student to two samples. Raise ConfigError if they cannot be compared."""
    count = count_rows(batch)
    few = select_rows(batch, 0, min(2, count), count)
    inputs, target = split_inputs_and_target(few)
    with evaluation_mode(model), collect_outputs(model, list(task.hidden)) as seen:
        logits = task.hard.logits(model, inputs, few)
        if not target.is_floating_point():
            check_logit_shapes(logits, target)
        task.terms(logits, seen, teacher(few), target)


def explain_no_cached_answers(
    config: RunConfig, source: Any, num_samples: int | None, rhythm: Intervals, world_size: int
) -> str:
    """Return why the teacher's answers cannot be computed once and kept; "" if they can."""
    for augmentation in build_augmentations(config.data.augment):
        if augmentation.random:
            return f"{augmentation.key} is random"
    if config.data.transform:
        return "data.transform may be random"
    if config.data.collate_fn:
        return "data.collate_fn may mix the samples of a batch"
    if not num_samples:
        return "the number of samples is not known"
    seen = config.data.batch_size * rhythm.accumulate * world_size * (rhythm.total_steps or num_samples)
    if seen < 2 * num_samples:
        return "few samples come twice"
    if find_columns(source, "data.train") is not None:  # in memory
        return ""
    try:
        read_in_child(partial(probe_samples, source, "data.train"), StreamOptions("data.train", True, 1, 0))
    except DataError as error:
        return f"its samples may be random ({error})"
    return ""


def compute_all_answers(
    teacher: Teacher, stream: Batches, parallel: Parallel
) -> tuple[Mapping[str, Tensor] | None, str, str]:
    """Return the answers by sample number, the share that is right, and the reason if there are none."""
    tables: dict[str, Tensor] = {}
    right = num_targets = 0
    limit = MOST_OF_FREE * min(parallel.gather(read_free_bytes(parallel.device))) / parallel.local_world_size
    for batch in stream.epoch(0):
        numbers = batch_fields(batch.data).get("index")
        if numbers is None:
            return None, "", "data.augment.index, which numbers the samples, was taken away"
        output = teacher(batch.data)
        shapes = {name: (stream.num_samples or 0, *rows.shape[1:]) for name, rows in output.items()}
        if not tables:
            size = sum(
                rows.element_size() * torch.Size(shapes[name]).numel() for name, rows in output.items()
            )
            if size > limit:
                return (
                    None,
                    "",
                    f"its answers take {size / 1e6:.3g} MB, an eighth of the free memory is {limit / 1e6:.3g}",
                )
            tables = {name: torch.full(shapes[name], torch.nan).to(rows) for name, rows in output.items()}
        if any(table.shape != shapes[name] for name, table in tables.items()):
            return None, "", "its answers differ in shape"
        for name, rows in output.items():
            tables[name][numbers] = rows
        target = split_inputs_and_target(batch.data)[1]
        if target.ndim == 1 and not target.is_floating_point() and output[LOGITS].ndim == 2:
            right, num_targets = (
                right + int((output[LOGITS].argmax(1) == target).sum()),
                num_targets + len(target),
            )
    return tables, f", {100 * right / num_targets:.1f} % of them right" if num_targets else "", ""
