"""Write the memory of each module to a file in the run folder when a run is out of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.folder.run_folder import write_json
from trainrun.output import format_quantity

MODULE_DEPTH = 2  # parts of a parameter's name that name its module, as `blocks.3`
LARGEST_BLOCKS = 20  # of the allocator that are listed
KINDS = ("weights", "gradients", "optimizer", "buffers")


def write_memory_report(
    path: Path, model: nn.Module, states: Iterable[Mapping[Any, Any]], device: torch.device, phase: str
) -> str:
    """Write the bytes of each module, and return a line about the largest ones.

    states: the states of the optimizers, by parameter. phase: the phase of the step.
    """
    by_module = count_bytes_by_module(model, states)
    totals = {kind: sum(held[kind] for held in by_module.values()) for kind in KINDS}
    report: dict[str, Any] = {"phase": phase, "bytes": totals, "modules": by_module}
    if device.type == "cuda":
        report |= read_allocator_facts(device, sum(totals.values()))
    write_json(path, report)
    largest = max(by_module, key=lambda name: sum(by_module[name].values()), default="")
    shown = ", ".join(f"{kind} {format_quantity(totals[kind])}B" for kind in KINDS if totals[kind])
    return f"memory ended in {phase}: {shown}; most in {largest or 'the model'}; see {path}"


def count_bytes_by_module(model: nn.Module, states: Iterable[Mapping[Any, Any]]) -> dict[str, dict[str, int]]:
    """Return the bytes of each kind by module, the largest module first. Tied weights count once."""
    held: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    module_of: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        module = module_of[id(parameter)] = find_module_name(name)
        held[module]["weights"] += count_tensor_bytes(parameter)
        if parameter.grad is not None:
            held[module]["gradients"] += count_tensor_bytes(parameter.grad)
    for name, buffer in model.named_buffers():
        held[find_module_name(name)]["buffers"] += count_tensor_bytes(buffer)
    for state in states:
        for parameter, values in state.items():
            tensors = [value for value in values.values() if isinstance(value, Tensor)]
            held[module_of.get(id(parameter), "others")]["optimizer"] += sum(map(count_tensor_bytes, tensors))
    return dict(sorted(held.items(), key=lambda item: -sum(item[1].values())))


def find_module_name(name: str) -> str:
    """Return the module of a parameter, at most MODULE_DEPTH parts deep: `blocks.3` of `blocks.3.mlp.weight`."""
    return ".".join(name.split(".")[:-1][:MODULE_DEPTH])


def count_tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def read_allocator_facts(device: torch.device, named_bytes: int) -> dict[str, Any]:
    """Return the facts of torch's allocator. Memory that no module holds is that of activations and temporary
    tensors.
    """
    stats = torch.cuda.memory_stats(device)
    allocated, reserved = (stats[f"{kind}_bytes.all.current"] for kind in ("allocated", "reserved"))
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    blocks = [block for segment in segments for block in segment["blocks"]]
    active = sorted((block["size"] for block in blocks if block["state"] == "active_allocated"), reverse=True)
    return {
        "allocated": allocated, "reserved": reserved, "peak": stats["allocated_bytes.all.peak"],
        "activations_and_temporary": allocated - named_bytes, "largest_blocks": active[:LARGEST_BLOCKS],
    }  # fmt: skip
