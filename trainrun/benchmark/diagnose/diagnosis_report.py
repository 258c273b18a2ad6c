"""A diagnosis for people, for programs, and as pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from trainrun.benchmark.diagnose.diagnosis import Diagnosis, WhatIf
from trainrun.benchmark.diagnose.verdict import verdict
from trainrun.formatting import duration, quantity
from trainrun.output import masked_words
from trainrun.plots.bars import draw_what_ifs
from trainrun.runs.run_folder import write_json, write_text

TITLES = {"dispatch": "calls of a small batch", "threads": "other threads"}


def lines_of(found: Diagnosis) -> list[str]:
    info, conclusion = found.info, verdict(found)
    ranks = f", {info.world_size} ranks" if info.world_size > 1 else ""
    lines = [
        f"measured  {quantity(found.speed)} {info.unit}/s ({info.device}, threads: {info.num_threads}{ranks}), "
        f"torch {torch.__version__}; a step with its validation and checkpoints {short_time(found.step_seconds)}",
        f"loading   {quantity(found.load_speed)} {info.unit}/s with nobody to train",
    ]
    lines += ["", f"{'if this were free':<22} {'faster by':>10}   interval         measured with"]
    lines += [row(each) for each in sorted(found.what_ifs, key=lambda each: -each.gain.value)]
    if (profiled := found.profiled) is not None:
        step, share = profiled.step_seconds, profiled.idle
        idle = "" if share is None else f"; the GPU runs nothing in {100 * share:.0f} % of the time"
        lines += [
            "",
            f"under torch's profiler a step takes {short_time(step)}{idle}; operations by their own time:",
        ]
        lines += [
            f"{one.name[:46]:<46} {one.calls:>7.4g} calls {short_time(one.seconds):>9} {one.seconds / step:>5.0%}"
            for one in profiled.operations
        ]
    remedies = [f"try: {one}" for cause in conclusion.causes for one in cause.remedies]
    return [*lines, "", conclusion.text, *remedies]


def row(each: WhatIf) -> str:
    gain, low, high = (100 * (value - 1) for value in each.gain[:3])
    interval = f"{low:+.0f} to {high:+.0f} %" if each.sure else "one turn"
    interval = "computed" if each.computed else interval
    return f"{TITLES.get(each.name, each.name):<22} {gain:>+8.0f} %   {interval:<16} {each.about}"


def short_time(seconds: float) -> str:
    """0.71 ms, 12 ms, 1.3 s."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.95 else duration(seconds)


def as_json(found: Diagnosis, overrides: list[str]) -> dict[str, Any]:
    conclusion, profiled = verdict(found), found.profiled
    causes = [
        {"name": each.what_if.name, "text": each.text, "try": each.remedies} for each in conclusion.causes
    ]
    return {
        "words": masked_words(overrides),
        "verdict": {"first": conclusion.first, "text": conclusion.text, "causes": causes},
        "unit": found.info.unit,
        "items_per_second": found.speed,
        "step_seconds": found.step_seconds,
        "load_items_per_second": found.load_speed,
        "load_cores": found.load_cores,
        "what_ifs": [
            {
                "name": each.name,
                "title": TITLES.get(each.name, each.name),
                "about": each.about,
                "ratio": each.gain.value,
                "low": each.gain.low if each.sure else None,  # a single turn says nothing of them
                "high": each.gain.high if each.sure else None,
                "pairs": each.gain.pairs,
            }
            for each in found.what_ifs
        ],
        "untried": list(found.untried),
        "profile": profiled
        and {
            "step_seconds": profiled.step_seconds,
            "idle": profiled.idle,
            "operations": [operation._asdict() for operation in profiled.operations],
        },
        "run": dataclasses.asdict(found.info),
        "torch": torch.__version__,
    }


def write_report(found: Diagnosis, overrides: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = as_json(found, overrides)
    write_json(folder / "diagnosis.json", data)
    write_text(folder / "diagnosis.txt", "\n".join(lines_of(found)) + "\n")
    if found.profiled is not None:
        (folder / "trace.json.gz").write_bytes(found.profiled.trace)
    draw_what_ifs(data, folder / "whatif.png")
