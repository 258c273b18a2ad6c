"""A search for faster settings, or a table of techniques: run it, print the result and write it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import socket
from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from trainrun.benchmark.budget import Budget
from trainrun.benchmark.run_overrides import (
    override_key,
    progress_line,
    recompose_config,
    relative_path,
    replace_overrides,
    write_results,
)
from trainrun.benchmark.tune.techniques import Row, TechniqueTable, is_skipped_for_time, measure_table
from trainrun.benchmark.tune.tuner import NO_TIME, Trial, Tuner, Tuning
from trainrun.benchmark.worker_process import WorkerPool
from trainrun.comparison.paired import PROCESS_SPREAD, Ratio
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.folder.run_folder import write_text
from trainrun.output import format_quantity, format_table, mask_arguments, say
from trainrun.runtime.machine import describe_machine

MARK: Final = "# Written by `trainrun autotune`"  # in the presets that may be replaced
PLAIN: Final = re.compile(r"(?:[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|true|false|null)\Z")


class WrittenPreset(NamedTuple):
    """A preset file and how to use it.

    path: None if a preset cannot contain the settings. use: the overrides of a run that uses them.
    """

    path: Path | None
    use: list[str]


def preset_path(name: str, working_dir: Path) -> Path:
    """Return the path of a preset. Raise ConfigError if a file with that name was not written by `autotune`."""
    path = working_dir / "conf" / "preset" / f"{name}.yaml"
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"--name {name}: a name of a preset has only letters, digits, - and _")
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"{path}: was not written by trainrun autotune; choose another name with --name")
    return path


def host_preset_name() -> str:
    host = re.sub(r"[^\w-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")
    return f"tuned-{host or 'here'}"


def write_preset(path: Path, typed: Sequence[str], tuning: Tuning) -> WrittenPreset:
    """Write the settings that helped as a preset. typed: the overrides as the user typed them."""
    wanted = recompose_config(replace_overrides(typed, tuning.best_settings))
    use = replace_overrides(typed, [*tuning.best_settings, f"preset={path.stem}"])
    use = [override for override in use if override not in tuning.best_settings]
    before = next(
        (override.partition("=")[2] for override in typed if override_key(override) == "preset"), "none"
    ).strip('"')
    old = path.read_text(encoding="utf-8") if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, preset_text(typed, tuning, before))
    if recompose_config(use) == wanted:
        return WrittenPreset(path, use)
    if old is None:  # an experiment of the user's sets one of the keys itself, and comes after a preset
        path.unlink()
    else:
        write_text(path, old)
    return WrittenPreset(None, replace_overrides(typed, tuning.best_settings))


def preset_text(typed: Sequence[str], tuning: Tuning, before: str) -> str:
    assert tuning.claim is not None
    claim, settings = tuning.claim, " ".join(mask_arguments(typed)) or "(no settings)"
    head = [
        "# @package _global_",
        f"{MARK} on {datetime.now():%Y-%m-%d %H:%M}: {tuning.unit}/s {claim.value:.2f}x "
        f"({claim.low:.2f} to {claim.high:.2f}, 99 %, {claim.pairs} pairs of processes) of: {settings}",
        f"# Measured on {describe_machine()} with torch {metadata.version('torch')}.",
    ]
    lines = [
        f"# {trial.remedy}: {trial.ratio.value:.2f}x when found ({trial.ratio.turns()}); "
        f"the training: {trial.remedy.effect_text}"
        for trial in tuning.trials
        if trial.is_used and trial.ratio is not None
    ]
    groups: list[Any] = [f"/preset/{before}"] if before != "none" else []
    tree: dict[str, Any] = {}
    for key, _, value in (setting.lstrip("+").partition("=") for setting in tuning.best_settings):
        if "." not in key:
            groups.append({f"override /{key}": parse_value(value)})
            continue
        *path, name = key.split(".")
        node = tree
        for section in path:
            node = node.setdefault(section, {})
        node[name] = parse_value(value)
    tree = {"defaults": groups, **tree} if groups else tree
    return "\n".join([*head, *lines, yaml.safe_dump(tree, sort_keys=False)])


def parse_value(value: str) -> Any:
    """Return a setting's value as Hydra reads it: `off` is a string in Hydra, but false in YAML."""
    value = value.strip('"')
    return yaml.safe_load(value) if PLAIN.match(value) else value


TABLE_HEAD: Final = ("technique", "alone", "turns", "helps?", "memory", "training", "settings")
LONGEST_REASON: Final = 30


def convert_to_json_values(value: Any) -> Any:
    """Return dataclasses and named tuples as dictionaries, for JSON."""
    if isinstance(value, Ratio):
        bounds = (value.low, value.high) if value.has_interval else (None, None)
        names = ("value", "low", "high", "pairs", "each")
        return dict(zip(names, (value.value, *bounds, value.pairs, list(value.each)), strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: convert_to_json_values(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if hasattr(value, "_asdict"):
        return {name: convert_to_json_values(item) for name, item in value._asdict().items()}
    return [convert_to_json_values(item) for item in value] if isinstance(value, list | tuple) else value


def tuning_lines(tuning: Tuning) -> list[str]:
    """Return the lines of a report: the diagnoses, the trials in order, the gains that need the user's decision, and
    the claim.
    """
    lines = [
        f"your settings: {format_quantity(tuning.speed)} {tuning.unit}/s",
        f"diagnosis: {tuning.diagnoses[0]}",
    ]
    width = max((len(str(trial.remedy)) for trial in tuning.trials), default=0)
    for (cause, promised), trials in groupby(tuning.trials, lambda trial: (trial.cause, trial.promised)):
        most = "" if promised is None else f" (at most {promised:.2f}x)"
        lines += [f"{cause}{most}:", *(trial_line(trial, width) for trial in trials)]
    if tuning.last_diagnosis:
        lines.append(f"diagnosis of the settings that are used: {tuning.last_diagnosis}")
    offered = [trial for trial in tuning.trials if trial.is_faster and trial.reason.startswith("--allow")]
    lines += [
        f"your decision: {trial.remedy} is {speed_text(trial)} as fast, but {trial.remedy.effect_text} "
        f"(add it, or use {trial.reason})"
        for trial in offered
    ]
    return [*lines, f"result: {tuning.verdict}"]


def trial_line(trial: Trial, width: int) -> str:
    """Return `  data.cache=memory    21.08x  13.92 to 31.19 in 6 turns  used`. width: of the column of settings."""
    turns = "" if trial.ratio is None else trial.ratio.turns()
    used = "used" if trial.is_used else f"not used: {trial.reason}"
    return f"  {trial.remedy!s:<{width}}  {speed_text(trial):>7}  {turns:<26}  {used}"


def table_lines(table: TechniqueTable) -> list[str]:
    lines = [f"your settings: {format_quantity(table.speed)} {table.unit}/s"]
    lines.append(format_table(TABLE_HEAD, [technique_row(row) for row in table.rows]))
    reasons = {row.trial.cause: row.trial.reason for row in table.rows}
    lines += [f"{title}: {reason}" for title, reason in reasons.items() if cell_of(reason) != reason]
    late = sum(map(is_skipped_for_time, table.rows))
    rest = f"; not measured for lack of time: {late} (--budget)" if late else ""
    settings = " ".join(table.found)
    if not settings:
        return [*lines, f"together: nothing that leaves the training the same helps clearly{rest}"]
    if table.claim is None:
        return [*lines, f"together: not measured ({table.problem}): {settings}{rest}"]
    pairs = f"99 %, {table.claim.pairs} pairs of fresh processes"
    return [*lines, f"together: {table.claim} ({pairs}): {settings}{rest}"]


def cell_of(reason: str) -> str:
    """Return a reason as a cell of the table."""
    return reason if len(reason) <= LONGEST_REASON or reason == NO_TIME else "see below"


def technique_row(row: Row) -> list[str]:
    trial, alone = row.trial, row.speedup_alone
    note = "is on; without it: " if row.is_on and trial.remedy.overrides else ""
    settings = f"{note}{trial.remedy}"
    effect = trial.remedy.effect_text
    if alone is None:
        return [trial.cause, "-", "", cell_of(trial.reason), "", "", ""]
    helps = "not clear"  # within what two processes of the same settings may differ by
    if alone.low > 1 + PROCESS_SPREAD:
        helps = "yes"
    elif alone.high < 1 - PROCESS_SPREAD:
        helps = "NO, slower"
    memory = f"{trial.peak_bytes / 1e6:,.0f} MB" if trial.peak_bytes else ""
    return [trial.cause, f"{alone.value:.2f}x", alone.turns(), helps, memory, effect, settings]


def speed_text(trial: Trial) -> str:
    return "" if trial.ratio is None else f"{trial.ratio.value:.2f}x"


def search_settings(wish: Namespace, typed: list[str], budget: float, folder: Path) -> int:
    """Run the search that the arguments of `trainrun autotune` describe. Return the exit code."""
    preset = preset_path(wish.name or host_preset_name(), Path.cwd())
    if wish.table:
        return report_table(typed, run_table(typed, budget), budget, folder)
    return report_search(wish, typed, run_search(wish, typed, budget), budget, folder, preset)


def run_search(wish: Namespace, typed: list[str], budget: float) -> Tuning:
    """Search for the fastest settings. Nothing is written before the end, so an interrupted search leaves no trace."""
    with open_tuner(typed, budget, wish.allow) as tuner:
        return tuner.run()


def run_table(typed: list[str], budget: float) -> TechniqueTable:
    with open_tuner(typed, budget, "numeric") as tuner:
        return measure_table(tuner)


@contextlib.contextmanager
def open_tuner(typed: list[str], budget: float, allowed: str) -> Iterator[Tuner]:
    with WorkerPool() as pool, progress_line() as progress:
        yield Tuner(pool, typed, Budget(budget), progress, allowed)


def report_search(
    wish: Namespace, typed: list[str], tuning: Tuning, budget: float, folder: Path, preset: Path
) -> int:
    print_head(typed, tuning.seconds, budget)
    for line in tuning_lines(tuning):
        say(line)
    if tuning.is_claimed:
        written = write_preset(preset, typed, tuning)
        use = f"trainrun {shlex.join(written.use)}"
        if written.path is not None:
            say(f"wrote {relative_path(written.path)}; use it with: {use}")
        else:
            say(
                f"no preset is written: one of your settings, or an experiment, would override it. Use: {use}"
            )
    if wish.allow == "exact":
        say("not tried: number types and compilation of the model, which round differently (--allow numeric)")
    results = convert_to_json_values(tuning)
    results |= {
        "found": list(tuning.best_settings),
        "claimed": tuning.is_claimed,
        "verdict": tuning.verdict,
    }
    write_results(folder, typed, results)
    say(f"details: {relative_path(folder / 'autotune.json')}")
    return EXIT_DONE


def report_table(typed: list[str], table: TechniqueTable, budget: float, folder: Path) -> int:
    print_head(["--table", *typed], table.seconds, budget)
    for line in table_lines(table):
        say(line)
    to_json = convert_to_json_values
    rows = [
        to_json(row) | {"title": row.trial.cause, "alone": to_json(row.speedup_alone)} for row in table.rows
    ]
    write_results(folder, typed, to_json(table) | {"rows": rows})
    say(f"details: {relative_path(folder / 'autotune.json')}")
    return EXIT_DONE


def print_head(typed: list[str], seconds: float, budget: float) -> None:
    head = f"trainrun autotune {shlex.join(mask_arguments(typed))}".rstrip()
    say(f"{head} | {describe_machine()} | {seconds:.0f} s of {budget:.0f} s")
