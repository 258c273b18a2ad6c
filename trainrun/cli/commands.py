"""Which command a line asks for; help, the version, and how a crash is told."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from trainrun.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, OF_NAMES, ConfigError
from trainrun.output import say
from trainrun.plugin_faults import missing_satellite
from trainrun.user_code import of_the_system, user_traceback

COMMANDS = {
    "init": "the first files of a project: a model, data, an experiment and a notebook, which train as they are",
    "resume": "continue a run from its newest checkpoint",
    "again": "a new run, with the settings of another",
    "evaluate": "loss and metrics of a saved run",
    "predict": "predictions of a saved run as CSV or Parquet",
    "embed": "features of every sample from a layer of a saved run (embeddings), as data to train on",
    "sample": "text that a trained language model writes after a prompt",
    "prune": "a new run with fewer weights or channels",
    "quantize": "a new run with weights of one byte, for serving",
    "export": "the trained network as ONNX, torch.export or safetensors, tried on real samples",
    "diagnose": "profile a run with these settings: what it waits for, and the gain without",
    "verify": "check that this config is trained exactly: accumulation, ranks, resume, evaluation, padding",
    "autotune": "try what diagnose names, and write the fastest settings as a preset",
    "report": "draw the plots of a run again, or compare several",
    "ls": "the runs and sweeps below a folder: state, best value, what differs",
    "compare": "what differs between runs, and what came out",
    "watch": "follow a run or a sweep from another terminal, through its folder",
    "import": "the weights of a foreign torch file as safetensors, without running anything of it",
    "convert": "data in another format: .npy, HDF5, Parquet, LMDB, TFRecord or tar shards",
    "cache": "list the caches on disks and their sizes; clear: remove those that no run uses",
    "help": "the manual, by topic",
}

MODULES = {  # where the file, or the function, has another name
    "evaluate": "cli.predict_command:evaluate_command",
    "help": "cli.manual_pages",
    "again": "cli.resume_command:again",
    "compare": "cli.report_command:compare_command",
    "diagnose": "benchmark.diagnose_command",
    "autotune": "benchmark.autotune_command",
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


def read_as(words: list[str]) -> list[str]:
    """Return the words of ours for a first word that other programs use, as `fit`; others as they are."""
    meant = MEANT.get(words[0]) if words and words[0] not in COMMANDS else None
    if meant is None or (meant and not meant[0].startswith("-") and meant[0] not in COMMANDS):
        return words
    if words[1:2] and words[1].startswith("="):  # lr =3 is a setting with a space
        return words
    say(f"note: trainrun {words[0]} is read as: {' '.join(['trainrun', *meant])}", file=sys.stderr)
    return [*meant, *words[1:]]


def command_of(words: list[str]) -> Callable[[], int]:
    """Return what a command line asks for. Raise ConfigError for a word that is no command."""
    words = read_as(words)
    if words[:1] == ["--completion"]:
        return lambda: run_completion(words[1:])
    if words and words[0] in COMMANDS:
        module, _, name = MODULES.get(words[0], f"cli.{words[0]}_command").partition(":")
        return lambda: run_command(module, name or "main", words[1:])
    if words and re.fullmatch(r"[a-z][\w-]*", words[0]) and not "".join(words[1:2]).startswith("="):
        raise ConfigError(no_command(words[0]))
    if "--help" in words or "-h" in words:
        return lambda: show_help(words)
    if "--version" in words:
        return show_version
    return lambda: run_command("cli.train_command", "main", words)


def run_command(module: str, name: str, words: list[str]) -> int:
    """Import a command, which the others do without, and run it."""
    if module != "cli.train_command":
        add_import_paths([])
    command: Callable[[list[str]], int] = getattr(importlib.import_module(f"trainrun.{module}"), name)
    return command(words)


def show_help(words: list[str]) -> int:
    from trainrun.cli.long_text import show_text
    from trainrun.config.argv import conf_dir, split_command_line, user_conf_dirs
    from trainrun.config.help_text import help_text

    command_line = split_command_line(words)
    folders = [*user_conf_dirs(command_line.config_dirs, Path.cwd()), conf_dir()]
    show_text(help_text(command_line.overrides, COMMANDS, folders))
    return EXIT_DONE


def run_completion(words: list[str]) -> int:
    from trainrun.cli.completion import completion_command

    return completion_command(words, list(COMMANDS))


def show_version() -> int:
    from trainrun.folder.environment import version_line

    say(version_line())
    return EXIT_DONE


def no_command(word: str) -> str:
    from trainrun.config.argv import conf_dir
    from trainrun.config.validate import nearest

    if (conf_dir() / word).is_dir():
        return f"{word}: is a group; choose with {word}=..., see trainrun --help {word}"
    if word in FINE_TUNE:
        return (
            f"{word}: no such command; begin with the weights of a run: trainrun init_from=RUN_DIR data=..."
        )
    if suggestion := nearest(word, [*COMMANDS, *MEANT]):
        return f"{word}: no such command.{suggestion} All commands: trainrun --help"
    return (
        f"{word}: no such command. Commands: {', '.join(COMMANDS)}. Settings are written as key=value; "
        "see trainrun --help"
    )


def report_crash(error: Exception) -> int:
    """An exception of the user's own code: their lines of it. A bug of ours keeps the whole traceback."""
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


def add_import_paths(extra: list[str]) -> list[str]:
    """The working directory and folders next to --config-dir, at the end: they hide no installed module."""
    paths = [] if getattr(sys.flags, "safe_path", False) else [os.getcwd(), *extra]
    sys.path += [path for path in paths if path not in sys.path]
    return paths
