"""One run from config to results: its folder, its ranks, the training, and its end."""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from trainrun.config.compose import Composition, format_config
from trainrun.config.saved_config import load_config, merge_overrides, parse_saved_overrides
from trainrun.config.saved_values import separate_secrets
from trainrun.config.schema import RunConfig, record_setting_reads, stop_recording_reads
from trainrun.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, TrainrunError
from trainrun.folder.environment import describe_environment, read_uncommitted_changes
from trainrun.folder.lock import lock_run_folder
from trainrun.folder.run_folder import (
    SEED,
    SEED_DRAWN,
    LaunchSpec,
    RunDir,
    build_folder_error,
    format_json_file,
    has_ever_saved,
    is_run_file_name,
    is_run_folder,
    list_typed_keys,
    read_overrides,
    resolve_folder,
    write_identity,
    write_json,
    write_text,
)
from trainrun.folder.seal import is_sealed, seal_folder
from trainrun.folder.status import find_named_run, is_sweep, read_status
from trainrun.instantiate import BUILT
from trainrun.limits import is_url
from trainrun.output import format_count, format_path_to_paste, mask_argument, print_note, say
from trainrun.parallel.devices import choose_num_devices, is_started_by_launcher
from trainrun.parallel.launch import launch_ranks
from trainrun.runs import resume
from trainrun.runs.failures import limit_stop_duration, record_stop, run_status
from trainrun.runtime.python_module import module_command
from trainrun.runtime.signals import StopFlag, catch_signals, resolve_watchdog_limit
from trainrun.timing.phases import measure_command_start


@contextmanager
def open_or_create_run(
    composition: Composition, words: list[str]
) -> Iterator[tuple[RunDir, RunConfig, bool]]:
    """Create a run, or open the run in its folder if it has the same settings. The folder is locked inside the
    block.

    Yield the folder, the config with its seed and the keys that were typed, and whether an existing run is continued.
    Raise ConfigError if the folder holds a sweep, or a run with other settings. Nothing is overwritten.
    """
    run, config = RunDir(choose_run_folder(composition)), composition.config
    if is_sweep(run.root):
        raise ConfigError(
            f"output_dir={run.root}: holds a sweep; name another folder, or go on with the sweep: "
            f"trainrun resume {format_path_to_paste(run.root)}"
        )
    with remove_if_refused(run), lock_run_folder(run):
        earlier_config = None
        if any(path != run.lock for path in run.root.iterdir()):
            earlier_config = resume.load_config_to_continue(run, config)
            if earlier_config is not None and not run.overrides.exists():  # damaged, and set aside
                write_overrides(run, words)
        if earlier_config is None:
            seed = secrets.randbelow(2**32) if config.seed is None else config.seed
            config = replace(config, seed=seed, typed=list_typed_keys(composition.overrides))
            create_run(replace(composition, config=config), words, run, composition.config.seed is None)
        yield run, earlier_config or config, earlier_config is not None


@contextmanager
def remove_if_refused(run: RunDir) -> Iterator[None]:
    """Create the folder of a run. If a new run is refused before its first step, remove the files written inside the
    block.

    A run is refused for a mistake of the user (exit code 2). At that time, ranks of torchrun or Slurm have written no
    files. Later failures do not raise an error here: they are exit codes of the ranks.
    """
    made = [folder for folder in (run.root, *run.root.parents) if not folder.exists()]
    before = list(run.root.iterdir()) if run.root.is_dir() else []
    is_new = not is_run_folder(run)
    try:
        run.create()
        yield
    except TrainrunError as error:
        nothing_done = is_new and not has_ever_saved(run) and not resume.has_trained(run)
        if error.exit_code == EXIT_USAGE and nothing_done:
            remove_new_files(run, before, made)
        raise


def remove_new_files(run: RunDir, before: list[Path], made: list[Path]) -> None:
    """Remove the files of a run that were not there before, then the folders made for it if they are empty.

    Other new files belong to the user, for example downloaded data.
    """
    with suppress(OSError):  # the mistake is what counts
        for path in run.root.iterdir():
            if path in before or not is_run_file_name(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for folder in made:
            folder.rmdir()


def create_run(
    composition: Composition, words: list[str], run: RunDir | None = None, seed_drawn: bool = False
) -> RunDir:
    """Create the folder of a new run with its identity, overrides, config and environment.

    seed_drawn: whether the seed was drawn at random and not given by the user.
    """
    run = run or RunDir(choose_run_folder(composition))
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
        write_overrides(run, words)
        write_json(
            run.environment, environment := describe_environment(Path.cwd()) | {"folder": str(run.root)}
        )
        if (environment["git"] or {}).get("changed") and (diff := read_uncommitted_changes(Path.cwd())):
            write_text(run.changes, diff)
        write_config(run, config)
    except OSError as error:
        raise build_folder_error(run.root, error) from error
    return run


def write_config(run: RunDir, config: RunConfig, seal: bool = True) -> None:
    """Write the config of a run, and its secrets to a file of their own. seal: also seal the folder as this user's."""
    secret_values = separate_secrets(config)[1]
    files = {run.secrets: format_json_file(secret_values)} if secret_values else {}
    files[run.config] = format_config(config)
    if seal:
        try:
            seal_folder(run, files)
        except OSError as error:
            say(
                f"note: {run.root}: not marked as yours ({error}): `trainrun resume` and other commands will need "
                "--trust; set XDG_STATE_HOME to a writable folder that is kept",
                file=sys.stderr,
            )
    for path, text in files.items():
        write_text(path, text, durable=True)


def write_overrides(run: RunDir, words: list[str]) -> None:
    """Write the overrides of the command line, one per line."""
    write_text(run.overrides, "".join(f"{mask_argument(word)}\n" for word in words))


def choose_run_folder(composition: Composition) -> Path:
    named = composition.own.get("hydra.run.dir")
    if named:
        return resolve_folder(named)
    now = datetime.now()
    called = str(composition.config.run_name).replace("/", "-")
    name = f"{now:%H-%M-%S}-{called}-{secrets.token_hex(4)}"
    return Path("outputs").absolute() / f"{now:%Y-%m-%d}" / name


def start_training(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """Train the run and return its exit code. Do nothing if it has already reached its end."""
    if order.resume and (text := resume.describe_finished_run(run, load_config(run.config, []), config)):
        return report_finished_run(text)
    return train_in_ranks(run, config, order)


def report_finished_run(text: str) -> int:
    """Print why there is nothing to do, release the ranks of torchrun or Slurm, and return the exit code."""
    say(text)
    if is_started_by_launcher():
        import_torchrun().dismiss_ranks()
    return EXIT_DONE


@contextmanager
def dismiss_other_ranks() -> Iterator[None]:
    """If the block raises a TrainrunError, end the ranks of torchrun or Slurm that wait for rank 0."""
    try:
        yield
    except TrainrunError as error:
        if is_started_by_launcher():
            import_torchrun().dismiss_ranks(error.exit_code)
        raise


def import_torchrun() -> ModuleType:
    """Import the module that meets the ranks of torchrun or Slurm. It needs torch, which a launcher does not import."""
    from trainrun.runs import torchrun

    return torchrun


def train_in_ranks(run: RunDir, config: RunConfig, order: LaunchSpec) -> int:
    """Train in this process or in new ranks, and return the exit code. Raise TrainrunError."""
    record_setting_reads()
    BUILT.clear()
    if order.resume:  # else `create_run` has written it
        write_config(run, config, seal=is_sealed(run))
    if is_started_by_launcher():
        return int(import_torchrun().train_as_rank_zero(run, config, order))
    parallel = config.parallel
    if parallel.mode == "single":
        # imported here: a library may swallow the interrupt of a run that has begun
        from trainrun.runs.rank import train_in_this_process
    else:
        count, reason = choose_num_devices(parallel.mode, parallel.accelerator, parallel.devices)
    write_json(run.job, {"resume": order.resume, "paths": order.paths, "typed": config.typed})
    began = measure_command_start() if order.began is None else order.began
    flag = StopFlag(training=False)
    try:
        with (
            catch_signals(flag),
            run_status(run, config, order.resume, flag),
            limit_stop_duration(run, config)
            if parallel.mode == "single"
            else nullcontext(),  # `launch_ranks` has its own clock
        ):
            if parallel.mode == "single":
                code = train_in_this_process(run, config, order, flag, began)
                if code == EXIT_DONE and flag.num_interrupts:  # it came after the last step
                    raise KeyboardInterrupt
                return code
            say(f"parallel: {format_count(count, 'rank')} ({reason})", flush=True)
            code = launch_ranks(
                lambda attempt: module_command("trainrun.runs.rank_process", str(run.root), str(attempt)),
                count, run, grace_seconds=config.trainer.stop_grace_seconds,
                alone_seconds=resolve_watchdog_limit(config.trainer.watchdog_seconds),
                max_restarts=parallel.max_restarts,
            )  # fmt: skip
            if code == EXIT_INTERRUPTED and read_status(run).get("state") == "running":
                raise KeyboardInterrupt  # it came before a rank could write that down
            record_stop(run, config, code)
            return code
    finally:
        stop_recording_reads()
        run.job.unlink(missing_ok=True)


def open_run(folder: str | Path, key: str = "RUN_DIR") -> RunDir:
    """Return an existing run; for a sweep's folder, its best run. Raise ConfigError if there is none.

    folder: a path, or the URL of a run in an object store, which is downloaded.
    """
    if is_url(folder):
        from trainrun.mirror.object_store_mirror import fetch_run  # needs an optional package

        folder = fetch_run(str(folder), print_note)
    run = find_named_run(folder)
    if not run.config.is_file():
        raise ConfigError(f"{key}={folder}: no run is there (no config.yaml)")
    return run


def resume_run(run: RunDir, overrides: list[str], paths: list[str], trust: bool = False) -> int:
    """Continue a run in its folder from the newest undamaged checkpoint. Return its exit code.

    Overrides that the run refuses are discarded.
    """
    with ExitStack() as held:
        with dismiss_other_ranks():
            held.enter_context(lock_run_folder(run))
            config = resume.load_trusted_config(run, overrides, trust)
            resume.check_checkpoint_link(run)
            resume.repair_folder(run)
            resume.check_modules(run, config)
            saved = load_config(run.effective_config_path, []) if overrides else config
            resume.check_same_network(run, saved, config)
            if config.seed is None:
                raise ConfigError("seed=null: a resumed run keeps its seed; leave it out")
        resume.restore_config(run)
        if message := resume.describe_finished_run(run, saved, config):
            return report_finished_run(message)
        write_text(run.config_before, run.config.read_text(encoding="utf-8"), durable=True)
        held.callback(resume.restore_config, run)
        if overrides and run.overrides.is_file():
            before = read_overrides(run)
            write_text(run.overrides_before, "".join(f"{word}\n" for word in before))
            write_overrides(run, merge_overrides(before, overrides))
        config = replace(config, typed=list_typed_keys(parse_saved_overrides(overrides).overrides))
        return train_in_ranks(run, config, LaunchSpec(resume=True, paths=paths))
