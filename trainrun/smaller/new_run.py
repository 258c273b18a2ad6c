"""Write a new run folder at step 0 with changed weights, and compare it with the run from which it was made."""

from __future__ import annotations

import os
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.assemble.assemble import RunContext, build_components
from trainrun.assemble.start_choices import read_earlier_choices
from trainrun.checkpoint.load import read_checkpoint
from trainrun.checkpoint.weights import allocate_buffers
from trainrun.comparison.paired import StoppingRules, build_turn, compare_in_turns
from trainrun.config.compose import Composition
from trainrun.config.schema import InitConfig, RunConfig, replace_values
from trainrun.errors import EXIT_DONE, ConfigError, SaveError
from trainrun.export.served import output_tensors, record_call
from trainrun.folder.lock import lock_run_folder
from trainrun.folder.run_folder import (
    RunDir,
    read_identity,
    record_has_checkpoint,
    resolve_folder,
    sync_path,
    write_identity,
)
from trainrun.folder.status import write_status
from trainrun.output import format_quantity, format_table, report_result, say
from trainrun.parallel.single import Single
from trainrun.runs.restore_config import (
    choose_saved_checkpoint,
    load_parts,
    remove_gpu_settings,
    restore_task_state,
)
from trainrun.runs.resume import load_trusted_config
from trainrun.runs.run import create_run, open_run
from trainrun.runtime.network_copy import copy_network
from trainrun.runtime.signals import StopFlag
from trainrun.sampling.run_tokenizer import SEAL
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.evaluate import evaluate
from trainrun.training.without_trace import read_first_batches

SECONDS = 3.0  # of each comparison of speeds
BATCH = 64
UNCOMPILED = ["trainer.compile.scope=off"]  # the network, whose layers are changed and timed
PENDING_WEIGHTS: dict[str, Tensor] = {}
PENDING_TRANSFORM = "trainrun-weights"  # the name of this transform


def load_pending_weights(model: nn.Module) -> nn.Module:
    """Load `PENDING_WEIGHTS` into the model.

    It is the last transform while the folder is written, so that averaged weights start from these weights.
    """
    allocate_buffers(model, PENDING_WEIGHTS, torch.device("cpu"))
    model.load_state_dict(PENDING_WEIGHTS)
    return model


@dataclass(frozen=True)
class Measurement:
    """The metrics of a network, and the size of its weights in bytes."""

    metrics: dict[str, float]
    num_bytes: int
    model: nn.Module


@dataclass(frozen=True)
class SourceRun:
    """A finished run from which a smaller run is made.

    run, new_run: the folders of both. checkpoint: the checkpoint of the finished run that was loaded. parts: the
        components of the finished run with these weights. config: its settings. before: the measurement of its
        model.
    """

    run: RunDir
    new_run: RunDir
    checkpoint: Path
    parts: Components
    config: RunConfig
    before: Measurement

    def copy_model(self) -> nn.Module:
        """Return a copy of the network in evaluation mode."""
        return copy_network(self.parts.model).eval()


def open_source(arguments: Namespace, ending: str, own_transforms: Sequence[str]) -> SourceRun:
    """Load and measure the run that the arguments name.

    ending: the suffix of the default folder of the new run. own_transforms: transforms that the run must not have
        yet.
    """
    run = open_run(arguments.run_dir)
    folder = choose_new_run_folder(arguments.out, run, ending)
    which = choose_saved_checkpoint(run, arguments.which)
    overrides = [*UNCOMPILED, *arguments.overrides]
    parts, checkpoint = load_parts(run, which, overrides, arguments.trust)
    config = load_trusted_config(run, arguments.overrides, arguments.trust)
    if present := [name for name in own_transforms if name in config.transform]:
        raise ConfigError(
            f"{run.root}: has transform.{present[0]} already; use the run that it was made from"
        )
    return SourceRun(run, folder, checkpoint, parts, config, measure_run(parts))


def choose_new_run_folder(text: str | None, source: RunDir, ending: str) -> RunDir:
    """Return the folder of the new run. Raise ConfigError if it is not empty."""
    folder = resolve_folder(text) if text else source.root.with_name(f"{source.root.name}-{ending}")
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise ConfigError(f"--out {folder}: already exists; choose another folder")
    if source.root in folder.parents:
        raise ConfigError(f"--out {folder}: is inside the folder of the run; choose another folder")
    return RunDir(folder)


@contextmanager
def atomic_folder(run: RunDir) -> Iterator[RunDir]:
    """Yield a temporary folder that is renamed to `run` at the end, or removed after an error.

    Without the rename, a resume of a half-written run would start from random weights.
    """
    part = RunDir(run.root.with_name(f".{run.root.name}.{os.getpid()}.part"))
    part.create()
    try:
        yield part
        os.rename(part.root, run.root)
        sync_path(run.root.parent)
    except BaseException as error:
        shutil.rmtree(part.root, ignore_errors=True)
        if isinstance(error, SaveError):  # a run that is not there cannot go on
            fault = str(error).partition("; ")[0].replace(str(part.root), str(run.root))
            raise SaveError(f"{fault}; nothing of it was kept") from error
        raise


def write_run(source: SourceRun, config: RunConfig, model: nn.Module, reason: str) -> None:
    """Write the new run at step 0 with the weights of `model`, and with the task state and the tokenizer of the
    source.

    config: the settings of the new run, whose transforms fit the weights. reason: what was done, for the status of
        the new run.
    """
    weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    config = replace_values(config, {
        "init_from": None, "init": InitConfig(), "ckpt_path": None, "checkpoint.adapter_only": False
    })  # fmt: skip
    source_identity = read_identity(source.run)
    with atomic_folder(source.new_run) as part, lock_run_folder(part):
        create_run(Composition(config, {}, [], {}), [f"# {reason}"], part)
        if source.run.tokenizer.is_file():
            shutil.copyfile(source.run.tokenizer, part.tokenizer)
        names = ("data", "precision", "num_threads", SEAL)
        copied = {name: source_identity[name] for name in names if name in source_identity}
        identity = read_identity(part) | copied
        write_identity(part, identity)
        site = RunContext(
            part,
            identity["run_id"],
            Single(torch.device("cpu")),
            StopFlag(),
            [],
            chosen=read_earlier_choices(identity),
        )
        node = {"_target_": f"{__name__}.{load_pending_weights.__name__}"}
        PENDING_WEIGHTS.update(weights)
        try:
            changes = {
                "transform": {**config.transform, PENDING_TRANSFORM: node},
                "trainer.compile.scope": "off",
            }
            parts, _ = build_components(replace_values(remove_gpu_settings(config), changes), site)
        finally:
            PENDING_WEIGHTS.clear()
        loaded = read_checkpoint(source.checkpoint)
        restore_task_state(parts.task, parts.task_calls, loaded, parts.parallel.device)
        state = TrainState(stop_reason=reason)
        if parts.validation:
            parts.triggers.record_validation(state, evaluate_all_splits(parts))
        parts.checkpoints.save(parts, state)
        parts.checkpoints.close()
        record_has_checkpoint(part)
        metrics = {name: value for name, value in state.last_metrics.items() if not name.endswith("/seconds")}
        write_status(
            part, config.run_name, state="stopped", exit_code=0, message="", reason=reason, metrics=metrics,
            monitor=parts.triggers.best.metric, mode=parts.triggers.best.mode, value=state.best_metric,
        )  # fmt: skip
        close_streams(parts)


def close_streams(parts: Components) -> None:
    """Close the training stream and all validation and test streams."""
    for stream in (parts.train, *parts.splits().values()):
        stream.close()


def evaluate_all_splits(parts: Components) -> dict[str, float]:
    """Return the metrics of every validation set."""
    metrics: dict[str, float] = {}
    for split in parts.validation:
        metrics |= evaluate(parts, split)
    return metrics


def measure_run(parts: Components) -> Measurement:
    """Measure the metrics on every validation set and the bytes of the weights. Tied tensors count once."""
    metrics = {
        name: value for name, value in evaluate_all_splits(parts).items() if not name.endswith("/seconds")
    }
    tensors = {id(tensor): tensor for tensor in parts.model.state_dict(keep_vars=True).values()}
    return Measurement(metrics, sum(tensor.nbytes for tensor in tensors.values()), parts.model.eval())


def compare_with_source(source: SourceRun) -> int:
    """Load the new run, print both measurements, and return the exit code."""
    parts, new_run = source.parts, source.new_run
    again, _ = load_parts(new_run, choose_saved_checkpoint(new_run, None), UNCOMPILED, trust=True)
    # a loss that depends on the step is compared at the same one
    again.task_calls.start(parts.task_calls.place)
    after = measure_run(again)
    print_comparison(source.before, after, parts)
    sides = {"before": source.before, "after": after}
    facts = {
        side: {"metrics": measured.metrics, "weight_bytes": measured.num_bytes}
        for side, measured in sides.items()
    }
    report_result(folder=new_run.root, **facts)
    close_streams(parts)
    close_streams(again)
    return EXIT_DONE


def print_comparison(before: Measurement, after: Measurement, parts: Components) -> None:
    """Print a table of metrics, size, latency of one sample and throughput of a batch, before and after."""
    best, rows = parts.triggers.best, []
    for name, value in before.metrics.items():
        new_value = after.metrics[name]
        is_worse = new_value > value if best.mode == "min" else new_value < value
        verdict = "WORSE" if name == best.metric and is_worse else ""
        rows.append((name, f"{value:.5g}", f"{new_value:.5g}", verdict))
    share = f"{after.num_bytes / before.num_bytes:.2f}x"
    rows.append(("weights", f"{before.num_bytes / 1e3:,.1f} kB", f"{after.num_bytes / 1e3:,.1f} kB", share))
    untimed = ""
    try:
        rows += measure_speeds(before, after, parts)
    except Exception as error:  # of the task, or of the model, which may take no other batches than those
        untimed = " ".join(str(error).split())[:200]
    say(format_table(("", "before", "after", ""), rows))
    if untimed:
        say(f"without speeds: {untimed}")


@torch.no_grad()
def measure_speeds(
    before: Measurement, after: Measurement, parts: Components
) -> Iterator[tuple[str, str, str, str]]:
    (batch,) = read_first_batches(parts.val or parts.train)
    tensors, call = record_call(before.model, parts.task, batch)
    for name, count in (("latency of 1", 1), ("throughput", BATCH)):
        inputs = [tensor[:count] if tensor.ndim else tensor for tensor in tensors]

        def run(model: nn.Module, inputs: Any = inputs) -> Any:
            args, named = call.fill(inputs)
            return output_tensors(model(*args, **named))

        comparison = compare_in_turns(
            build_turn(partial(run, before.model)), {"after": build_turn(partial(run, after.model))},
            StoppingRules(deadline=time.perf_counter() + SECONDS),
        )  # fmt: skip
        size = next(len(tensor) for tensor in inputs if tensor.ndim)
        shown = {
            side: f"{1e3 / speed:.3f} ms" if count == 1 else f"{format_quantity(speed * size)} a second"
            for side, speed in comparison.speeds("before").items()
        }
        ratio = comparison.ratio("after")
        slower = ", SLOWER" if ratio.pairs > 1 and max(ratio.each) < 1 else ""
        yield name, shown["before"], shown["after"], f"{ratio.value:.2f}x as fast ({ratio.turns()}){slower}"
