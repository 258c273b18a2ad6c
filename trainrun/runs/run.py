"""One run, from config to artifacts: the folder, the ranks, the training, the end of it."""

from __future__ import annotations

import math
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainrun.config.compose import Composition, format_config
from trainrun.config.saved_values import public
from trainrun.config.schema import RunConfig, record_reads, stop_recording
from trainrun.errors import EXIT_DONE, EXIT_USAGE, TrainrunError
from trainrun.instantiate import BUILT
from trainrun.output import counted, masked_word, say
from trainrun.parallel.devices import external_ranks
from trainrun.runs.lock import only_writer
from trainrun.runs.run_folder import (
    SEED,
    SEED_DRAWN,
    LaunchSpec,
    RunDir,
    cannot_write,
    format_json,
    named_folder,
    write_identity,
    write_json,
    write_text,
)
from trainrun.runs.seal import is_sealed, seal_folder
from trainrun.runs.status import deadline, read_status, write_status
from trainrun.runtime.signals import StopFlag, catch_signals, watchdog_limit
from trainrun.timing.phases import command_start

GIT_SECONDS = 5.0


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
        write_words(run, words)
        write_json(run.environment, found := surroundings(Path.cwd()) | {"folder": str(run.root)})
        if (found["git"] or {}).get("changed"):
            from trainrun.runs.exceptional.code_state import uncommitted

            if diff := uncommitted(Path.cwd()):
                write_text(run.changes, diff)
        write_config(run, config)
    except OSError as error:
        raise cannot_write(run.root, error) from error
    return run


def write_config(run: RunDir, config: RunConfig, seal: bool = True) -> None:
    """Write the config of a run, and its secrets apart from it. seal: as this user's own."""
    public_config, secret_values = public(config)
    files = {run.secrets: format_json(secret_values)} if secret_values else {}
    files[run.config] = format_config(public_config)
    if seal:
        try:
            seal_folder(run, files)
        except OSError as error:
            say(
                f"note: {run.root}: not sealed as yours ({error}): `trainrun resume` and other commands on it will ask "
                "for --trust; set XDG_STATE_HOME to a folder that can be written and stays",
                file=sys.stderr,
            )
    for path, text in files.items():
        write_text(path, text, durable=True)


def surroundings(working_dir: Path) -> dict[str, Any]:
    """Plain values for `environment.json`. Imports no torch: devices are named by the ranks."""
    return {
        "command": [masked_word(word) for word in sys.argv],
        "working_dir": str(working_dir),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.release()}-{platform.machine()}",  # `platform()` starts a process
        "cores": os.cpu_count(),
        "packages": distributions(),
        "git": _git(working_dir),
    }


def distributions() -> dict[str, str]:
    """All that is installed, with its version, by the names of folders: to read their files takes 50 times as long."""
    found: dict[str, str] = {}
    for place in sys.path:
        with suppress(OSError):
            for entry in os.listdir(place or "."):
                stem, _, kind = entry.rpartition(".")
                name, _, version = stem.partition("-")
                if kind in ("dist-info", "egg-info") and version:
                    found.setdefault(name.lower().replace("_", "-"), version)
    return dict(sorted(found.items()))


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and whether there are changes; None if there is no repository or no git."""
    try:
        commit = _run_git(folder, "rev-parse", "HEAD")
        changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def _run_git(folder: Path, *words: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
    )
    return result.stdout.strip()


def write_words(run: RunDir, words: list[str]) -> None:
    """The words of the command line, one a line."""
    write_text(run.overrides, "".join(f"{masked_word(word)}\n" for word in words))


def _folder_of(composition: Composition) -> Path:
    own = composition.own.get("hydra.run.dir")
    if own:
        return named_folder(own)
    now = datetime.now()
    called = str(composition.config.run_name).replace("/", "-")
    name = f"{now:%H-%M-%S}-{called}-{secrets.token_hex(4)}"
    return Path("outputs").absolute() / f"{now:%Y-%m-%d}" / name


@contextmanager
def run_status(run: RunDir, config: RunConfig, resumes: bool, flag: StopFlag) -> Iterator[None]:
    """`status.json` says running; whatever ends the run by an exception is in it before that goes on.

    A resume that is refused changes nothing: the run is what it was before. What libraries raise because
    an interrupt came at a bad moment for them (in the middle of an import, say) is still an interrupt.
    """
    earlier = run.status.read_text(encoding="utf-8") if read_status(run) else None
    try:
        write_status(run, config, state="running", exit_code=None, message="")
        yield
    except BaseException as error:
        flag.quiet_until = math.inf  # from here on no interrupt stops what is written down
        from trainrun.runs.exceptional import failures

        if flag.raised or isinstance(error, KeyboardInterrupt):
            message = failures.note_interrupt(run, config, earlier)
            failures.draw_end(run, config)
            raise KeyboardInterrupt(message) from error
        if not isinstance(error, Exception):
            raise
        refused = isinstance(error, TrainrunError) and error.exit_code == EXIT_USAGE
        if refused and resumes and earlier is not None:
            write_text(run.status, earlier)
            raise
        fault = failures.told(run, error)
        try:
            failures.note_failure(run, config, fault)
        except OSError:  # no room for a second status next to the first
            with suppress(OSError):
                run.status.unlink()
                failures.note_failure(run, config, fault)
        failures.draw_end(run, config)
        if fault is error:
            raise
        raise fault from error


def start(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """`execute`, unless the run has come to its end."""
    if order.resume:
        from trainrun.runs.resume import finished, stay_finished

        if told := finished(run, config):
            return stay_finished(told)
    return execute(run, config, order)


def execute(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """Trains in this process or in ranks of its own, and returns the exit code. Raises TrainrunError."""
    record_reads()
    BUILT.clear()
    if order.resume:  # else `new_run` has written it
        write_config(run, config, seal=is_sealed(run))
    if external_ranks():
        from trainrun.runs.torchrun import lead_run

        return lead_run(run, config, order)
    parallel = config.parallel
    if parallel.mode == "single":
        # imported here: a library may swallow the interrupt of a run that has begun
        from trainrun.runs.rank import train_here
    else:
        from trainrun.parallel.rank_count import num_devices

        count, reason = num_devices(parallel.mode, parallel.accelerator, parallel.devices)
    write_json(run.job, {"resume": order.resume, "paths": order.paths, "typed": order.typed})
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
                code = train_here(run, config, order, flag, began)
                if code == EXIT_DONE and flag.num_interrupts:  # it came after the last step
                    raise KeyboardInterrupt
                return code
            say(f"parallel: {counted(count, 'rank')} ({reason})", flush=True)
            from trainrun.parallel.launch import launch, module_command

            return launch(
                lambda attempt: module_command("trainrun.runs.rank_process", str(run.root), str(attempt)),
                count, run, grace_seconds=config.trainer.stop_grace_seconds,
                alone_seconds=watchdog_limit(config.trainer.watchdog_seconds), max_restarts=parallel.max_restarts,
            )  # fmt: skip
    finally:
        stop_recording()
        run.job.unlink(missing_ok=True)
