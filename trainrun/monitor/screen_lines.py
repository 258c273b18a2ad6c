"""What is said of a run: at its start, its place in the data, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainrun.formatting import counted, duration, figure, quantity, speed_in
from trainrun.interfaces import RunFacts
from trainrun.runs.run_folder import RunDir

LEAST_SHARE = 0.02  # of the time: smaller accounts are not named


def entry(name: str, text: str) -> str:
    return f"  {name:<7} {text}"


def start_lines(facts: RunFacts, step: int, verbose: bool) -> list[str]:
    """The block at the start; without `verbose` where the files are, and no more."""
    if not verbose:
        return [f"{facts.name}  {facts.folder}"]
    ranks = facts.world_size
    batch = f"batch {facts.batch_size} x accumulate {facts.accumulate} x ranks {ranks}"
    model = f"{facts.model_summary}, {counted(facts.num_parameters, 'parameter')}"
    if facts.num_trainable != facts.num_parameters:
        model += f", {facts.num_trainable:,} of them trained"
    data = counted(facts.num_train, "training sample")
    if facts.num_val is not None:
        data += f", {facts.num_val:,} for validation"
    return [
        f"{facts.name} on {facts.device}" + (f", resumed at step {step:,}" if step else ""),
        entry("model", model),
        entry("data", data),
        entry("step", f"{batch} = {facts.batch_size * facts.accumulate * ranks}"),
        *([entry("update", facts.update)] if facts.update else []),
        entry("length", _length(facts)),
        *(entry("chosen" if i == 0 else "", choice) for i, choice in enumerate(facts.choices)),
        entry("folder", facts.folder),
    ]


def _length(facts: RunFacts) -> str:
    """`900 steps, 45 an epoch, 20 epochs`, as far as it is known; epochs where they end the run."""
    length, total, epochs = facts.steps_per_epoch, facts.total_steps, facts.total_epochs
    parts = [counted(total, "step")]
    if length is not None:
        parts.append(f"{length:,} an epoch")
    if epochs is not None and total == (None if length is None else length * epochs):
        parts.append(counted(epochs, "epoch"))
    return ", ".join(parts)


def place_line(step: int, epoch: float, facts: RunFacts | None) -> str:
    """`epoch 3/20  step 135`, or `step 135/5,000` in a run that sees no epoch to its end, as of endless data."""
    length, total, epochs = (
        (facts.steps_per_epoch, facts.total_steps, facts.total_epochs) if facts else (None, None, None)
    )
    if epoch < 1 and (length is None or total is None or total < length):
        return f"step {step:,}" + (f"/{total:,}" if total is not None else "")
    end = total / length if length and total is not None else epochs
    return f"epoch {epoch:.4g}" + (f"/{end:.4g}" if end is not None else "") + f"  step {step:,}"


def end_lines(summary: Mapping[str, Any], folder: str | None) -> list[str]:
    lines = [f"ended at step {summary.get('step', 0):,}: {summary.get('reason') or 'all done'}"]
    speed = speed_in(summary)
    if summary.get("value") is not None:
        at = summary.get("best_step")
        best = f"{summary.get('monitor')} {figure(summary['value'])}"
        lines.append(entry("best", best + (f" at step {at:,}" if at is not None else "")))
    if "seconds" in summary:
        rate = "" if speed is None else f", {quantity(speed[0])} {speed[1]}"
        lines.append(entry("time", duration(summary["seconds"]) + rate))
    if summary.get("flops_per_second"):
        lines.append(entry("compute", compute_line(summary)))
    if summary.get("throughput_limits"):
        lines.append(entry("limits", limits_line(summary["throughput_limits"], speed)))
    if summary.get("ledger"):
        lines.append(entry("spent", spent_line(summary["ledger"])))
    if summary.get("idle"):
        lines.append(entry("idle", summary["idle"]))
    if summary.get("hidden_syncs") is not None:
        lines.append(entry("waits", waits_line(summary["hidden_syncs"])))
    for key, count in (summary.get("listener_faults") or {}).items():
        lines.append(entry("failed", f"{key}: {counted(count, 'call')}"))
    if summary.get("hint"):
        lines.append(entry("hint", summary["hint"]))
    if folder is not None:
        run = RunDir(Path(folder))
        written = [path for path in (run.checkpoints, run.plots, run.report) if path.exists()]
        lines += [entry("" if i else "files", str(path)) for i, path in enumerate(written or [run.root])]
    return lines


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


def limits_line(facts: Mapping[str, Any], speed: tuple[float, str] | None) -> str:
    """`training alone 1.9k samples/s, loading alone 950k: training limits, its steps reach 98 %`"""
    rates = [facts[f"{side}_per_second"] for side in ("load", "train")]
    factor, unit = 1.0, " items/s"  # an item need not be a sample or a token
    if speed is not None and facts["reached"] > 0:
        factor, unit = speed[0] / (facts["reached"] * min(rates)), f" {speed[1]}"
    load, train = (quantity(factor * rate) for rate in rates)
    reached = f"its steps reach {100 * facts['reached']:.0f} %"
    if facts["limit"] == "load":
        return f"loading alone {load}{unit}, training alone {train}: loading limits, {reached}"
    return f"training alone {train}{unit}, loading alone {load}: training limits, {reached}"


def spent_line(seconds: Mapping[str, float]) -> str:
    """`6.1 s from start to end: start-up 40 %, forward 21 %, ... the rest 3 %`, the largest first."""
    total = sum(seconds.values()) or 1.0
    order = sorted(seconds, key=lambda name: -seconds[name])
    named = [name for name in order if seconds[name] >= LEAST_SHARE * total]
    parts = [f"{name} {100 * seconds[name] / total:.0f} %" for name in named]
    rest = 1 - sum(seconds[name] for name in named) / total
    return f"{duration(total)} from start to end: " + ", ".join([*parts, f"the rest {100 * rest:.1f} %"])


def waits_line(found: Mapping[str, int]) -> str:
    """`2 lines of a step made the host wait for the GPU: /home/me/my_net.py:14 (900 times), ...`"""
    if not found:
        return "no line of a step made the host wait for the GPU"
    places = ", ".join(f"{place} ({count} times)" for place, count in found.items())
    return f"{counted(len(found), 'line')} of a step made the host wait for the GPU: {places}"
