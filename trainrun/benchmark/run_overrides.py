"""The arguments of `autotune` and `diagnose`: overrides of a run, the folder of the results, and a progress line."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from trainrun.benchmark.worker_messages import RunInfo
from trainrun.config.compose import compose_run, prepare_command_line
from trainrun.config.schema import RunConfig
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import resolve_folder, write_json
from trainrun.output import format_duration, mask_arguments, redraw_line, report_result, say
from trainrun.runtime.machine import describe_machine

LOADER_KEYS = ("data.engine", "data.num_workers", "data.num_threads")


def parse_command(command: str, argv: list[str]) -> tuple[list[str], Path]:
    """Return the overrides of a run, and the folder for the results. The folder is created when a result is written.

    Raises ConfigError, also if the folder contains a run.
    """
    composition = compose_run(argv)
    for note in composition.notes:
        say(f"note: {note}", file=sys.stderr)
    if (folder_text := composition.own.get("hydra.run.dir")) is not None:
        folder = resolve_folder(folder_text)
    else:
        name = f"{datetime.now():%H-%M-%S}-{command}-{composition.config.run_name or 'run'}-{secrets.token_hex(4)}"
        folder = Path("outputs").absolute() / f"{datetime.now():%Y-%m-%d}" / name
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"output_dir={folder}: already contains a run; name another folder")
    return resolve_overrides(argv), folder


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str, float], None]]:
    """Show on one line of a terminal what is measured and the seconds left. Show nothing if there is no terminal."""
    terminal = sys.stdout.isatty()
    try:
        yield (
            lambda about, left: (
                redraw_line(f"  {about} ... {format_duration(max(left, 0.0))} left") if terminal else None
            )
        )
    finally:
        if terminal:
            redraw_line()


def relative_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def write_results(folder: Path, typed: list[str], results: dict[str, object]) -> None:
    """Write the results to autotune.json."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": describe_machine(), "words_typed": mask_arguments(typed), **results}
    write_json(folder / "autotune.json", content)
    report_result(file=folder / "autotune.json", **content)


def override_key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def replace_overrides(overrides: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the overrides, where `others` replace overrides of the same key or of a value inside the same group."""
    others = list(others)
    keys = {override_key(other) for other in others}
    inside = tuple(f"{key}." for key in keys if "." not in key)
    remaining = [
        override
        for override in overrides
        if override_key(override) not in keys and not override_key(override).startswith(inside)
    ]
    return [*remaining, *others]


def resolve_overrides(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command as overrides with the names of the config, without the folder of the run."""
    words, _ = prepare_command_line(list(argv), Path.cwd())
    if words.twice:
        raise ConfigError(*words.twice)
    hydra_settings = [f"{key}={value}" for key, value in words.own.items() if key != "hydra.run.dir"]
    return [*[f"--config-dir={folder}" for folder in words.config_dirs], *hydra_settings, *words.overrides]


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """Compose the config of a run with a fixed seed and without a name. Raise ConfigError.

    The result is cached: composing takes as long as hundreds of steps, and a search repeats the same overrides.
    """
    return _compose(tuple(overrides), Path.cwd())


@lru_cache(maxsize=512)
def _compose(overrides: tuple[str, ...], working_dir: Path) -> RunConfig:
    return recompose_config(overrides)


def recompose_config(overrides: Sequence[str]) -> RunConfig:
    """Return the result of `compose_config`, but read the config files again."""
    config = compose_run(list(overrides)).config
    return replace(config, seed=0 if config.seed is None else config.seed, run_name=None)


def start_choice_overrides(config: RunConfig, info: RunInfo) -> list[str]:
    """Return the automatic choices of a started run as overrides. Two runs with them differ only in what is
    compared.
    """
    choices = [f"trainer.num_threads={info.num_threads}"] if config.trainer.num_threads == "auto" else []
    if config.precision.mode == "auto":
        choices.append(f"precision.mode={info.precision}")
    readers_by_rule = config.data.num_workers == config.data.num_threads == "auto"
    if info.engine and readers_by_rule:
        choices += loader_overrides(config, info.engine, info.number)
    return choices


def loader_overrides(config: RunConfig, engine: str, number: int) -> list[str]:
    """Return the overrides that select one data engine. Settings of other engines get their defaults."""
    wanted = {"data.engine": engine, "data.num_workers": "auto", "data.num_threads": "auto"}
    if engine != "resident":
        wanted[f"data.num_{engine}"] = str(number)
    now = {key: str(getattr(config.data, key.partition(".")[2])) for key in LOADER_KEYS}
    return [f"{key}={value}" for key, value in wanted.items() if now[key] != value]
