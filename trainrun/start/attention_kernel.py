"""`model.attention=auto`: the kernel of our models, by a short measurement of shape and number type.

what: forward and backward of one attention layer (a copy), on the positions that the first batch brings to it, with
    each kernel in turn; the fastest is set, the usual one where it is within 10 % of it, or where less than half of the
    samples were timed, and not for long: calling costs as much for few as for many. Usual is the rule's
    (`trainrun.model.attention`), or `flash` where its table has no room.
when: runs long enough; at most 0.3 s and 0.5 % of the run.
when not: short runs, resumes, `trainrun evaluate` and so on (all of which take what the run began with), a kernel
    that is named, `trainer.deterministic=true`, compiled models and recomputed blocks, whose cost is another: there
    the rule stays. `plain` and `math` keep a table of all pairs: not where those could fill an eighth of what is free.
    The choice changes rounding only, of validation too, and is written down with the run.
source: speed of one kernel over another is a matter of head width, length, type and instructions of the CPU.
gain: not measured on a quiet machine; `python scripts/bench_attention.py` has how far the rule is off.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainrun.data.choice import free_bytes
from trainrun.model.names import KERNELS
from trainrun.monitor.readable import counted
from trainrun.precision.guarded import build_context
from trainrun.start.trial import Gather, Size, Trial, heard_times, share_of, too_long, verdict

PAIR_BYTES = 10  # of a pair of positions in every head and layer: scores, softmax and its copy in 16 bits
MOST_MEMORY = 1 / 8  # of what is free
TABLES = ("plain", "math")
ENOUGH = 0.5  # of the batch, to speak against the rule; or
LONG_SECONDS = 5e-3  # of the fastest, compared with which the calls themselves are little


class Scene(NamedTuple):
    """One attention layer as the first batch comes to it; x is (samples, T, width). layers: how many there are."""

    layer: Any
    x: Tensor
    mask: Tensor | None
    turn: tuple[Tensor, Tensor] | None
    layers: int


def attention_layers(model: nn.Module) -> list[Any]:
    """Those of our kind."""
    if (
        "trainrun.model.gpt" not in sys.modules
    ):  # then it has none, and torch's attention need not be imported
        return []
    from trainrun.model.gpt import Attention

    return [module for module in model.modules() if isinstance(module, Attention)]


def undecided_layers(model: nn.Module) -> list[Any]:
    """The attention layers of our kind whose kernel is `auto`."""
    return [layer for layer in attention_layers(model) if layer.kernel == "auto"]


def set_kernel(layers: list[Any], kernel: str) -> None:
    for layer in layers:
        layer.kernel = kernel


def scene_of(trial: Trial, layers: list[Any], rows: int, dtype: torch.dtype | None) -> Scene | None:
    """layers: of the trial's model. None if the batch comes to none of them, or not sample by sample."""
    seen: list[Any] = []
    hook = layers[0].register_forward_pre_hook(lambda _, given: seen.append(given))
    try:
        trial.step(rows, dtype)
    finally:
        hook.remove()
    if not seen or seen[0][0].shape[0] != rows:
        return None
    x, mask, turn = seen[0]
    return Scene(copy.deepcopy(layers[0]), x.detach(), mask, turn, len(layers))


def kernel_times(trial: Trial, scene: Scene, size: Size, dtype: torch.dtype | None, limit: float,
                 device: torch.device, gather: Gather) -> tuple[dict[str, float], str, int]:  # fmt: skip
    """Seconds of a layer by kernel; the one that is meant to stay unless another is faster: the rule's, where its
    table has room; how many samples were timed. Empty if there is no time for it, with what to set then."""
    from trainrun.model.attention import HALF_TYPES, fastest_kernel

    layer, few, length = scene.layer, len(scene.x), scene.x.shape[1]
    kind = dtype or layer.into.weight.dtype
    rule = fastest_kernel(device.type, kind, length)
    names = [name for name in KERNELS if name != "auto" and (name != "fp32" or kind in HALF_TYPES)]
    pairs = size.count * layer.heads * length**2 * scene.layers
    if PAIR_BYTES * pairs > MOST_MEMORY * free_bytes(device):
        names = [name for name in names if name not in TABLES]
    names = [name for name in names if all(name in others for others in gather(names))]
    usual = rule if rule in names else "flash"

    def works(rows: int) -> dict[str, Any]:
        return {name: lambda name=name: _seconds(trial, scene, rows, name, dtype, device) for name in names}

    works(few)[usual]()
    alone = max(gather(works(few)[usual]()))
    if too_long(alone, limit, len(names)):
        return {}, "auto" if usual == rule else usual, 0
    rows = min(size.count, max(few, int(few * share_of(limit, len(names)) / alone)))
    return heard_times(works(rows), limit, gather), usual, rows


def _seconds(trial: Trial, scene: Scene, rows: int, kernel: str, dtype: torch.dtype | None,
             device: torch.device) -> float:  # fmt: skip
    layer, copies = scene.layer, -(-rows // len(scene.x))
    layer.kernel = kernel
    x = scene.x.repeat(copies, 1, 1)[:rows].requires_grad_()
    mask = scene.mask
    if mask is not None and len(mask) > 1:
        mask = mask.repeat(copies, 1, 1, 1)[:rows]
    turn = scene.turn
    if turn is not None and turn[0].ndim == 4:
        turn = (turn[0].repeat(copies, 1, 1, 1)[:rows], turn[1].repeat(copies, 1, 1, 1)[:rows])

    def work() -> None:
        with build_context(dtype, device):
            out = layer(x, mask, turn)
        out.sum().backward()

    seconds = trial.timed(work)
    for parameter in layer.parameters():
        parameter.grad = None
    return seconds


def chosen_kernel(trial: Trial, layers: list[Any], size: Size, dtype: torch.dtype | None, limit: float,
                  device: torch.device, gather: Gather) -> tuple[str, str]:  # fmt: skip
    """For one number type: the kernel ("auto" is the rule) and a line to show."""
    scene = scene_of(trial, layers, size.few, dtype)
    if not all(gather(scene is not None)):
        return "auto", ""
    assert scene is not None
    times, usual, rows = kernel_times(trial, scene, size, dtype, limit, device, gather)
    if not times:
        return usual, ""
    kernel, own, others = verdict(times, usual)
    kind = "" if dtype is None else f" in {str(dtype).removeprefix('torch.')}"
    heard = min(gather(rows))
    if kernel != usual and heard < ENOUGH * size.count and min(times.values()) < LONG_SECONDS:
        part = f"{counted(heard, 'sample')} of {size.count}"
        return (
            usual,
            f"model.attention: {usual}, since {part}{kind} say too little ({others}, {kernel}: {own})",
        )
    return kernel, f"model.attention: {kernel}, {own} a layer{kind} ({others})"
