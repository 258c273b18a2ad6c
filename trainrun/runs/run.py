"""One run, from config to artifacts: the folder, the ranks, the training, the end of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainrun.config.compose import Composition, write_config
from trainrun.config.saved_values import foreign_parts, public
from trainrun.config.schema import RunConfig, plain
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.formatting import counted
from trainrun.output import masked_word, say
from trainrun.parallel.devices import external_ranks, num_devices
from trainrun.runs.environment import describe, uncommitted
from trainrun.runs.lock import only_writer
from trainrun.runs.run_folder import (
    SEED,
    SEED_DRAWN,
    RunDir,
    cannot_write,
    named_folder,
    write_identity,
    write_json,
    write_text,
)
from trainrun.runs.status import deadline, run_status
from trainrun.runtime.signals import StopFlag, catch_signals, patience
from trainrun.timing.phases import command_start


@dataclass(frozen=True)
class LaunchSpec:
    """What the ranks are told besides the config: `job.json` in the run folder.

    paths: where the user's modules are found. resume: go on from the newest checkpoint. began: where the
    run's time begins (`time.perf_counter()`), not told on; None is the start of this process.
    """

    resume: bool
    paths: list[str]
    began: float | None = None


@contextmanager
def begun(composition: Composition, words: list[str]) -> Iterator[tuple[RunDir, RunConfig, bool]]:
    """`new_run`, or the run of the same words that is in the folder already; nobody else trains there inside.

    The config has a seed. The last says whether the run is there: then it goes on. Other words are refused, nothing is
    ever written over.
    """
    run, config = RunDir(_folder_of(composition)), composition.config
    run.create()
    with only_writer(run):
        found = None
        if any(path != run.lock for path in run.root.iterdir()):
            from trainrun.runs.resume import found_config

            found = found_config(run, config)
            if found is not None and not run.overrides.exists():  # damaged, and set aside
                write_words(run, words)
        if found is None:
            config = config if config.seed is not None else replace(config, seed=secrets.randbelow(2**32))
            new_run(replace(composition, config=config), words, run, composition.config.seed is None)
        yield run, found or config, found is not None


def new_run(
    composition: Composition, words: list[str], run: RunDir | None = None, seed_drawn: bool = False
) -> RunDir:
    """Make the folder of a new run and write down what was asked for. seed_drawn: nobody named the config's seed."""
    run = run or RunDir(_folder_of(composition))
    assert not run.config.exists()
    run.create()
    config = composition.config
    assert config.seed is not None
    identity: dict[str, Any] = {
        "run_id": secrets.token_hex(8), "created": time.time(), SEED_DRAWN: seed_drawn, SEED: config.seed,
    }  # fmt: skip
    try:
        # the first: a folder without it is not one that a run made
        write_identity(run, identity)
        write_config(run, config)
        write_words(run, words)
        write_json(run.environment, found := describe(Path.cwd()))
        if (found["git"] or {}).get("changed") and (diff := uncommitted(Path.cwd())):
            write_text(run.changes, diff)
    except OSError as error:
        raise cannot_write(run.root, error) from error
    return run


def write_words(run: RunDir, words: list[str]) -> None:
    """The words of the command line, one a line."""
    write_text(run.overrides, "".join(f"{masked_word(word)}\n" for word in words))


def _folder_of(composition: Composition) -> Path:
    own = composition.own.get("hydra.run.dir")
    if own:
        return named_folder(own)
    now = datetime.now()
    name = f"{now:%H-%M-%S}-{composition.config.run_name}-{secrets.token_hex(4)}"
    return Path("outputs").absolute() / f"{now:%Y-%m-%d}" / name


def start(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """`execute`, unless the run has come to its end."""
    if order.resume:
        from trainrun.runs.resume import finished, stay_finished

        if told := finished(run, config):
            return stay_finished(told)
    return execute(run, config, order)


def execute(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """Trains in this process or in ranks of its own, and returns the exit code. Raises TrainrunError."""
    if order.resume:  # else `new_run` has written it
        write_config(run, config)
    if any(foreign_parts(plain(public(config)[0]))) or any(path.is_symlink() for path in run.root.rglob("*")):
        from trainrun.config.saved_config import plain_config
        from trainrun.runs.trusted_code import add_to_list

        add_to_list(run, plain_config(run.config))
    if external_ranks():
        from trainrun.runs.torchrun import lead_run

        return lead_run(run, config, order.resume, order.paths)
    parallel = config.parallel
    count, reason = num_devices(parallel.mode, parallel.accelerator, parallel.devices)
    write_json(run.job, {"resume": order.resume, "paths": order.paths})
    if (
        parallel.mode == "single"
    ):  # imported here: a library may swallow the interrupt of a run that has begun
        from trainrun.runs.rank import train_here
    began = command_start() if order.began is None else order.began
    flag = StopFlag(training=False)
    try:
        with (
            catch_signals(flag),
            run_status(run, config, order.resume, flag),
            deadline(run, config)
            if parallel.mode == "single"
            else nullcontext(),  # `launch` has its own clock
        ):
            if parallel.mode == "single":
                code = train_here(run, config, order.resume, flag, began)
                if code == EXIT_DONE and flag.num_interrupts:  # it came after the last step
                    raise KeyboardInterrupt
                return code
            say(f"parallel: {counted(count, 'rank')} ({reason})", flush=True)
            from trainrun.parallel.launch import launch, module_command

            return launch(
                lambda attempt: module_command("trainrun.runs.rank", str(run.root), str(attempt)),
                count, run, grace_seconds=config.trainer.stop_grace_seconds,
                alone_seconds=patience(config.trainer.watchdog_seconds), max_restarts=parallel.max_restarts,
            )  # fmt: skip
    finally:
        run.job.unlink(missing_ok=True)


def open_run(folder: str | Path, key: str = "RUN_DIR") -> RunDir:
    """A run folder that exists. Raises ConfigError."""
    run = RunDir(named_folder(str(folder)))
    if not run.config.is_file():
        raise ConfigError(f"{key}={folder}: no run is there (no config.yaml)")
    return run


def resume_run(run: RunDir, overrides: list[str], paths: list[str], trust: bool = False) -> int:
    """Goes on in the same folder, from the newest good checkpoint. Words that it cannot go on with are forgotten."""
    with only_writer(run):
        return _go_on(run, overrides, paths, trust)


def _go_on(run: RunDir, overrides: list[str], paths: list[str], trust: bool) -> int:
    from trainrun.config.saved_config import plain_config
    from trainrun.runs import resume
    from trainrun.runs.trusted_code import add_to_list, check_found

    config = resume.trusted_config(run, overrides, trust)
    resume.check_reachable(run)
    resume.repair(run)
    check_found(run, plain(config))
    resume.check_same_network(run, config)
    if config.seed is None:
        raise ConfigError("seed=null: a run that goes on has a seed; leave this word out")
    resume.restore_config(run)
    if told := resume.finished(run, config):
        if trust:
            add_to_list(run, plain_config(run.config))
        return resume.stay_finished(told)
    write_text(run.config_before, run.config.read_text(encoding="utf-8"), durable=True)
    try:
        return execute(run, config, LaunchSpec(resume=True, paths=paths))
    finally:
        resume.restore_config(run)
