"""A command line in, an exit code out. No torch here: help and mistakes are answered before it could be imported."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainrun.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError, TrainrunError
from trainrun.output import say

if TYPE_CHECKING:
    from trainrun.config.compose import Composition


def main(argv: list[str] | None = None) -> int:
    """Run one command line; every fault of the user's is one short message and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        check_surroundings(words)
        return dispatch(words)
    except TrainrunError as error:
        return report_fault(error)
    except KeyboardInterrupt as error:
        say(f"trainrun: {str(error) or 'interrupted'}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        from trainrun.cli.commands import report_crash

        return report_crash(error)


def check_surroundings(words: list[str]) -> None:
    """Raises ConfigError if the working directory is gone, and for words that are no text."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory is gone or closed ({error.strerror}); change to another one first"
        ) from error
    for word in words:
        if word != word.encode("utf-8", "replace").decode("utf-8"):
            raise ConfigError(f"{word}: not UTF-8; rename what it names, or reach it through a link")


def report_fault(error: TrainrunError) -> int:
    if os.environ.get("TRAINRUN_FULL_ERROR") == "1":
        say("".join(traceback.format_exception(error)), file=sys.stderr, end="")
    for line in str(error).splitlines():
        say(f"trainrun: {line}" if not line.startswith(" ") else line, file=sys.stderr)
    return error.exit_code


def dispatch(words: list[str]) -> int:
    if (words and "=" not in words[0]) or {"--help", "-h", "--version"} & set(words):
        from trainrun.cli.commands import command_of

        if (command := command_of(words)) is not None:
            add_import_paths([])
            return command()
    return train_command(words)


def train_command(words: list[str]) -> int:
    """A new run, a sweep, or the composed config without running."""
    from trainrun.config.compose import prepare
    from trainrun.parallel.devices import external_ranks

    if follows_others():
        from trainrun.runs.torchrun import follow_run

        return follow_run()
    prepared, _ = prepare(words, Path.cwd())
    if prepared.twice:
        raise ConfigError(*prepared.twice)
    sweeps = [flag for flag in prepared.flags if flag in ("--multirun", "-m")]
    if len(prepared.flags) > len(sweeps):  # --cfg job
        from trainrun.config.compose import compose_run, format_config

        say(format_config(compose_run(words).config), end="")
        return EXIT_DONE
    paths = add_import_paths([str(Path(folder).resolve().parent) for folder in prepared.config_dirs])
    if sweeps:
        if external_ranks():
            raise ConfigError(
                "--multirun: not inside torchrun; start the sweep alone, its jobs start their own ranks"
            )
        from trainrun.sweep.run_sweep import sweep_command

        return sweep_command(prepared)
    if "hydra.sweep.dir" in prepared.own:
        raise ConfigError(
            "hydra.sweep.dir: is the folder of a sweep (--multirun); one run has output_dir=..."
        )
    return train_one(words, paths)


def train_one(words: list[str], paths: list[str]) -> int:
    from trainrun.config.compose import compose_run

    with others_dismissed():
        composition = compose_run(words)
    for note in composition.notes:
        say(f"note: {note}", file=sys.stderr)
    from trainrun.folder.run_folder import LaunchSpec, typed_settings
    from trainrun.runs.run import begun, start

    with contextlib.ExitStack() as held:
        with others_dismissed():
            run, config, again = held.enter_context(begun(in_earlier_folder(composition), words))
        typed = () if again else typed_settings(composition.overrides)
        return told(run.root, lambda: start(run, config, LaunchSpec(again, paths, typed=typed)))


@contextlib.contextmanager
def others_dismissed() -> Iterator[None]:
    """End the other ranks that torchrun or Slurm started, which wait for rank 0, if it finds a mistake."""
    from trainrun.parallel.devices import external_ranks

    try:
        yield
    except TrainrunError as error:
        if external_ranks():
            from trainrun.runs.torchrun import dismiss

            dismiss(error.exit_code)
        raise


def follows_others() -> bool:
    """Whether this process is a rank above 0 that torchrun or Slurm started."""
    from trainrun.parallel.devices import external_ranks

    return external_ranks() and os.environ["RANK"] != "0"


def in_earlier_folder(composition: Composition) -> Composition:
    """With the folder of this run before torchrun restarted the ranks, unless the words name one."""
    from trainrun.parallel.devices import external_ranks

    if "hydra.run.dir" in composition.own or not external_ranks():
        return composition
    from trainrun.runs.torchrun import earlier_folder

    folder = earlier_folder()
    return composition if folder is None else replace(composition, own={"hydra.run.dir": folder})


def told(folder: Path, work: Callable[[], int]) -> int:
    """A stopped run says how it goes on, also where a second Ctrl-C left no time to save."""
    from trainrun.folder.run_folder import RunDir
    from trainrun.folder.status import read_status

    try:
        code = work()
    except KeyboardInterrupt as error:
        with contextlib.suppress(OSError):
            say(f"trainrun: {str(error) or 'interrupted'}", file=sys.stderr)
        code = EXIT_INTERRUPTED
    unfinished = code not in (EXIT_DONE, EXIT_USAGE) and read_status(RunDir(folder)).get("state") != "done"
    if unfinished and (folder / "checkpoints").is_dir():
        shown = os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
        with contextlib.suppress(OSError):  # the terminal may be gone, the code still counts
            say(f"go on with: trainrun resume {shlex.quote(shown)}", file=sys.stderr, flush=True)
    return code


def add_import_paths(extra: list[str]) -> list[str]:
    """The working directory and folders next to --config-dir, at the end: they hide no installed module."""
    paths = [] if getattr(sys.flags, "safe_path", False) else [os.getcwd(), *extra]
    sys.path += [path for path in paths if path not in sys.path]
    return paths
