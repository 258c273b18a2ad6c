"""`precision=auto`: float32, or bfloat16 where a short measurement says that it is faster.

what: forward and backward of a copy of the model on the first batch, in `32-true` and in `bf16-mixed` in turns; the
    latter is taken where the former takes more than 10 % longer.
when: presets `fast` and `max-perf`, in runs long enough; at most 0.5 s and 1 % of the run.
when not: where every run must round alike: name a type. Short runs, `trainer.deterministic=true`, compiled models and
    what cannot be tried take the rule: bfloat16 where the device has it, but no tiny dense network on a CPU. A device
    that only emulates bfloat16 always takes float32.
    What was chosen is written down with the run: resumes, evaluation and all ranks take the same.
source: a tiny network spends its time in the casts: digits MLP, batch 32, one core: bf16-mixed 0.55x as fast.
gain: none over the better of the two named by hand; it spares finding out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from trainrun.monitor.readable import counted
from trainrun.precision.amp import cpu_has
from trainrun.start.trial import Gather, Size, Trial, heard_times, too_long, verdict

FULL, MIXED = "32-true", "bf16-mixed"
TYPES: dict[str, torch.dtype | None] = {FULL: None, MIXED: torch.bfloat16}
ENOUGH = 0.25  # of the batch, to speak against the rule
SMALL_STEP_FLOP = 1e8  # forward and backward of one micro-batch: about half a millisecond on one core
DENSE = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)


def is_tiny(model: nn.Module, batch_size: int) -> bool:
    """A step of a few dense layers, whose kernels take less time than all that is around them."""
    flop = 6 * sum(parameter.numel() for parameter in model.parameters()) * batch_size
    return flop < SMALL_STEP_FLOP and all(
        isinstance(module, DENSE) or not list(module.parameters(recurse=False)) for module in model.modules()
    )


def type_by_rule(model: nn.Module, batch_size: int, device: torch.device) -> tuple[str, str]:
    """The mode, and why."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = device.type == "cpu" and cpu_has("avx512_bf16", "amx_tile")
    if not native:
        return FULL, f"this {device.type} has no bfloat16 arithmetic for matrix products"
    if device.type == "cpu" and is_tiny(model, batch_size):
        return FULL, "a step this small loses more by casting than it gains"
    return MIXED, f"this {device.type} has bfloat16 arithmetic"


def faster_type(
    trial: Trial, size: Size, limit: float, rule: str, prepare: Callable[[str], None], gather: Gather
) -> tuple[str, str]:
    """The mode and the numbers; "" if there was no time. prepare: told the mode before each step.

    rule: the mode of `type_by_rule`. Casting costs as much for few samples as for many, and so does waiting for a
    core: few that are slower in bfloat16 do not speak for the whole batch.
    """

    def heard(mode: str) -> float:
        prepare(mode)
        return trial.step(size.rows, TYPES[mode])

    if too_long(size.seconds, limit, len(TYPES)):
        return "", ""
    times = heard_times({mode: partial(heard, mode) for mode in TYPES}, limit, gather)
    if not times:
        return "", ""
    chosen, own, others = verdict(times, usual=FULL)
    part = "a step" if size.rows == size.count else f"a step of {counted(size.rows, 'sample')}"
    if chosen == FULL != rule and size.rows < ENOUGH * size.count:
        return rule, f"by rule: {own} {part} in {FULL} ({others}) says too little of {size.count}"
    return chosen, f"{own} {part} ({others})"
