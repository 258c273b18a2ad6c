"""The result of a diagnosis as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from trainrun.benchmark.budget import Budget
from trainrun.benchmark.diagnose.diagnosis import Diagnosis, WhatIf, diagnose
from trainrun.benchmark.diagnose.profile import STEPS
from trainrun.benchmark.diagnose.verdict import reach_verdict
from trainrun.benchmark.remedies import Remedy
from trainrun.benchmark.run_overrides import progress_line, relative_path
from trainrun.errors import EXIT_DONE
from trainrun.folder.run_folder import write_json
from trainrun.output import format_duration, format_quantity, mask_arguments, report_result, say

TITLES = {"dispatch": "fixed costs of a step", "threads": "other threads"}


def report_diagnosis(overrides: list[str], seconds: float, trace: bool, folder: Path) -> int:
    """Diagnose a run with these settings, print the result and write it to a file. Return the exit code."""
    budget = Budget(seconds)
    with progress_line() as progress:
        diagnosis = diagnose(overrides, budget, progress, trace)
    say("\n".join(diagnosis_lines(diagnosis)))
    write_diagnosis(diagnosis, overrides, folder)
    report_result(file=folder / "diagnosis.json", **convert_diagnosis_to_json(diagnosis, overrides))
    say(f"in {budget.elapsed_seconds:.0f} s; details: {relative_path(folder / 'diagnosis.json')}")
    return EXIT_DONE


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    info, conclusion = diagnosis.info, reach_verdict(diagnosis)
    ranks = f", {info.world_size} ranks" if info.world_size > 1 else ""
    lines = [
        f"measured  {format_quantity(diagnosis.speed)} {info.unit}/s ({info.device}, threads: "
        f"{info.num_threads}{ranks}), torch {torch.__version__}; a step takes "
        f"{format_step_seconds(diagnosis.step_seconds)}, with its share of validation and checkpoints",
        f"loading   {format_quantity(diagnosis.load_speed)} {info.unit}/s alone, without training",
    ]
    lines += ["", f"{'if this were free':<22} {'faster by':>10}   {'95 % interval':<24} measured with"]
    lines += [
        format_cause_row(what_if)
        for what_if in sorted(diagnosis.what_ifs, key=lambda what_if: -what_if.gain.value)
    ]
    if diagnosis.profiled is not None:
        lines += ["", f"{STEPS} steps under torch's profiler:", diagnosis.profiled.table]
    remedies = [describe_remedy(remedy) for cause in conclusion.causes for remedy in cause.remedies]
    return [*lines, "", conclusion.text, *remedies]


def describe_remedy(remedy: Remedy) -> str:
    """Return `try: data.padding=bucket (changes the order of the samples)`."""
    notes = f" ({'; '.join(remedy.notes)})" if remedy.notes else ""
    return f"try: {remedy}{notes}"


def format_cause_row(what_if: WhatIf) -> str:
    gain = format_percent_faster(what_if.gain.value)
    return f"{TITLES.get(what_if.name, what_if.name):<22} {gain:>8} %   {format_gain(what_if):<24} {what_if.about}"


def format_gain(what_if: WhatIf) -> str:
    """Return `+38 to +49 %` (Student's 95 % interval over turns), or the measured turns if they are too few."""
    gain = what_if.gain
    if what_if.is_computed:
        return "computed"
    if gain.pairs < 2:
        return "one turn"
    if not what_if.is_reliable:
        return f"turns: {', '.join(map(format_percent_faster, sorted(gain.each)))} %"
    bounds = f"{format_percent_faster(gain.low)} to {format_percent_faster(gain.high)} %"
    return f"{bounds}, 1 process" if what_if.is_between_processes else bounds


def format_percent_faster(ratio: float) -> str:
    """Format a speed ratio as a gain in percent: 1.38 becomes `+38`."""
    return f"{100 * (ratio - 1):+.0f}"


def format_step_seconds(seconds: float) -> str:
    """Format seconds as `0.71 ms`, `12 ms` or `1.3 s`."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.95 else format_duration(seconds)


def convert_diagnosis_to_json(diagnosis: Diagnosis, overrides: list[str]) -> dict[str, Any]:
    conclusion = reach_verdict(diagnosis)
    causes = [
        {"name": each.what_if.name, "text": each.text, "try": list(map(str, each.remedies))}
        for each in conclusion.causes
    ]
    return {
        "words": mask_arguments(overrides),
        "verdict": {"first": conclusion.first, "text": conclusion.text, "causes": causes},
        "unit": diagnosis.info.unit,
        "items_per_second": diagnosis.speed,
        "step_seconds": diagnosis.step_seconds,
        "load_items_per_second": diagnosis.load_speed,
        "load_cores": diagnosis.load_cores,
        "what_ifs": [
            {
                "name": each.name,
                "title": TITLES.get(each.name, each.name),
                "about": each.about,
                "ratio": each.gain.value,
                "low": each.gain.low if each.is_reliable else None,  # too few turns say nothing of them
                "high": each.gain.high if each.is_reliable else None,
                "pairs": each.gain.pairs,
                "each": list(each.gain.each),
            }
            for each in diagnosis.what_ifs
        ],
        "untried": list(diagnosis.untried),
        "run": dataclasses.asdict(diagnosis.info),
        "torch": torch.__version__,
    }


def write_diagnosis(diagnosis: Diagnosis, overrides: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "diagnosis.json", convert_diagnosis_to_json(diagnosis, overrides))
    if diagnosis.profiled is not None:
        (folder / "trace.json.gz").write_bytes(diagnosis.profiled.trace)
