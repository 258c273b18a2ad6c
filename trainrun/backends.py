"""Switches of the whole process: threads, determinism, kernels, rounding of products."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainrun.config import RunConfig
from trainrun.host_memory import return_freed_memory
from trainrun.interfaces import Parallel
from trainrun.precision.amp import set_matmul

SMALL_STEP_FLOP = 1e8  # forward and backward of one micro-batch: about half a millisecond on one core
DENSE = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)


@contextmanager
def kept_backends() -> Iterator[None]:
    """What `set_backends` and `set_threads` change is as before at the end: a notebook lives on."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, matmul = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        set_deterministic(deterministic, warn_only)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = tf32


def set_deterministic(wanted: bool, warn_only: bool) -> None:
    """Only where it is a change: torch loads its compiler for this call, 1 to 2 s that few runs need."""
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (wanted, warn_only):
        torch.use_deterministic_algorithms(wanted, warn_only=warn_only)


def set_backends(config: RunConfig, parallel: Parallel) -> list[str]:
    """Switches of the whole process: determinism, kernels, what float32 may round to."""
    trainer = config.trainer
    if trainer.deterministic and parallel.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    set_deterministic(trainer.deterministic, warn_only=False)
    torch.backends.cudnn.benchmark = trainer.benchmark
    notes = [set_matmul(config.precision.matmul, parallel.device)]
    if trainer.return_freed_memory:
        notes.append(return_freed_memory())
    return [note for note in notes if note]


def set_threads(config: RunConfig, model: nn.Module, device: torch.device, notes: list[str]) -> None:
    """Threads of one operation on the CPU, by a rule and not by a clock: they change the last bits of sums.

    A step of a few dense layers is too small to share: two threads made it 1.09x slower on a quiet
    two-core machine, and 48x on a busy one, where each waits for the other to be scheduled.
    """
    wanted = config.trainer.num_threads
    if wanted != "auto":
        torch.set_num_threads(wanted)
        return
    if device.type != "cpu" or torch.get_num_threads() == 1:
        return
    small = (
        6 * sum(parameter.numel() for parameter in model.parameters()) * config.data.batch_size
        < SMALL_STEP_FLOP
    )
    dense = all(
        isinstance(module, DENSE) or not list(module.parameters(recurse=False)) for module in model.modules()
    )
    if small and dense:
        torch.set_num_threads(1)
        notes.append("trainer.num_threads: 1, a step this small does not gain from more")
