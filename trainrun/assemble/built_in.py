"""Our own techniques for memory and compiling, on a model: blocks computed again, weights on the host, torch.compile.

`trainer.compile.scope=auto`: compiled only where that is paid back before the run ends. A rule with measured constants,
and not a clock: compiled code rounds differently, so a run that is resumed must choose as it did before; and what
compiling gains is known only once it is paid for. What it cost is in `status.json` (`compile_seconds`, `recompiles`).
"""

from __future__ import annotations

import torch
from torch import nn

from trainrun.config.rules import step_obstacles
from trainrun.config.schema import RunConfig, with_values
from trainrun.errors import ConfigError, told_of_a_setting
from trainrun.transform.compile import gpu_compiler_problem

# A tiny step on one core: digits MLP of 9,610 weights, batch 32, Xeon with AVX-512, torch 2.13.
CPU_SAVED_SECONDS, CPU_COMPILE_SECONDS = 1e-4, 6.5
# Above it kernels and not Python take the time: on a CPU 0.7x to 1.0x in float32. A small GPT in bf16 gains (1.27x),
# but nothing here tells it from those that lose; `trainer.compile=model` is for users who have measured it.
SMALL_STEP_FLOP = 1e8
# GPT of 124 million weights in bf16 on an H100: 129 -> 104 ms, 18 s of compiling. Smaller steps save less.
GPU_SAVED_SECONDS, GPU_COMPILE_SECONDS = 8e-3, 30.0
GPU_LEAST_WEIGHTS = 1_000_000  # a step of fewer does not take as long as that


def chosen_scope(
    config: RunConfig, num_weights: int, total_steps: int | None, device: torch.device, problem: str = ""
) -> tuple[str, str]:
    """The scope for this run, and a line that says why. problem: what the compiler lacks here."""

    def off(why: str) -> tuple[str, str]:
        return "off", f"compile: off (auto), {why}"

    if total_steps is None:
        return off("the number of steps is not known; give trainer.max_steps")
    if device.type == "cuda" and num_weights < GPU_LEAST_WEIGHTS:
        return off("a small network on a GPU; there trainer.cuda_graphs=true may pay")
    if device.type == "cuda":
        scope, saved, cost = "model", GPU_SAVED_SECONDS, GPU_COMPILE_SECONDS
    else:
        if device.type != "cpu" or 6 * num_weights * config.data.batch_size > SMALL_STEP_FLOP:
            return off(f"on the device {device.type} it pays for tiny steps only")
        if obstacle := next(step_obstacles(config), None):
            return off(f"a step of one graph does not go with {obstacle[0]}")
        scope, saved, cost = "step", CPU_SAVED_SECONDS, CPU_COMPILE_SECONDS
    gain = total_steps * saved
    sum_of_it = f"{total_steps:,} steps x {1e3 * saved:g} ms = {gain:.1f} s saved"
    if gain <= cost:
        return off(f"{sum_of_it} <= {cost:g} s of compiling")
    if problem:
        return off(f"it would pay, but torch.compile on a GPU {problem}")
    return scope, f"compile: {scope} (auto), {sum_of_it} > {cost:g} s of compiling"


def with_scope(
    config: RunConfig, num_weights: int, total_steps: int | None, device: torch.device, notes: list[str]
) -> RunConfig:
    """The config with `auto` decided."""
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = gpu_compiler_problem(found) if found and config.trainer.compile.backend == "inductor" else ""
    scope, note = chosen_scope(config, num_weights, total_steps, device, problem)
    notes.append(note)
    return with_values(config, {"trainer.compile.scope": scope})


NO_BLOCKS = (
    "the model has no blocks to compute again: no torch.nn.ModuleList or torch.nn.Sequential with several children "
    "of one class that have layers of their own, and in a Sequential no runs of layers that save more than their input"
)


def offload_parameters(model: nn.Module, device: torch.device) -> str:
    from trainrun.transform.parameter_offload import parameter_offload

    if not (number := parameter_offload(model, device)):
        raise ConfigError(f"trainer.cpu_offload=parameters: {NO_BLOCKS}; use trainer.cpu_offload=none")
    return f"trainer.cpu_offload: the weights of {number} blocks lie in the host's memory"


def checkpoint_gradients(model: nn.Module, config: RunConfig) -> str:
    """By itself (`auto`) not in steps that are recorded."""
    from trainrun.transform.gradient_checkpointing import gradient_checkpointing

    trainer, key = config.trainer, "trainer.gradient_checkpointing"
    mode, is_auto = trainer.gradient_checkpointing, trainer.gradient_checkpointing == "auto"
    if is_auto and (trainer.compile.scope != "off" or trainer.cuda_graphs or config.parallel.sync_batchnorm):
        return f"{key}: off, with compiled or recorded steps or synchronised batch norm (auto)"
    number = gradient_checkpointing(model, "full" if is_auto else mode)
    if not number and not is_auto:
        raise ConfigError(f"{key}={mode}: {NO_BLOCKS}; use {key}=none")
    what = f"{number} blocks are computed again in the backward" if number else "off, the model has no blocks"
    return f"{key}: {what}" + (" (auto)" if is_auto else "")


def use_compiler(model: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Compile the model alone or its blocks; a whole step is compiled elsewhere."""
    from trainrun.transform.compile import WITH_CUDA_GRAPHS, compile_model, keep_gradients

    wanted = config.trainer.compile
    sizes = {config.data.batch_size, config.data.val_batch_size or config.data.batch_size}
    with told_of_a_setting():
        compile_model(
            model, sizes, wanted.scope == "regional", mode=wanted.mode, backend=wanted.backend,
            fullgraph=wanted.fullgraph, dynamic=wanted.dynamic,
        )  # fmt: skip
    adds_up = config.trainer.accumulate_grad_batches > 1
    if adds_up and device.type == "cuda" and wanted.mode in WITH_CUDA_GRAPHS:
        keep_gradients(model)
