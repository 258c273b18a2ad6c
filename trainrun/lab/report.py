"""A diagnosis for people, for programs, and as pictures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from trainrun.data.stages import Stages
from trainrun.lab.findings import Diagnosis, WhatIf
from trainrun.lab.orders import Profiled
from trainrun.lab.verdict import BUSY_MACHINE, CAUSES, verdict
from trainrun.ledger import ACCOUNTS, OPTIMIZER
from trainrun.masking import masked_words
from trainrun.monitor.readable import duration, quantity
from trainrun.rundir import write_json, write_text

ORDER = tuple(CAUSES)
SLOWED = 1.5  # of the same training, from the first round to the last: worth a line
ROOFS = {
    "data": "loading alone",
    "copy": "copying to the device",
    "compute": "computing",
    "memory": "memory",
    "dispatch": "calls",
}


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
            "a step    "
            + ", ".join(f"{name} {short_time(value)}" for name, value in found.phases.items())
            + f"; {100 * found.growing:.0f} % of it grows with the batch"
        )
    if found.stages is not None:
        lines.append(loading_line(found.stages))
    roofs = [roof_line(found, name) for name in ROOFS if name in found.limits.reasons]
    lines += [f"{'' if number else 'roofs':<10}{roof}" for number, roof in enumerate(roofs)]
    if found.others >= BUSY_MACHINE:
        lines.append(
            f"others    kept {found.others:.1f} cores busy meanwhile: less is sure, and threads may look too many"
        )
    if found.slowed.factor >= SLOWED:
        lines.append(slowed_line(found))
    lines += ["", f"{'if this were free':<22} {'faster by':>10}   interval         measured with"]
    lines += [row(each) for each in sorted(found.what_ifs, key=lambda each: -each.gain.value)]
    if found.profiled is not None:
        lines += ["", *profile_lines(found.profiled)]
    lines += ["", told.text]
    lines += [f"try: {words}" for cause in told.causes for words in cause.words]
    return lines


def slowed_line(found: Diagnosis) -> str:
    """Averages of gradients that stay 0 become numbers that a CPU computes with many times as slowly."""
    factor, account, flushed = found.slowed
    line = f"slower    in the end a step took {factor:.1f}x as long as in the beginning, because of {account}"
    if account == ACCOUNTS[OPTIMIZER] and found.ready.device == "cpu" and not flushed:
        line += ": numbers next to 0 may do that, which trainer.flush_denormal=true counts as 0"
    return line


def row(each: WhatIf) -> str:
    gain, low, high = (100 * (value - 1) for value in each.gain[:3])
    interval = f"{low:+.0f} to {high:+.0f} %" if each.sure else "one turn"
    interval = "computed" if each.computed else interval
    return f"{title_of(each):<22} {gain:>+8.0f} %   {interval:<16} {each.about}"


def title_of(each: WhatIf) -> str:
    return {"dispatch": "calls of a small batch", "threads": "other threads"}.get(each.name, each.name)


def roof_line(found: Diagnosis, name: str) -> str:
    value = found.limits.items_per_second.get(name)
    reason = found.limits.reasons[name]
    return f"{ROOFS[name]} {reason}" if value is None else f"{ROOFS[name]} {quantity(value)}/s ({reason})"


def loading_line(stages: Stages) -> str:
    """Describe how the time of reading one batch in the main process divides."""
    samples = f"samples {short_time(stages.samples)} ({short_time(stages.computing)} computed, "
    samples += f"{short_time(stages.again)} the second time)"
    transform = f", data.transform {short_time(stages.transform)}" if stages.transform else ""
    return f"loading   a batch: {samples}{transform}, the rest {short_time(stages.rest)}"


def profile_lines(found: Profiled) -> list[str]:
    idle = "" if found.idle is None else f"; the GPU runs nothing in {100 * found.idle:.0f} % of the time"
    lines = [
        f"under torch's profiler a step takes {short_time(found.step_seconds)}{idle}; operations by their own time:"
    ]
    for one in found.operations:
        share = 100 * one.seconds / found.step_seconds
        lines.append(
            f"{one.name[:46]:<46} {one.dtype:<9} {one.calls:>7.4g} calls {short_time(one.seconds):>9} {share:>4.0f} %"
        )
    return lines


def short_time(seconds: float) -> str:
    """0.71 ms, 12 ms, 1.3 s."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.95 else duration(seconds)


def as_json(found: Diagnosis, words: list[str]) -> dict[str, Any]:
    told = verdict(found)
    return {
        "words": masked_words(words),
        "verdict": {
            "first": told.first,
            "text": told.text,
            "causes": [
                {"name": each.what_if.name, "text": each.text, "try": each.words} for each in told.causes
            ],
        },
        "unit": found.ready.unit,
        "items_per_second": found.speed,
        "other_cores": found.others,
        "slowed": found.slowed._asdict(),
        "step_seconds": found.step_seconds,
        "phases": found.phases,
        "growing_share": found.growing,
        "load_cores": found.load_busy,
        "loading": None if found.stages is None else found.stages._asdict(),
        "what_ifs": [
            {"name": each.name, "title": title_of(each), "about": each.about, **as_fields(each)}
            for each in found.what_ifs
        ],
        "roofs": found.limits.items_per_second,
        "roof_reasons": found.limits.reasons,
        "padding": found.limits.padding,
        "untried": list(found.untried),
        "profile": None if found.profiled is None else profile_fields(found.profiled),
        "run": dataclasses.asdict(found.ready),
        "torch": torch.__version__,
    }


def profile_fields(found: Profiled) -> dict[str, Any]:
    operations = [operation._asdict() for operation in found.operations]
    return {"step_seconds": found.step_seconds, "idle": found.idle, "operations": operations}


def as_fields(each: WhatIf) -> dict[str, float | None]:
    """low, high: null where a single turn says nothing of them."""
    gain = each.gain
    low, high = (gain.low, gain.high) if each.sure else (None, None)
    return {"ratio": gain.value, "low": low, "high": high, "pairs": gain.pairs}


def write_report(found: Diagnosis, words: list[str], folder: Path) -> None:
    from trainrun.plots.diagnosis import draw_roofs, draw_what_ifs

    folder.mkdir(parents=True, exist_ok=True)
    data = as_json(found, words)
    write_json(folder / "diagnosis.json", json.loads(json.dumps(data)))
    write_text(folder / "diagnosis.txt", "\n".join(lines_of(found)) + "\n")
    if found.profiled is not None:
        (folder / "trace.json.gz").write_bytes(found.profiled.trace)
    draw_what_ifs(data, folder / "whatif.png")
    draw_roofs(data, folder / "roofs.png")
