"""Lines of the summary on what was measured: operations a second, loading against training, hidden waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainrun.output import SPEEDS, counted, quantity

if TYPE_CHECKING:
    pass


def compute_line(summary: Mapping[str, Any]) -> str:
    """`35 GFLOP/s, 41 % of the best matrix product measured here (80 GFLOP/s to 85 GFLOP/s)`; and on a known GPU
    `, 33 % of its data sheet (989 TFLOP/s)`"""
    done, peak = summary["flops_per_second"], summary.get("peak_flops_per_second")
    line = flop_rate(done)
    if not peak:
        return line
    sheet = summary.get("data_sheet_flops_per_second")
    known = f", {100 * done / sheet:.1f} % of its data sheet ({flop_rate(sheet)})" if sheet else ""
    measured = f"{flop_rate(summary['lowest_peak_flops_per_second'])} to {flop_rate(peak)}"
    if not summary.get("mfu"):
        return f"{line}{known}; the best matrix product measured here is too unsteady to compare ({measured})"
    return (
        f"{line}, {100 * summary['mfu']:.1f} % of the best matrix product measured here ({measured}){known}"
    )


def flop_rate(rate: float) -> str:
    """`35 GFLOP/s`"""
    number = quantity(rate)
    digits = number.rstrip("kMGT")
    return f"{digits} {number[len(digits) :]}FLOP/s"


def limits_line(summary: Mapping[str, Any]) -> str:
    """`training alone 1.9k samples/s, loading alone 950k: training limits, its steps reach 98 %`, as measured"""
    facts = summary["throughput_limits"]
    load, train = (quantity(facts[f"{side}_per_second"]) for side in ("load", "train"))
    # useful tokens stand beside the items of a task that counts samples or pixels
    name = next((name for name in reversed(SPEEDS) if summary.get(name) is not None), "")
    unit = f" {SPEEDS.get(name, 'items/s')}"
    reached = f"its steps reach {100 * facts['reached']:.0f} %"
    if facts["limit"] == "load":
        return f"loading alone {load}{unit}, training alone {train}: loading limits, {reached}"
    return f"training alone {train}{unit}, loading alone {load}: training limits, {reached}"


def waits_line(found: Mapping[str, int]) -> str:
    """`2 lines of a step made the host wait for the GPU: /home/me/my_net.py:14 (900 times), ...`"""
    if not found:
        return "no line of a step made the host wait for the GPU"
    places = ", ".join(f"{place} ({count} times)" for place, count in found.items())
    return f"{counted(len(found), 'line')} of a step made the host wait for the GPU: {places}"
