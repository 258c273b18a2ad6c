"""`trainrun --help`, and the message for a first word that is not a command. No torch."""

from __future__ import annotations

from pathlib import Path

from trainrun.cli.long_text import show_text
from trainrun.cli.main import COMMANDS, FINE_TUNE, MEANT
from trainrun.config.argv import conf_dir, split_command_line, user_conf_dirs
from trainrun.config.help_text import help_text
from trainrun.config.validate import nearest
from trainrun.errors import EXIT_DONE, ConfigError


def show_help(words: list[str]) -> int:
    """Print `trainrun --help`, or the help of the settings and options typed beside it."""
    command_line = split_command_line(words)
    folders = [*user_conf_dirs(command_line.config_dirs, Path.cwd()), conf_dir()]
    show_text(help_text(command_line.overrides, COMMANDS, folders))
    return EXIT_DONE


def refuse_command(words: list[str]) -> int:
    """Raise ConfigError for an unknown command, with the most similar one."""
    word = words[0]
    if (conf_dir() / word).is_dir():
        raise ConfigError(f"{word}: is a group; choose with {word}=..., see trainrun --help {word}")
    if word in FINE_TUNE:
        raise ConfigError(
            f"{word}: no such command; begin with the weights of a run: trainrun init_from=RUN_DIR data=..."
        )
    if suggestion := nearest(word, [*COMMANDS, *MEANT]):
        raise ConfigError(f"{word}: no such command.{suggestion} All commands: trainrun --help")
    raise ConfigError(
        f"{word}: no such command. Commands: {', '.join(COMMANDS)}. Settings are written as key=value; "
        "see trainrun --help"
    )
