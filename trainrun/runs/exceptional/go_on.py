"""A run folder that is there: opened, and gone on with."""

from __future__ import annotations

from pathlib import Path

from trainrun.config.saved_config import translated
from trainrun.errors import ConfigError
from trainrun.runs import resume
from trainrun.runs.lock import only_writer
from trainrun.runs.run import execute
from trainrun.runs.run_folder import LaunchSpec, RunDir, named_folder, typed_settings, write_text


def open_run(folder: str | Path, key: str = "RUN_DIR") -> RunDir:
    """A run folder that exists. Raises ConfigError."""
    run = RunDir(named_folder(str(folder)))
    if not run.config.is_file():
        raise ConfigError(f"{key}={folder}: no run is there (no config.yaml){way_of_sweep(run)}")
    return run


def resume_run(run: RunDir, overrides: list[str], paths: list[str], trust: bool = False) -> int:
    """Goes on in the same folder, from the newest good checkpoint. Words that it cannot go on with are forgotten."""
    with only_writer(run):
        return _go_on(run, overrides, paths, trust)


def _go_on(run: RunDir, overrides: list[str], paths: list[str], trust: bool) -> int:
    config = resume.trusted_config(run, overrides, trust)
    resume.check_reachable(run)
    resume.repair(run)
    resume.check_modules(run, config)
    resume.check_same_network(run, config)
    if config.seed is None:
        raise ConfigError("seed=null: a run that goes on has a seed; leave this word out")
    resume.restore_config(run)
    if told := resume.finished(run, config):
        return resume.stay_finished(told)
    write_text(run.config_before, run.config.read_text(encoding="utf-8"), durable=True)
    try:
        typed = typed_settings(translated(overrides).overrides)
        return execute(run, config, LaunchSpec(resume=True, paths=paths, typed=typed))
    finally:
        resume.restore_config(run)


def way_of_sweep(run: RunDir) -> str:
    """What to name in place of the folder of a sweep; empty where it is none."""
    jobs = sorted(path.parent.name for path in run.root.glob(f"*/{run.config.name}"))
    if not (jobs and (run.root / "sweep.json").is_file()):
        return ""
    return (
        f"; it is the folder of a sweep, which goes on by its own words: name one of its runs, as {jobs[0]}"
    )
