"""One run, from config to artifacts: the folder, the ranks, the training, the end of it."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainrun.config.compose import Composition, load_config, plain_config, write_config
from trainrun.config.saved_values import public
from trainrun.config.schema import RunConfig, plain
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.formatting import counted
from trainrun.masking import masked_word
from trainrun.output import say
from trainrun.parallel.devices import num_devices
from trainrun.parallel.external import external_ranks
from trainrun.runs.environment import describe
from trainrun.runs.lock import only_writer
from trainrun.runs.repair import repair
from trainrun.runs.resume import (
    check_ours,
    check_reachable,
    check_same_network,
    merge_config,
    restore_config,
    trusted_config,
)
from trainrun.runs.run_folder import (
    SEED,
    SEED_DRAWN,
    RunDir,
    cannot_write,
    named_folder,
    was_saved,
    write_identity,
    write_json,
    write_text,
)
from trainrun.runs.status import deadline, read_status, run_status
from trainrun.runs.trusted_code import add_links, add_run, check_found, foreign_nodes
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
        check_ours(run)
        check_reachable(run)
        repair(run)
        again = run.config.exists() and not forget_failure(run)
        if again:
            config = merge_config(run, config)
            if not run.overrides.exists():  # damaged, and set aside
                write_words(run, words)
        else:
            config = config if config.seed is not None else replace(config, seed=secrets.randbelow(2**32))
            new_run(replace(composition, config=config), words, run, composition.config.seed is None)
        yield run, config, again


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
        add_links(run)
        write_config(run, config)
        write_words(run, words)
        write_json(run.environment, describe(Path.cwd()))
    except OSError as error:
        raise cannot_write(run.root, error) from error
    return run


def write_words(run: RunDir, words: list[str]) -> None:
    """The words of the command line, one a line."""
    write_text(run.overrides, "".join(f"{masked_word(word)}\n" for word in words))


def forget_failure(run: RunDir) -> bool:
    """Whether the run here failed or was stopped before it saved anything; what it wrote is taken away, then."""
    state = read_status(run).get("state") if run.status.exists() else "stopped"  # before it could say so
    if state not in ("failed", "stopped") or was_saved(run):
        return False
    for path in (
        run.metrics,
        run.log,
        run.status,
        run.config_before,
        run.config,
    ):  # the last: until then it is all forgotten again
        path.unlink(missing_ok=True)
    return True


def _folder_of(composition: Composition) -> Path:
    own = composition.own.get("hydra.run.dir")
    if own:
        return named_folder(own)
    now = datetime.now()
    name = f"{now:%H-%M-%S}-{composition.config.run_name}-{secrets.token_hex(2)}"
    return Path("outputs").absolute() / f"{now:%Y-%m-%d}" / name


def start(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """`execute`, unless the run has come to its end."""
    if order.resume and (told := finished(run, config)):
        return stay_finished(told)
    return execute(run, config, order)


def execute(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """Trains in this process or in ranks of its own, and returns the exit code. Raises TrainrunError."""
    write_config(run, config)
    if any(foreign_nodes(plain(public(config)[0]))):
        add_run(run, plain_config(run.config))
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
    config = trusted_config(run, overrides, trust)
    check_reachable(run)
    repair(run)
    check_found(run, plain(config))
    check_same_network(run, config)
    if config.seed is None:
        raise ConfigError("seed=null: a run that goes on has a seed; leave this word out")
    restore_config(run)
    add_links(run)  # those that are trusted from now on
    if told := finished(run, config):
        return stay_finished(told)
    write_text(run.config_before, run.config.read_text(encoding="utf-8"), durable=True)
    try:
        return execute(run, config, LaunchSpec(resume=True, paths=paths))
    finally:
        restore_config(run)


def stay_finished(told: str) -> int:
    """The exit code of a run that has nothing more to do; ranks that somebody else started are notified."""
    say(told)
    if external_ranks():
        from trainrun.runs.torchrun import dismiss

        dismiss()
    return EXIT_DONE


def finished(run: RunDir, config: RunConfig) -> str:
    """What to say of a run that has come to its end and, with this config, would end there again; else nothing."""
    status = read_status(run)
    if status.get("state") != "done":
        return ""
    before = load_config(run.config, [])
    limits = {name: getattr(config.trainer, name) for name in ("max_epochs", "max_steps")}
    same = replace(before, trainer=replace(before.trainer, **limits)) == config
    reached = [
        limit is not None and status.get(name, 0) >= limit
        for name, limit in (("epoch", limits["max_epochs"]), ("step", limits["max_steps"]))
    ]
    if not same or (before != config and not any(reached)):
        return ""
    return (
        f"{run.root}: finished already ({status.get('reason')}); more epochs or steps: trainrun resume "
        f"{shlex.quote(str(run.root))} "
        "trainer.max_epochs=... (or trainer.max_steps=...); its plots are drawn again by trainrun report"
    )
