"""What a run under test says of itself before its first step."""

from __future__ import annotations

import psutil
import torch

from trainrun.cadence import Rhythm
from trainrun.data.mapstyle import thread_safe
from trainrun.data.undecided import Undecided
from trainrun.lab.orders import Ready
from trainrun.parts import Parts
from trainrun.start.attention_kernel import attention_layers
from trainrun.summary.throughput_limits import ahead


def ready_of(parts: Parts) -> Ready:
    train = parts.train
    chosen = train.chosen if isinstance(train, Undecided) else None
    rhythm = parts.cadence.rhythm
    return Ready(
        unit=str(getattr(parts.task, "unit", "samples")),
        engine=chosen.engine if chosen is not None else "",
        number=chosen.number if chosen is not None else 0,
        num_threads=torch.get_num_threads(),
        num_parameters=sum(parameter.numel() for parameter in parts.model.parameters()),
        device=str(parts.parallel.device),
        world_size=parts.parallel.world_size,
        steps_per_epoch=rhythm.steps_per_epoch,
        total_steps=rhythm.total_steps,
        val_every=val_every(rhythm),
        layers=tuple(sorted({type(module).__name__ for module in parts.model.modules()})),
        memory_bytes=_memory_of(parts.parallel.device),
        precision=parts.config.precision.mode,
        attention=next((layer.kernel for layer in attention_layers(parts.model)), ""),
        reads_ahead=ahead(parts) > 0,
        positions=_positions_of(parts),
        thread_safe=thread_safe(train.source) if isinstance(train, Undecided) else _reads_in_threads(parts),
    )


def val_every(rhythm: Rhythm) -> float | None:
    """Steps between two validations, on average."""
    if rhythm.val_steps is not None:
        return float(rhythm.val_steps)
    if rhythm.val_epochs is None or rhythm.steps_per_epoch is None:
        return None
    return rhythm.steps_per_epoch * max(
        rhythm.val_epochs, rhythm.every_n_epoch if rhythm.val_epochs >= 1 else 0
    )


def _reads_in_threads(parts: Parts) -> bool:
    """Whether the words say so themselves."""
    data = parts.config.data
    return data.engine == "threads" and data.num_threads not in ("auto", 1)


def _positions_of(parts: Parts) -> dict[str, float]:
    """Among several ranks the parts of a bucket are not alike."""
    if parts.parallel.world_size > 1:
        return {}
    accumulate = parts.config.trainer.accumulate_grad_batches
    return {mode: accumulate * number for mode, number in parts.positions.items()}


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return psutil.virtual_memory().total
