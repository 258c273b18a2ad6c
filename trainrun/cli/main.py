"""A command line in, an exit code out. No torch here: help and mistakes are answered before it could be imported."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from trainrun.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    OF_NAMES,
    ConfigError,
    TrainrunError,
)
from trainrun.output import say
from trainrun.runs.run_folder import RunDir

COMMANDS = {
    "resume": "go on with a run from its newest checkpoint",
    "again": "a new run, with the settings of another",
    "evaluate": "loss and metrics of a saved run",
    "predict": "predictions of a saved run as CSV or Parquet",
    "embed": "what a layer of a saved run gives for every sample, as data to train on",
    "sample": "what a trained language model writes after a prompt",
    "prune": "a new run with fewer weights or channels",
    "quantize": "a new run with weights of one byte, for serving",
    "export": "the trained network as ONNX, torch.export or safetensors, tried on real samples",
    "diagnose": "measure what a training of these words waits for, and what it would gain without",
    "verify": "check that this config is trained exactly: accumulation, ranks, resume, evaluation, padding",
    "autotune": "find the fastest way to the same training on this machine, and write it as a preset",
    "report": "draw the plots of a run again, or compare several",
    "compare": "what differs between runs, and what came out",
    "watch": "follow a run or a sweep from another terminal, through its folder",
    "import": "the weights of a foreign torch file as safetensors, without running anything of it",
    "convert": "data in another format: .npy, HDF5, Parquet, LMDB, TFRecord or tar shards",
    "help": "the manual, by topic",
}

MODULES = {  # where the file, or the function, has another name
    "help": "cli.manual_pages",
    "again": "cli.resume_command:again",
    "compare": "cli.report_command:compare",
    "sample": "sampling.sample_command",
    "export": "export.export_command",
    "embed": "embedding.embed_command",
    "prune": "smaller.prune_command",
    "quantize": "smaller.quantize_command",
    "watch": "watch.watch_command",
}


OLD_COMMANDS = {"tune": ["autotune"], "ladder": ["autotune", "--table"]}


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


def report_crash(error: Exception) -> int:
    """An exception of the user's own code: their lines of it. A bug of ours keeps the whole traceback."""
    from trainrun.errors import of_the_system, user_traceback
    from trainrun.instantiate import missing_satellite

    if missing := missing_satellite(error):
        say(f"trainrun: {missing}", file=sys.stderr)
        return EXIT_FAILED
    shown, text = user_traceback(error), of_the_system(error)
    if text and os.environ.get("TRAINRUN_FULL_ERROR") != "1":
        say(f"trainrun: {text} (every line of the traceback: TRAINRUN_FULL_ERROR=1)", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, OSError) and error.errno not in OF_NAMES else EXIT_USAGE
    if not shown or os.environ.get("TRAINRUN_FULL_ERROR") == "1":
        raise error
    say(f"trainrun: failed in code of yours:\n{shown}", file=sys.stderr)
    say("(every line of the traceback: TRAINRUN_FULL_ERROR=1)", file=sys.stderr)
    return EXIT_FAILED


def dispatch(words: list[str]) -> int:
    if words and words[0] in OLD_COMMANDS:
        now = OLD_COMMANDS[words[0]]
        say(f"note: trainrun {words[0]} is now: trainrun {' '.join(now)}", file=sys.stderr)
        words = [*now, *words[1:]]
    if words and words[0] in COMMANDS:
        add_import_paths([])
        module, _, name = MODULES.get(words[0], f"cli.{words[0]}_command").partition(":")
        command: Callable[[list[str]], int] = getattr(
            importlib.import_module(f"trainrun.{module}"), name or "main"
        )
        return command(words[1:])
    if words and re.fullmatch(r"[a-z][\w-]*", words[0]) and not "".join(words[1:2]).startswith("="):
        raise ConfigError(no_command(words[0]))
    if "--help" in words or "-h" in words:
        from trainrun.config.argv import conf_dir, split_command_line, user_conf_dirs
        from trainrun.config.help_text import help_text

        asked = split_command_line(words)
        folders = [*user_conf_dirs(asked.config_dirs, Path.cwd()), conf_dir()]
        say(help_text(asked.overrides, COMMANDS, folders))
        return EXIT_DONE
    if "--version" in words:
        from trainrun.runs.environment import version_line

        say(version_line())
        return EXIT_DONE
    return train_command(words)


def no_command(word: str) -> str:
    from trainrun.config.argv import conf_dir
    from trainrun.config.validate import nearest

    if (conf_dir() / word).is_dir():
        return f"{word}: is a group; choose with {word}=..., see trainrun --help {word}"
    return (
        f"{word}: no such command.{nearest(word, COMMANDS)} Commands: {', '.join(COMMANDS)}; "
        "settings are given as key=value; see trainrun --help"
    )


def train_command(words: list[str]) -> int:
    """A new run, a sweep, or one of Hydra's own questions."""
    from trainrun.config.compose import prepare
    from trainrun.parallel.devices import external_ranks

    if follows_others():
        from trainrun.runs.torchrun import follow_run

        return follow_run()
    prepared, folders = prepare(words, Path.cwd())
    if prepared.twice:
        raise ConfigError(*prepared.twice)
    sweeps = [flag for flag in prepared.flags if flag in ("--multirun", "-m")]
    if len(prepared.flags) > len(sweeps):
        from trainrun.config.help_text import hydra_question

        return hydra_question(prepared, folders)
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
    from trainrun.runs.lock import only_writer
    from trainrun.runs.run import LaunchSpec, begun, execute, start

    earlier = earlier_life()
    if earlier is not None:  # torchrun restarted the ranks
        config = composition.config
        if config.seed is None:  # the one that was drawn at its first start
            from trainrun.config.saved_config import load_config

            config = replace(config, seed=load_config(earlier.config, []).seed)
        with only_writer(earlier):
            return execute(earlier, config, LaunchSpec(True, paths))
    with contextlib.ExitStack() as held:
        with others_dismissed():
            run, config, again = held.enter_context(begun(composition, words))
        return told(run.root, lambda: start(run, config, LaunchSpec(again, paths)))


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


def earlier_life() -> RunDir | None:
    """The run folder of this process before torchrun restarted it."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    from trainrun.runs.torchrun import restarted_run

    return restarted_run()


def told(folder: Path, work: Callable[[], int]) -> int:
    """A stopped run says how it goes on, also where a second Ctrl-C left no time to save."""
    from trainrun.runs.status import read_status

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
