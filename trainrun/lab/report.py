"""A diagnosis for people, for programs, and as pictures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from trainrun.lab.diagnosis import Diagnosis, WhatIf
from trainrun.lab.statistics import Ratio
from trainrun.lab.verdict import CAUSES, verdict
from trainrun.monitor.readable import duration, quantity
from trainrun.rundir import write_json, write_text

ORDER = tuple(CAUSES)
ROOFS = {"data": "loading alone", "compute": "computing", "memory": "memory", "dispatch": "calls"}


def lines_of(found: Diagnosis) -> list[str]:
    ready, told = found.ready, verdict(found)
    threads = f"{ready.num_threads} thread{'' if ready.num_threads == 1 else 's'}"
    ranks = f", {ready.world_size} ranks" if ready.world_size > 1 else ""
    lines = [
        f"measured  {quantity(found.speed)} {ready.unit}/s in the loop ({ready.device}, {threads}{ranks}, torch "
        f"{torch.__version__}); a step with its validation and checkpoints {short_time(found.step_seconds)}",
    ]
    if found.phases:
        lines.append(
            "a step    " + ", ".join(f"{name} {short_time(value)}" for name, value in found.phases.items())
        )
    roofs = [roof_line(found, name) for name in ROOFS if name in found.limits.reasons]
    lines += [f"{'' if number else 'roofs':<10}{roof}" for number, roof in enumerate(roofs)]
    lines += ["", f"{'if this were free':<20} {'faster by':>10}   interval         measured with"]
    lines += [row(each) for each in sorted(found.what_ifs, key=lambda each: -each.gain.value)]
    lines += ["", told.text]
    lines += [f"try: {words}" for cause in told.causes for words in cause.words]
    return lines


def row(each: WhatIf) -> str:
    gain, low, high = (100 * (value - 1) for value in each.gain[:3])
    interval = f"{low:+.0f} to {high:+.0f} %" if each.gain.pairs > 1 else "computed"
    name = {"dispatch": "half of all calls", "threads": "threads"}.get(each.name, each.name)
    return f"{name:<20} {gain:>+8.0f} %   {interval:<16} {each.about}"


def roof_line(found: Diagnosis, name: str) -> str:
    value = found.limits.items_per_second.get(name)
    reason = found.limits.reasons[name]
    return f"{ROOFS[name]} {reason}" if value is None else f"{ROOFS[name]} {quantity(value)}/s ({reason})"


def short_time(seconds: float) -> str:
    """0.71 ms, 12 ms, 1.3 s."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.95 else duration(seconds)


def as_json(found: Diagnosis, words: list[str]) -> dict[str, Any]:
    told = verdict(found)
    return {
        "words": words,
        "verdict": {
            "first": told.first,
            "text": told.text,
            "causes": [
                {"name": each.what_if.name, "text": each.text, "try": each.words} for each in told.causes
            ],
        },
        "unit": found.ready.unit,
        "items_per_second": found.speed,
        "step_seconds": found.step_seconds,
        "phases": found.phases,
        "load_cores": found.load_busy,
        "what_ifs": [
            {"name": each.name, "about": each.about, **as_fields(each.gain)} for each in found.what_ifs
        ],
        "roofs": found.limits.items_per_second,
        "roof_reasons": found.limits.reasons,
        "padding": found.limits.padding,
        "run": dataclasses.asdict(found.ready),
        "torch": torch.__version__,
    }


def as_fields(ratio: Ratio) -> dict[str, float]:
    return {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "pairs": ratio.pairs}


def write_report(found: Diagnosis, words: list[str], folder: Path) -> None:
    from trainrun.plots.diagnosis import draw_roofs, draw_what_ifs

    folder.mkdir(parents=True, exist_ok=True)
    data = as_json(found, words)
    write_json(folder / "diagnosis.json", json.loads(json.dumps(data)))
    write_text(folder / "diagnosis.txt", "\n".join(lines_of(found)) + "\n")
    draw_what_ifs(data, folder / "whatif.png")
    draw_roofs(data, folder / "roofs.png")
