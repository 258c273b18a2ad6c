"""The conditions under which a measured preset is valid: machine, torch version, model and shapes, as plain texts.

They are a comment in the preset's file. A run compares them when its config is composed, without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from pathlib import Path
from typing import Any, Final

from trainrun.config.schema import RunConfig

MARK: Final = "# fingerprint: "
_CPU_NAME = re.compile(r"^(?:model name|Hardware)\s*:\s*(.+)$", re.MULTILINE)


def describe_preset_conditions(config: RunConfig, working_dir: Path) -> dict[str, str]:
    """Return what a measured preset depends on: `machine`, `torch`, `model` and `shapes`."""
    from importlib import metadata  # 10 ms, and most runs have no preset that was measured

    return {
        "machine": describe_machine(),
        "torch": metadata.version("torch"),
        "model": _hash_node(config.model, _read_target_code(config.model, working_dir)),
        "shapes": describe_shapes(config),
    }


def describe_machine() -> str:
    """Return the machine as `AMD EPYC, 2 cores`, followed by the names of its NVIDIA GPUs."""
    info = Path("/proc/cpuinfo")
    match = _CPU_NAME.search(info.read_text(errors="replace")) if info.is_file() else None
    name = match[1].strip() if match else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [_read_gpu_name(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return ", ".join([name, f"{cores} cores", *gpus])


def _read_gpu_name(path: Path) -> str:
    match = re.search(r"Model:\s*(.+)", path.read_text(errors="replace"))
    return match[1].strip() if match else "a GPU"


def describe_shapes(config: RunConfig) -> str:
    """Return the shape of a sample, and the samples of a step over all ranks and micro-batches."""
    data, parallel = config.data, config.parallel
    world = 1 if parallel.mode == "single" else parallel.devices
    world = len(world) if isinstance(world, list) else world
    if data.global_batch_size is not None:
        batch: Any = data.global_batch_size
    elif world == "auto":
        batch = f"{data.batch_size * config.trainer.accumulate_grad_batches} a rank"
    else:
        batch = data.batch_size * config.trainer.accumulate_grad_batches * world
    sample = "x".join(map(str, data.shape)) if data.shape else "its own shape"
    longest = f", up to {data.max_sequence_length}" if data.max_sequence_length else ""
    return f"{batch} of {sample}{longest}"


def _read_target_code(node: Any, working_dir: Path) -> bytes:
    """Return the content of the user's file that a node's target names; b"" for other targets."""
    target = node.get("_target_") if isinstance(node, dict) else None
    file = working_dir.joinpath(*str(target).split(".")[:-1]).with_suffix(".py") if target else None
    return file.read_bytes() if file is not None and file.is_file() else b""


def _hash_node(node: Any, code: bytes) -> str:
    text = json.dumps(node, sort_keys=True, default=str).encode()
    return hashlib.sha256(text + code).hexdigest()[:12]


def format_preset_conditions(config: RunConfig, working_dir: Path) -> str:
    return MARK + json.dumps(describe_preset_conditions(config, working_dir))


def describe_stale_preset(
    preset: str, config: RunConfig, folders: list[Path], working_dir: Path
) -> list[str]:
    """Return a line if the preset was measured on another machine, model or shape; else []."""
    file = next(
        (file for folder in folders if (file := folder / "preset" / f"{preset}.yaml").is_file()), None
    )
    lines = [] if file is None else file.read_text(encoding="utf-8", errors="replace").splitlines()
    line = next((line for line in lines if line.startswith(MARK)), None)
    if line is None:
        return []
    try:
        then = dict(json.loads(line.removeprefix(MARK)))
    except ValueError:
        then = {}
    now = describe_preset_conditions(config, working_dir)
    changed = [
        _describe_change(name, str(then.get(name)), now[name]) for name in now if then.get(name) != now[name]
    ]
    if not changed:
        return []
    return [f"preset={preset} was measured with {'; '.join(changed)}. Measure again: trainrun autotune"]


def _describe_change(name: str, then: str, now: str) -> str:
    return "another model" if name == "model" else f"{name} {then}, and this is {now}"
