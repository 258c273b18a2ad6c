"""`trainrun --help`, and the message for an unknown command. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path

from trainrun.cli.long_text import print_long_text
from trainrun.cli.main import COMMANDS, FINE_TUNE, MEANT
from trainrun.config.argv import find_conf_dir, find_user_conf_dirs, split_command_line
from trainrun.config.help_text import build_help_text
from trainrun.config.validate import suggest_closest_name
from trainrun.errors import EXIT_DONE, ConfigError


def print_help(words: list[str]) -> int:
    """Print `trainrun --help`, or the help of the settings and options typed after it. Return the exit code."""
    command_line = split_command_line(words)
    folders = [*find_user_conf_dirs(command_line.config_dirs, Path.cwd()), find_conf_dir()]
    print_long_text(build_help_text(command_line.overrides, COMMANDS, folders))
    return EXIT_DONE


def raise_unknown_command(words: list[str]) -> int:
    """Raise ConfigError for an unknown command, with the most similar command."""
    word = words[0]
    if (find_conf_dir() / word).is_dir():
        raise ConfigError(f"{word}: is a group; choose with {word}=..., see trainrun --help {word}")
    if word in FINE_TUNE:
        raise ConfigError(
            f"{word}: no such command; to start from the weights of a run: trainrun init_from=RUN_DIR data=..."
        )
    if suggestion := suggest_closest_name(word, [*COMMANDS, *MEANT]):
        raise ConfigError(f"{word}: no such command.{suggestion} All commands: trainrun --help")
    raise ConfigError(
        f"{word}: no such command. Commands: {', '.join(COMMANDS)}. Settings are written as key=value; "
        "see trainrun --help"
    )
