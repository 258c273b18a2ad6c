"""`trainrun KEY=VALUE ...`: start a new run or a sweep, or print the composed config."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainrun.config.argv import CommandLine
from trainrun.config.compose import Composition, compose_command_line, format_yaml, prepare_command_line
from trainrun.config.saved_values import separate_secrets
from trainrun.config.schema import RunConfig, convert_to_plain_values
from trainrun.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, TrainrunError
from trainrun.folder.run_folder import LaunchSpec, RunDir, resolve_folder
from trainrun.folder.status import read_status
from trainrun.output import format_path_to_paste, report_result, say
from trainrun.parallel.devices import is_one_task_a_node, is_started_by_launcher
from trainrun.parallel.launch import launch_on_node
from trainrun.runs.run import (
    choose_run_folder,
    dismiss_other_ranks,
    import_torchrun,
    open_or_create_run,
    start_training,
)
from trainrun.runtime.python_module import module_command
from trainrun.user_code import add_import_paths

LAUNCH_OPTION = re.compile(r"launch(\.\w+)?=")
SWEEP_FLAGS = {"--multirun", "-m"}
SWEEP_OPTION = re.compile(r"sweep(\.\w+)?=")
# Also Hydra's words for a sweep, and a word for one of its branches: `model=mlp: model.width=16,32`.
SWEEP_WORD = re.compile(r"sweep(\.\w+)?=|hydra[./](sweeper|launcher)\b|[\w./]+=[^\s:,{}()\[\]]+:\s")


def main(words: list[str]) -> int:
    """Start a new run or a sweep, or print the composed config. Return the exit code."""
    launch_words = [word for word in words if LAUNCH_OPTION.match(word)]
    words = [word for word in words if word not in launch_words]
    code = run_ranks_of_node(lambda: compose_command_line(*prepare_command_line(words, Path.cwd())).config)
    if code is not None:
        return code
    if is_follower_rank():
        return int(import_torchrun().train_as_other_rank())
    is_sweep = not SWEEP_FLAGS.isdisjoint(words)
    sweep_words = [word for word in words if (SWEEP_WORD if is_sweep else SWEEP_OPTION).match(word)]
    all_words = words
    words = [word for word in words if word not in sweep_words]
    with dismiss_other_ranks():
        prepared, folders = prepare_command_line(words, Path.cwd())
        check_command_line(prepared, sweep_words)
    sweeps = [flag for flag in prepared.flags if flag in SWEEP_FLAGS]
    if len(prepared.flags) > len(sweeps):  # --cfg job
        config = compose_command_line(prepared, folders).config
        values = convert_to_plain_values(separate_secrets(config)[0])
        say(format_yaml(values), end="")
        report_result(config=values)
        return EXIT_DONE
    paths = add_import_paths([str(Path(folder).resolve().parent) for folder in prepared.config_dirs])
    if sweeps:
        if (
            launch_words
            and (code := submit_sweep(launch_words, all_words, prepared, sweep_words)) is not None
        ):
            return code
        from trainrun.sweep.run_sweep import sweep_command

        return sweep_command(prepared, sweep_words)
    code = launch_on_cluster(launch_words, words, prepared, folders) if launch_words else None
    return train_single_run(words, paths, prepared, folders) if code is None else code


def check_command_line(prepared: CommandLine, sweep_words: list[str]) -> None:
    """Raise ConfigError for settings that are typed twice, or that are of a sweep where none is, or can be, started."""
    if prepared.twice:
        raise ConfigError(*prepared.twice)
    if not SWEEP_FLAGS.isdisjoint(prepared.flags):
        if is_started_by_launcher():
            raise ConfigError(
                "--multirun: not inside torchrun; start the sweep alone, its jobs start their own ranks"
            )
    elif sweep_words:
        raise ConfigError(f"{sweep_words[0]}: is a setting of a sweep; add --multirun")
    elif "hydra.sweep.dir" in prepared.own:
        raise ConfigError(
            "hydra.sweep.dir: is the folder of a sweep (--multirun); one run has output_dir=..."
        )


def launch_on_cluster(
    launch_words: list[str], words: list[str], prepared: CommandLine, folders: list[Path]
) -> int | None:
    """Submit the run to Slurm, train it on a Ray cluster, or print its manifest, as the launch options say.

    Return the exit code; None for launch=local. Raise ConfigError for mistakes.
    """
    from trainrun.launch import launch_options, manifest, ray, slurm

    options = launch_options.read_options(launch_words)
    if options is None:
        return None
    if options.array is not None:
        raise ConfigError(f"launch.array={options.array}: is a setting of a sweep; add --multirun")
    composition = compose_command_line(prepared, folders)
    name = str(composition.config.run_name)
    if options.kind in ("k8s", "sky"):
        manifest.print_manifest(options, name, words)
        return EXIT_DONE
    folder = choose_run_folder(composition)
    words = launch_options.build_job_words(options, words, folder)
    if options.kind == "ray":
        code = ray.run_on_cluster(options, composition.config, words)
        report_result(folder=folder, **read_status(RunDir(folder)))
        return code
    slurm.submit_job(options, name, folder, words)
    return EXIT_DONE


def submit_sweep(
    launch_words: list[str], words: list[str], prepared: CommandLine, sweep_words: list[str]
) -> int | None:
    """Submit a sweep to Slurm as a job array. Return the exit code; None for launch=local. Raise ConfigError.

    words: the whole command line without the launch options; each job of the array runs it.
    """
    from trainrun.launch import launch_options, slurm
    from trainrun.sweep import jobs, run_sweep

    options = launch_options.read_options(launch_words)
    if options is None:
        return None
    if options.kind != "slurm":
        raise ConfigError(f"launch={options.kind}: not with --multirun; only launch=slurm runs a sweep")
    if options.nodes > 1:
        raise ConfigError(
            f"launch.nodes={options.nodes}: each job of a sweep is on one machine; say launch.array={options.nodes}"
        )
    checked_words, named = run_sweep.check_sweep(prepared, sweep_words)
    folder = resolve_folder(str(named or jobs.choose_sweep_folder(checked_words)))
    slurm.submit_job(options, folder.name, folder, launch_options.replace_folder(words, folder))
    return EXIT_DONE


def train_single_run(words: list[str], paths: list[str], prepared: CommandLine, folders: list[Path]) -> int:
    """Train the run of a command line. Return its exit code. prepared: the same settings in the form that Hydra
    needs.
    """
    with dismiss_other_ranks():
        composition = compose_command_line(prepared, folders)
    for note in composition.notes:
        say(f"note: {note}", file=sys.stderr)
    with contextlib.ExitStack() as held:
        with dismiss_other_ranks():
            run, config, again = held.enter_context(
                open_or_create_run(use_folder_of_restart(composition), words)
            )
        return run_and_print_resume_command(
            run.root, lambda: start_training(run, config, LaunchSpec(again, paths))
        )


def is_follower_rank() -> bool:
    """Return whether torchrun or Slurm started this process as a rank above 0."""
    return is_started_by_launcher() and os.environ["RANK"] != "0"


def run_ranks_of_node(config_of: Callable[[], RunConfig]) -> int | None:
    """Run the ranks of `parallel.devices` on this machine if Slurm started one task per machine.

    Return their exit code; None if no ranks need to be started. Rank 0 reports a mistake in the config.
    """
    if not is_started_by_launcher() or not is_one_task_a_node():
        return None
    try:
        devices = config_of().parallel.devices
    except TrainrunError:
        return None
    count = len(devices) if isinstance(devices, list | tuple) else 1 if devices == "auto" else int(devices)
    return launch_on_node(module_command("trainrun", *sys.argv[1:]), count) if count > 1 else None


def use_folder_of_restart(composition: Composition) -> Composition:
    """Return the composition with the run folder that was used before torchrun restarted the ranks.

    A typed folder stays.
    """
    if "hydra.run.dir" in composition.own or not is_started_by_launcher():
        return composition
    folder = import_torchrun().find_earlier_folder()
    return composition if folder is None else replace(composition, own={"hydra.run.dir": folder})


def run_and_print_resume_command(folder: Path, work: Callable[[], int]) -> int:
    """Call `work` and return its exit code. If it was stopped, print the command that resumes the run."""
    try:
        code = work()
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):
            say(f"trainrun: {str(error) or 'interrupted'}", file=sys.stderr)
        code = EXIT_INTERRUPTED
    report_result(folder=folder, **read_status(RunDir(folder)))
    unfinished = code not in (EXIT_DONE, EXIT_USAGE) and read_status(RunDir(folder)).get("state") != "done"
    if unfinished and (folder / "checkpoints").is_dir():
        with contextlib.suppress(OSError):  # the terminal may be gone, the code still counts
            say(f"continue with: trainrun resume {format_path_to_paste(folder)}", file=sys.stderr, flush=True)
    return code
