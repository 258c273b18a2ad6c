"""Run a race: for each seed every racer runs once, one after the other, and the order alternates between seeds."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from trainrun.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from trainrun.folder.run_folder import build_folder_error, read_json, write_json
from trainrun.output import format_number, mask_arguments, say
from trainrun.race.racer_process import JUDGED, REQUEST
from trainrun.race.racers import Racer, validation_reads
from trainrun.race.standings import RaceResults, RaceRun, late_limit
from trainrun.runtime.python_module import module_command
from trainrun.sweep.forked_job import exit_with_sweep
from trainrun.sweep.job_queue import StopRelay
from trainrun.sweep.jobs import format_file_name
from trainrun.sweep.results import OUTPUT, read_result

RACE_FILE: Final = "race.json"
PILOT: Final = "pilot"
PILOT_SEED: Final = 1000  # of the run that fixes the target: no seed of the race
TARGET_AT: Final = 0.8  # of the pilot's training; its value there, 1 % worse, is the target
EASIER: Final = 0.01

RunCommand = Callable[[Path], list[str]]


@dataclass(frozen=True)
class RaceGoal:
    """The target of a race. metric: such as `val/acc`. mode: min or max. value: None until the pilot run has set
    it.
    """

    metric: str
    mode: str
    value: float | None = None

    @property
    def sign(self) -> int:
        return 1 if self.mode == "max" else -1

    def is_reached(self, value: float) -> bool:
        return self.value is not None and self.sign * value >= self.sign * self.value

    def __str__(self) -> str:
        sign = ">=" if self.mode == "max" else "<="
        return self.metric if self.value is None else f"{self.metric} {sign} {format_number(self.value)}"


@dataclass
class Race:
    """A race and its results. every: samples between two evaluations; None until the first run has chosen it.

    runs: the finished runs, by racer and seed. others: racers of earlier calls with their results.
    """

    folder: Path
    racers: list[Racer]
    goal: RaceGoal
    num_seeds: int
    every: int | None = None
    margin: float | None = None
    runs: dict[str, dict[int, RaceRun]] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)

    def open(self) -> None:
        """Read the results of earlier calls in the folder, or create the folder. Raise ConfigError."""
        path = self.folder / RACE_FILE
        if path.exists():
            self._take_results(path)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise build_folder_error(self.folder, error) from error

    def _take_results(self, path: Path) -> None:
        """Read the runs of racers with the same overrides and the same judge. Raise ConfigError for another race."""
        try:
            saved = read_json(path)
            goal, every = saved["goal"], saved["every"]
            typed = (self.goal.metric, self.goal.mode, self.goal.value)
            if typed[:2] != (goal["metric"], goal["mode"]) or typed[2] not in (None, goal["value"]):
                raise ConfigError(f"--out {self.folder}: holds a race to {goal['metric']}={goal['value']}")
            if self.every not in (None, every):
                raise ConfigError(
                    f"--every {self.every}: the race in {self.folder} has {every}; leave it out"
                )
            self.goal, self.every = replace(self.goal, value=goal["value"]), every
            names = {tuple(mask_arguments(racer.words)): racer.name for racer in self.racers}
            if mask_arguments(self.racers[0].words) != saved["racers"][0]["words"]:
                raise ConfigError(
                    f"--out {self.folder}: holds a race of another first racer; name another folder"
                )
            for racer in saved["racers"]:
                name = names.get(tuple(racer["words"]))
                if name is None:
                    self.others.append(racer)
                else:
                    runs = [RaceRun(**run) for run in racer["runs"]]
                    self.runs[name] = {run.seed: run for run in runs}
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"--out {self.folder}: its {path.name} cannot be read ({error}); name another"
            ) from error

    def save(self) -> None:
        racers = [
            {"name": racer.name, "about": racer.about, "words": mask_arguments(racer.words),
             "runs": [asdict(run) for run in self.runs.get(racer.name, {}).values()]}
            for racer in self.racers
        ]  # fmt: skip
        facts = {
            "goal": asdict(self.goal),
            "every": self.every,
            "margin": self.margin,
            "seeds": self.num_seeds,
        }
        write_json(self.folder / RACE_FILE, {**facts, "racers": [*racers, *self.others]})

    @cached_property
    def _reads(self) -> dict[str, Any]:
        """Return the settings with which the judge reads the validation data."""
        return validation_reads(self.racers[0])

    def results(self) -> RaceResults:
        runs = {racer.name: self.list_seed_runs(racer.name) for racer in self.racers}
        return RaceResults(runs, self.goal.mode, self.margin)

    def list_seed_runs(self, name: str) -> list[RaceRun]:
        """Return the finished runs of a racer by seed, for the seeds of this call."""
        runs = self.runs.get(name, {})
        return [runs[seed] for seed in range(self.num_seeds) if seed in runs]

    @property
    def is_done(self) -> bool:
        return all(len(self.list_seed_runs(racer.name)) == self.num_seeds for racer in self.racers)

    def run_all(self, relay: StopRelay, command: RunCommand | None = None) -> None:
        """Run all missing runs. Raise ConfigError for a mistake that a run reports before its first step."""
        command = command or racer_command
        if self.goal.value is None:
            self._fix_target(relay, command)
        for seed in range(self.num_seeds):
            turn = self.racers if seed % 2 == 0 else self.racers[::-1]
            for racer in turn:
                if seed in self.runs.get(racer.name, {}):
                    continue
                if relay.number:
                    return
                run = self._run(racer, seed, f"{format_file_name([racer.name])}-seed{seed}", relay, command)
                if relay.number and run.end is None:
                    return  # it was stopped, and is run again
                self.runs.setdefault(racer.name, {})[seed] = run
                self.save()
                self._report(racer, run)

    def _fix_target(self, relay: StopRelay, command: RunCommand) -> None:
        """Fix the target with a pilot run of the first racer, with another seed. Raise ConfigError if it fails."""
        say(f"target: fixed by a run of A with seed {PILOT_SEED}", flush=True)
        pilot = self._run(self.racers[0], PILOT_SEED, PILOT, relay, command)
        if relay.number and pilot.end is None:
            return
        if pilot.error or not pilot.curve:
            raise ConfigError(f"racer A: {pilot.error or 'reports no metric'}")
        samples = TARGET_AT * pilot.curve[-1][0]
        value = next(
            metric for at, _, metric in reversed(pilot.curve) if at <= samples or at == pilot.curve[0][0]
        )
        value -= self.goal.sign * EASIER * abs(value)
        self.goal = replace(self.goal, value=float(f"{value:.4g}"))
        say(
            f"target: {self.goal}, what it had after {TARGET_AT:.0%} of its training, less {EASIER:.0%}",
            flush=True,
        )
        self.save()

    def _run(self, racer: Racer, seed: int, name: str, relay: StopRelay, command: RunCommand) -> RaceRun:
        """Run a racer in a fresh process, and return its result. Raise ConfigError for a mistake in its settings."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        began = time.time()
        judge = {
            "metric": self.goal.metric, "mode": self.goal.mode, "every": self.every, "target": self.goal.value,
            "limits": self._limits(), "began": began, "reads": self._reads,
        }  # fmt: skip
        write_json(folder / REQUEST, {"words": racer.words, "seed": seed, "judge": judge})
        with (folder / OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                command(folder), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=lambda: exit_with_sweep(()),
            )  # fmt: skip
            relay.add(process)
            code = process.wait()
            relay.processes.remove(process)
        result = read_result(folder, code)
        if code == EXIT_USAGE:
            raise ConfigError(f"racer {racer.name}: {result.error}")
        run = self._read_run(folder, seed, began)
        if code == EXIT_DONE:
            return run
        return replace(run, arrived=None, end=None, error=result.error or "stopped")

    def _limits(self) -> dict[str, float] | None:
        """Return the seconds after which a run is late; None if no run of the first racer has arrived yet."""
        first = [run for run in self.list_seed_runs(self.racers[0].name) if run.arrived is not None]
        if not first:
            return None
        return {"with_start": late_limit([first], True), "training": late_limit([first], False)}

    def _read_run(self, folder: Path, seed: int, began: float) -> RaceRun:
        rows = read_judge_rows(folder / JUDGED)
        if not rows:
            return RaceRun(seed, error="no step was made")
        head, looks = rows[0], [row for row in rows if "value" in row]
        was_ended = any(row.get("late") for row in rows)  # it has no end of its own
        self.every = self.every or int(head["every"])
        arrived = next((row["seconds"] for row in looks if self.goal.is_reached(row["value"])), None)
        last = looks[-1] if looks else {}
        curve = [(row["samples"], row["seconds"], row["value"]) for row in looks]
        end = None if was_ended else last.get("value")
        start, seconds = max(head["began"] - began, 0.0), last.get("seconds", 0.0)
        return RaceRun(seed, start, arrived, end, seconds, last.get("peak_bytes", 0), "", curve)

    def _report(self, racer: Racer, run: RaceRun) -> None:
        seconds = run.time(with_start=True)
        did = "did not arrive" if seconds is None else f"arrived after {seconds:.3g} s"
        if run.error:
            did = f"failed: {run.error}"
        total = self.num_seeds * len(self.racers)
        count = sum(len(self.list_seed_runs(one.name)) for one in self.racers)
        end = "" if run.end is None else f", ends with {format_number(run.end)}"
        say(f"[{count}/{total}] {racer.name}, seed {run.seed}: {did}{end}", flush=True)


def racer_command(folder: Path) -> list[str]:
    return module_command("trainrun.race.racer_process", str(folder))


def read_judge_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a judge. An incomplete last line is skipped."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def choose_race_folder() -> Path:
    return (
        Path("races").absolute()
        / f"{time.strftime('%Y-%m-%d')}"
        / f"{time.strftime('%H-%M-%S')}-{os.getpid()}"
    )


def describe_racers(racers: Sequence[Racer]) -> str:
    """Return the racers of the command line, whose names are letters."""
    return ", ".join(f"{racer.name} = {racer.about}" for racer in racers if len(racer.name) == 1)
