"""The first and last lines of a run, formatted from its facts and its summary."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainrun.folder.run_folder import RunDir, read_overrides
from trainrun.interfaces import RunFacts
from trainrun.output import (
    COMMAND,
    SPEEDS,
    find_throughput,
    format_count,
    format_duration,
    format_number,
    format_path_to_paste,
    format_quantity,
)

OBJECT_TARGET = "trainrun.runs.api.python_object"  # of what `trainrun.train(model=...)` was given

LEAST_SHARE, MOST_PARTS = 0.05, 3  # of the time: smaller accounts are not named, nor more of them


def format_entry(name: str, text: str) -> str:
    """Return one line of the first or last block: a name, padded to 10 characters, and its text."""
    return f"  {name:<10} {text}"


def start_lines(facts: RunFacts, step: int, verbose: bool, summary: bool = False) -> list[str]:
    """Return the block at the start. verbose: False for name and folder only. summary: include all choices."""
    if not verbose:
        return [f"{facts.name}  {facts.folder}"]
    model = f"{facts.model_summary}, {format_count(facts.num_parameters, 'parameter')}"
    if facts.num_trainable != facts.num_parameters:
        model += f", {facts.num_trainable:,} of them trained"
    data = format_count(facts.num_train, "training sample")
    if facts.num_val is not None:
        data += f", {facts.num_val:,} for validation"
    choices = facts.choices if summary else ()
    return [
        f"{facts.name} on {facts.device}" + (f", resumed at step {step:,}" if step else ""),
        format_entry("data", data),
        *([format_entry("classes", facts.classes)] if facts.classes else []),
        format_entry("model", model),
        *([format_entry("optimizer", facts.update)] if facts.update else []),
        format_entry("batch", _describe_batch(facts)),
        format_entry("length", _describe_length(facts)),
        format_entry("folder", facts.folder),
        *(format_entry("" if number else "chosen", choice) for number, choice in enumerate(choices)),
        *(f"note: {advice}" for advice in facts.advice),
    ]


def _describe_batch(facts: RunFacts) -> str:
    """Return `32`, or `32 x 4 accumulated x 2 ranks = 256` if a step has several micro-batches."""
    size, accumulate, ranks = facts.batch_size, facts.accumulate, facts.world_size
    factors = [str(size)]
    if accumulate > 1:
        factors.append(f"{accumulate} accumulated")
    if ranks > 1:
        factors.append(f"{ranks} ranks")
    total = f" = {size * accumulate * ranks}" if len(factors) > 1 else ""
    return " x ".join(factors) + total


def _describe_length(facts: RunFacts) -> str:
    """Return `900 steps, 45 an epoch, 20 epochs`, without unknown parts. Epochs are named only if they end the run."""
    length, total, epochs = facts.steps_per_epoch, facts.total_steps, facts.total_epochs
    parts = [format_count(total, "step")]
    if length is not None:
        parts.append(f"{length:,} an epoch")
    if epochs is not None and total == (None if length is None else length * epochs):
        parts.append(format_count(epochs, "epoch"))
    steps = ", ".join(parts)
    if facts.max_seconds is None:
        return steps
    time = f"{format_duration(max(facts.max_seconds - facts.seconds_before, 0.0))} of training"
    return time if total is None else f"up to {steps}, or {time}"


def layer_lines(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of `--summary`: name, class, shape of the output and parameters of each layer."""
    heads = ("layer", "class", "output", "parameters")
    rows = [
        heads,
        *(
            (str(layer["layer"]), layer["class"], layer["output"], f"{layer['parameters']:,}")
            for layer in layers
        ),
    ]
    widths = [max(len(row[number]) for row in rows) for number in range(len(heads))]
    return ["  " + "  ".join([*map(str.ljust, row[:3], widths[:3]), row[3].rjust(widths[3])]) for row in rows]


def end_lines(summary: Mapping[str, Any], facts: RunFacts | None) -> list[str]:
    """Return the block at the end: the best value, speed and time, and commands to paste."""
    lines = [f"ended at step {summary.get('step', 0):,}: {summary.get('reason') or 'all done'}"]
    if summary.get("value") is not None:
        at = summary.get("best_step")
        best = f"{summary.get('monitor')} {format_number(summary['value'])}"
        lines.append(format_entry("best", best + (f" at step {at:,}" if at is not None else "")))
    if "seconds" in summary:
        lines.append(format_entry("time", time_line(summary, facts)))
    if summary.get("mfu"):
        lines.append(format_entry("compute", compute_line(summary)))
    if summary.get("throughput_limits"):
        lines.append(format_entry("bottleneck", bottleneck_line(summary)))
    if summary.get("idle"):
        lines.append(format_entry("idle", summary["idle"]))
    for key, count in (summary.get("listener_faults") or {}).items():
        lines.append(format_entry("failed", f"{key}: {format_count(count, 'call')}"))
    if summary.get("hint"):
        lines.append(format_entry("hint", summary["hint"]))
    if facts is not None:
        if (page := RunDir(Path(facts.folder)).report).is_file():
            follow = "; plots/*.png follow in a moment" if summary.get("pictures_follow") else ""
            lines.append(format_entry("report", format_path_to_paste(page) + follow))
        commands = next_commands(summary, facts)
        lines += [format_entry("" if number else "next", text) for number, text in enumerate(commands)]
        if not commands:
            lines.append(format_entry("folder", facts.folder))
    return lines


def time_line(summary: Mapping[str, Any], facts: RunFacts | None) -> str:
    """Return `1:05 of training at 5.9k samples/s; 1:15 in all: start-up 8 %, plots 5 %`, largest shares first.

    All of it is of this session. A resumed run also has the time of training with its earlier sessions.
    """
    seconds, before = summary["seconds"], 0.0 if facts is None else facts.seconds_before
    text, speed = f"{format_duration(seconds - before)} of training", find_throughput(summary)
    if speed is not None:
        text += f" at {format_quantity(speed[0])} {speed[1]}"
    if before:
        text += f" ({format_duration(seconds)} with earlier sessions)"
    ledger: Mapping[str, float] = summary.get("ledger") or {}
    if not ledger:
        return text
    total = sum(ledger.values()) or 1.0
    order = sorted(ledger, key=lambda name: -ledger[name])
    named = [name for name in order if ledger[name] >= LEAST_SHARE * total][:MOST_PARTS]
    parts = ", ".join(f"{name} {100 * ledger[name] / total:.0f} %" for name in named)
    return f"{text}; {format_duration(total)} in all: {parts}"


def next_commands(summary: Mapping[str, Any], facts: RunFacts) -> list[str]:
    """Return commands to paste that train a finished run longer, evaluate it and draw its report."""
    run = RunDir(Path(facts.folder))
    folder = format_path_to_paste(run.root)
    commands = []
    words = read_overrides(run)
    objects = find_python_objects(words)
    longer = doubled_limit(summary, facts.config.get("trainer") or {})
    if objects and longer and run.checkpoints.is_dir():
        commands.append(format_call([f"ckpt_path={run.root}", longer], objects))
    elif run.checkpoints.is_dir() and not objects:
        if longer:
            commands.append(f"{COMMAND} resume {folder} {longer}")
        counted_or_endless = facts.num_val, (facts.config.get("data") or {}).get("val")
        if any(number is not None for number in counted_or_endless):
            commands.append(f"{COMMAND} evaluate {folder}")
    if run.metrics.is_file():
        commands.append(f"{COMMAND} report {folder}")
    return commands


def find_python_objects(words: Sequence[str]) -> dict[str, str]:
    """Return the Python objects (`model`, `data`, `val`) in the settings of a run, by name, each with its
    description.
    """
    values = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    places = [key.removesuffix("._target_") for key, value in values.items() if value == OBJECT_TARGET]
    names = [values[f"{place}.name"] for place in places]
    abouts = [values[f"{place}.about"].strip('"') for place in places]
    return dict(zip(names, abouts, strict=True))


def settings_without_objects(words: Sequence[str]) -> list[str]:
    """Return the settings of a run without the settings that stand for Python objects."""
    places = [
        word.partition("._target_=")[0] for word in words if word.endswith(f"._target_={OBJECT_TARGET}")
    ]
    groups = {re.split(r"[+.]", place)[1] for place in places}
    hidden = tuple(f"{place}." for place in places)
    return [
        word for word in words if not word.startswith(hidden) and word not in {f"{g}=custom" for g in groups}
    ]


def format_call(words: Sequence[str], objects: Mapping[str, str]) -> str:
    """Return the shell command with these settings, or the call of `train` in Python if the run has Python objects."""
    if not objects:
        return shlex.join([COMMAND, *words])
    names = dict.fromkeys(name.partition(".")[0] for name in objects)
    arguments = [
        *(json.dumps(word, ensure_ascii=False) for word in words),
        *(f"{name}={name}" for name in names),
    ]
    return f"{COMMAND}.train({', '.join(arguments)})"


def doubled_limit(summary: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    """Return the setting that doubles the limit which ended the run (`trainer.max_epochs=40`); "" if no limit ended
    it.
    """
    reached = {"max_epochs": summary.get("epoch", 0), "max_steps": summary.get("step", 0)}
    for name, value in reached.items():
        limit = trainer.get(name)
        if isinstance(limit, int) and 0 < limit <= value:
            return f"trainer.{name}={2 * limit}"
    return ""


def compute_line(summary: Mapping[str, Any]) -> str:
    """Return `330 TFLOP/s, MFU 33.4 % (of 989 TFLOP/s, by the data sheet)`."""
    rate, sheet = (
        format_flop_rate(summary["flops_per_second"]),
        format_flop_rate(summary["data_sheet_flops_per_second"]),
    )
    return f"{rate}, MFU {100 * summary['mfu']:.1f} % (of {sheet}, by the data sheet)"


def format_flop_rate(rate: float) -> str:
    """Return a rate in FLOP per second as text (`35 GFLOP/s`)."""
    number = format_quantity(rate)
    digits = number.rstrip("kMGT")
    return f"{digits} {number[len(digits) :]}FLOP/s"


def bottleneck_line(summary: Mapping[str, Any]) -> str:
    """Return `the model: it can take 85.1k samples/s, loading could deliver 1.41M`, or the same for loading."""
    facts = summary["throughput_limits"]
    load, train = (format_quantity(facts[f"{side}_per_second"]) for side in ("load", "train"))
    # a run also measures useful tokens beside the items of a task that counts samples or pixels
    name = next((name for name in reversed(SPEEDS) if summary.get(name) is not None), "")
    unit = SPEEDS.get(name, "items/s")
    if facts["limit"] == "load":
        return f"loading: it delivers {load} {unit}, the model could take {train}"
    return f"the model: it can take {train} {unit}, loading could deliver {load}"


def phases_line(seconds: Mapping[str, float]) -> str:
    """Return `time: forward 40 %, backward 30 %, data 12 %`: the largest phases without start-up; "" without
    seconds.
    """
    loop = {name: value for name, value in seconds.items() if name != "start-up"}
    total = sum(loop.values())
    most = sorted(loop, key=lambda name: -loop[name])[:5]
    return "time: " + ", ".join(f"{name} {100 * loop[name] / total:.0f} %" for name in most) if total else ""


def devices_line(row: Mapping[str, float]) -> str:
    """Return `devices: CPU 180 %, RAM 1.2 GiB, GPU 0 87 % 24.1 GiB 61 C 300 W`; "" for an empty row."""
    if not row:
        return ""
    words = [f"CPU {row['cpu_percent']:.0f} %"] if "cpu_percent" in row else []
    words += [f"RAM {row['memory_bytes'] / 2**30:.1f} GiB"] if "memory_bytes" in row else []
    number = 0
    while any(name.startswith(f"gpu{number}_") for name in row):
        units = {"percent": "%", "celsius": "C", "watts": "W"}
        readings = [
            f"{row[f'gpu{number}_{n}']:.0f} {u}" for n, u in units.items() if f"gpu{number}_{n}" in row
        ]
        if f"gpu{number}_memory_bytes" in row:
            readings.insert(1, f"{row[f'gpu{number}_memory_bytes'] / 2**30:.1f} GiB")
        words.append(f"GPU {number} " + " ".join(readings))
        number += 1
    return "devices: " + ", ".join(words)
