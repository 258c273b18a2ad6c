"""Lines of the summary on what was measured: operations a second, the bottleneck, hidden waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainrun.output import SPEEDS, counted, quantity


def compute_line(summary: Mapping[str, Any]) -> str:
    """Return `330 TFLOP/s, MFU 33.4 % (of 989 TFLOP/s, by the data sheet)`; the rate alone if the GPU is not known."""
    rate = flop_rate(summary["flops_per_second"])
    if not summary.get("mfu"):
        return rate
    sheet = flop_rate(summary["data_sheet_flops_per_second"])
    return f"{rate}, MFU {100 * summary['mfu']:.1f} % (of {sheet}, by the data sheet)"


def flop_rate(rate: float) -> str:
    """Return `35 GFLOP/s`."""
    number = quantity(rate)
    digits = number.rstrip("kMGT")
    return f"{digits} {number[len(digits) :]}FLOP/s"


def bottleneck_line(summary: Mapping[str, Any]) -> str:
    """Return `the model: it can take 85.1k samples/s, loading could deliver 1.41M`, or the like for loading."""
    facts = summary["throughput_limits"]
    load, train = (quantity(facts[f"{side}_per_second"]) for side in ("load", "train"))
    # a run also measures useful tokens beside the items of a task that counts samples or pixels
    name = next((name for name in reversed(SPEEDS) if summary.get(name) is not None), "")
    unit = SPEEDS.get(name, "items/s")
    if facts["limit"] == "load":
        return f"loading: it delivers {load} {unit}, the model could take {train}"
    return f"the model: it can take {train} {unit}, loading could deliver {load}"


def waits_line(counts: Mapping[str, int]) -> str:
    """Return `2 lines of a step made the host wait for the GPU: /home/me/my_net.py:14 (900 times), ...`."""
    if not counts:
        return "no line of a step made the host wait for the GPU"
    lines = ", ".join(f"{line} ({count} times)" for line, count in counts.items())
    return f"{counted(len(counts), 'line')} of a step made the host wait for the GPU: {lines}"
