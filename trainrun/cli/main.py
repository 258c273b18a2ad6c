"""The entry point: choose the command of a command line, and report faults and crashes.

Nothing here imports torch, so help and error messages need not wait for it.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable

from trainrun.cli.json_output import FLAG as JSON_FLAG
from trainrun.cli.json_output import HELPS, report_error, run_as_json
from trainrun.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    OF_NAMES,
    ConfigError,
    TrainrunError,
)
from trainrun.output import say
from trainrun.plugin_faults import describe_missing_satellite
from trainrun.user_code import add_import_paths, describe_system_error, format_user_traceback

COMMANDS = {
    "init": "the first files of a project: a model, data, an experiment and a notebook, ready to train",
    "resume": "continue a run from its newest checkpoint",
    "again": "a new run, with the settings of another",
    "evaluate": "loss and metrics of a saved run",
    "predict": "predictions of a saved run as CSV or Parquet",
    "embed": "features of every sample from a layer of a saved run (embeddings), as data to train on",
    "sample": "text that a trained language model writes after a prompt",
    "prune": "a new run with fewer weights or channels",
    "quantize": "a new run with weights of one byte, for serving",
    "export": "the trained network as ONNX, torch.export or safetensors, checked on real samples",
    "diagnose": "profile a run with these settings: its bottleneck, and what can be gained",
    "verify": "check that this config is trained exactly: accumulation, ranks, resume, evaluation, padding",
    "autotune": "measure the remedies that diagnose names, and write the fastest settings as a preset",
    "race": "which of several settings reaches a value first, and whether they end as well",
    "report": "draw the plots of a run again, or compare several",
    "ls": "the runs and sweeps below a folder: state, best value, what differs",
    "compare": "differences between runs: settings, environment, data, results",
    "watch": "follow a run or a sweep from another terminal, through its folder",
    "convert": "data in another format: .npy, HDF5, Parquet, LMDB, TFRecord or tar shards",
    "cache": "list the caches on disks and their sizes; clear: remove those that no run uses",
    "help": "the manual, by topic",
}

MODULES = {  # where the file, or the function, has another name
    "evaluate": "prediction.predict_command:evaluate_command",
    "predict": "prediction.predict_command",
    "help": "cli.manual_pages",
    "again": "cli.resume_command:repeat_command",
    "compare": "cli.report_command:compare_command",
    "diagnose": "benchmark.diagnose_command",
    "autotune": "benchmark.autotune_command",
    "race": "race.race_command",
    "init": "starter.init_command",
    "sample": "sampling.sample_command",
    "export": "export.export_command",
    "embed": "embedding.embed_command",
    "prune": "smaller.prune_command",
    "quantize": "smaller.quantize_command",
    "ls": "watch.ls_command",
    "watch": "watch.watch_command",
    "verify": "verify.verify_command",
    "convert": "convert.convert_command",
}


# What people type as the first word, and the words of ours that do it.
MEANT = {
    **dict.fromkeys(("train", "fit", "run", "start"), ()),
    **dict.fromkeys(("eval", "validate", "score"), ("evaluate",)),
    **dict.fromkeys(("infer", "inference", "prediction"), ("predict",)),
    **dict.fromkeys(("lr-find", "lr_find", "find-lr", "find_lr", "lr"), ("autotune", "lr")),
    **dict.fromkeys(("tune", "optimize"), ("autotune",)),
    **dict.fromkeys(("profile", "bench", "benchmark"), ("diagnose",)),
    **dict.fromkeys(("sweep", "search", "multirun", "hpo"), ("--multirun",)),
    **dict.fromkeys(("continue", "restart"), ("resume",)),
    **dict.fromkeys(("new", "create", "template", "scaffold"), ("init",)),
    **dict.fromkeys(("clone", "rerun", "repeat", "copy"), ("again",)),
    **dict.fromkeys(("list", "runs"), ("ls",)),
    **dict.fromkeys(("plot", "plots", "draw", "show"), ("report",)),
    **dict.fromkeys(("follow", "tail"), ("watch",)),
    **dict.fromkeys(("diff",), ("compare",)),
    **dict.fromkeys(("generate",), ("sample",)),
    **dict.fromkeys(("man", "manual", "docs", "usage"), ("help",)),
    **dict.fromkeys(("config", "print-config", "print_config"), ("--cfg", "job")),
    "test": ("evaluate", "--split", "test"),
    "version": ("--version",),
    "completion": ("--completion",),
}
FINE_TUNE = ("finetune", "fine-tune", "fine_tune", "transfer")


def translate_command(words: list[str]) -> list[str]:
    """Translate a first word of another program, such as `fit`, into a command. Return other words unchanged."""
    meant = MEANT.get(words[0]) if words and words[0] not in COMMANDS else None
    if meant is None or (meant and not meant[0].startswith("-") and meant[0] not in COMMANDS):
        return words
    if words[1:2] and words[1].startswith("="):  # lr =3 is a setting with a space
        return words
    say(f"note: trainrun {words[0]} is read as: {' '.join(['trainrun', *meant])}", file=sys.stderr)
    return [*meant, *words[1:]]


def choose_command(words: list[str]) -> Callable[[], int]:
    """Return a function that runs the command of a command line and returns the exit code."""
    words = translate_command(words)
    if words[:1] == ["--completion"]:
        return lambda: run_command("cli.completion", "print_completion_script", words[1:])
    if words and words[0] in COMMANDS:
        module, _, name = MODULES.get(words[0], f"cli.{words[0]}_command").partition(":")
        return lambda: run_command(module, name or "main", words[1:])
    if words and re.fullmatch(r"[a-z][\w-]*", words[0]) and not "".join(words[1:2]).startswith("="):
        return lambda: run_command("cli.help_command", "raise_unknown_command", words)
    if "--help" in words or "-h" in words:
        return lambda: run_command("cli.help_command", "print_help", words)
    if "--version" in words:
        return lambda: run_command("folder.environment", "show_version", words)
    return lambda: run_command("cli.train_command", "main", words)


def run_command(module: str, name: str, words: list[str]) -> int:
    """Import and run one command. The modules of other commands are not imported."""
    if module != "cli.train_command":
        add_import_paths([])
    command: Callable[[list[str]], int] = getattr(importlib.import_module(f"trainrun.{module}"), name)
    return command(words)


def report_crash(error: Exception) -> int:
    """Print an unexpected exception, and return the exit code.

    For an exception in user code, only the user's lines of the traceback are shown. For a bug in trainrun, all are.
    """
    if missing := describe_missing_satellite(error):
        say(f"trainrun: {missing}", file=sys.stderr)
        return EXIT_FAILED
    shown, text = format_user_traceback(error), describe_system_error(error)
    if text and os.environ.get("TRAINRUN_FULL_ERROR") != "1":
        say(f"trainrun: {text} (every line of the traceback: TRAINRUN_FULL_ERROR=1)", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, OSError) and error.errno not in OF_NAMES else EXIT_USAGE
    if not shown or os.environ.get("TRAINRUN_FULL_ERROR") == "1":
        raise error
    say(f"trainrun: failed in code of yours:\n{shown}", file=sys.stderr)
    say("(every line of the traceback: TRAINRUN_FULL_ERROR=1)", file=sys.stderr)
    return EXIT_FAILED


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code. A user's mistake gives one short message and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_json = JSON_FLAG in words and set(HELPS).isdisjoint(words)
    words = [word for word in words if word != JSON_FLAG]
    if not is_json:
        return run_command_line(words)
    words = translate_command(words)
    command = next(iter(words), "train")
    return run_as_json(command if command in COMMANDS else "train", lambda: run_command_line(words))


def run_command_line(words: list[str]) -> int:
    """Run one command line without `--json`. A user's mistake gives one short message and exit code 2."""
    try:
        check_working_directory(words)
        return choose_command(words)()
    except TrainrunError as error:
        return report_fault(error)
    except KeyboardInterrupt as error:
        report_error(error)
        say(f"trainrun: {str(error) or 'interrupted'}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        report_error(error)
        return report_crash(error)


def check_working_directory(words: list[str]) -> None:
    """Raise ConfigError if the working directory no longer exists, or if an argument is not valid text."""
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
    report_error(error)
    if os.environ.get("TRAINRUN_FULL_ERROR") == "1":
        say("".join(traceback.format_exception(error)), file=sys.stderr, end="")
    for line in str(error).splitlines():
        say(f"trainrun: {line}" if not line.startswith(" ") else line, file=sys.stderr)
    return error.exit_code
