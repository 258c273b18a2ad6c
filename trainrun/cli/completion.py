"""Shell scripts that complete commands, options and settings.

The scripts contain all names, so the Tab key does not start Python.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainrun.cli.main import COMMANDS
from trainrun.config.argv import find_conf_dir, find_user_conf_dirs, list_groups, list_options
from trainrun.config.help_text import WITH_OWN_KEYS, format_option_settings, iterate_setting_rows
from trainrun.config.schema import settings
from trainrun.config.validate import suggest_closest_name
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.limits import list_choices
from trainrun.output import say

FLAGS = ("--help", "--version", "--multirun", "--cfg", "--config-dir", "--completion", "--summary", "--json")
NO_RUN = (
    "cache",
    "convert",
    "diagnose",
    "help",
    "init",
    "autotune",
    "race",
    "verify",
)  # other commands take a folder

BASH = """\
# completion of trainrun for bash: eval "$(trainrun --completion bash)"
_trainrun() {{
    local line=${{COMP_LINE:0:COMP_POINT}} cur names
    cur=${{line##*[[:space:]]}}
    case $cur in
        -*) names={flags} ;;
        *=*) names={values} ;;
        *.*) names={keys} ;;
        *) names={heads}
           [ "$COMP_CWORD" -le 1 ] && names="$names "{commands} ;;
    esac
    COMPREPLY=($(compgen -W "$names" -- "$cur"))
    case " "{with_run}" " in *" ${{COMP_WORDS[1]}} "*)
        [ "$COMP_CWORD" -gt 1 ] && COMPREPLY+=($(compgen -d -S / -- "$cur")) ;;
    esac
    case ${{COMPREPLY[0]}} in *[=./]) compopt -o nospace ;; esac
    case $cur in *=*) COMPREPLY=("${{COMPREPLY[@]#*=}}") ;; esac
}}
complete -o default -F _trainrun trainrun
"""

ZSH = """\
#compdef trainrun
# completion of trainrun for zsh: eval "$(trainrun --completion zsh)"
_trainrun() {{
    local cur=${{words[CURRENT]}}
    case $cur in
        -*) compadd -- {flags_list} ;;
        *=*) compadd -- {values_list} || {{ compset -P '*='; _files; }} ;;
        *.*) compadd -S '' -- {keys_list} ;;
        *) compadd -S '' -- {heads_list}
           if (( CURRENT == 2 )); then compadd -- {commands_list}; else _files; fi ;;
    esac
}}
compdef _trainrun trainrun
"""

FISH = """\
# completion of trainrun for fish: trainrun --completion fish | source
function __trainrun_names
    switch (commandline -ct)
        case '*=*'
            printf '%s\\n' {values_list}
        case '*.*'
            printf '%s\\n' {keys_list}
        case '*'
            printf '%s\\n' {heads_list}
    end
end
complete -c trainrun -a '(__trainrun_names)'
complete -c trainrun -n __fish_use_subcommand -a {commands}
{fish_flags}
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


class CompletionNames(NamedTuple):
    """The names to complete. heads: `model=` and `trainer.`. keys: `trainer.max_epochs=`. values: `model=cnn`."""

    commands: list[str]
    heads: list[str]
    keys: list[str]
    values: list[str]


def print_completion_script(words: list[str]) -> int:
    """Print the completion script of a shell, and return the exit code. Raise ConfigError for an unknown shell."""
    shell = words[0] if words else ""
    if shell not in SCRIPTS:
        raise ConfigError(
            f"--completion {shell}: must be one of {', '.join(SCRIPTS)}.{suggest_closest_name(shell, SCRIPTS)}"
        )
    say(
        format_completion_script(
            shell, collect_names(list(COMMANDS), [*find_user_conf_dirs([], Path.cwd()), find_conf_dir()])
        ),
        end="",
    )
    return EXIT_DONE


def collect_names(commands: Sequence[str], folders: list[Path]) -> CompletionNames:
    """Return the names of all commands, of groups with their options, and of settings with their closed choices."""
    known_groups = list_groups(folders)
    values = [f"{group}={option}" for group in known_groups for option in list_options(group, folders)]
    option_keys = [
        line.strip().partition("=")[0]
        for group in WITH_OWN_KEYS
        for option in list_options(group, folders)
        for line in format_option_settings(group, option, folders)[1:]
    ]
    keys = [*dict.fromkeys([*(name for name, _, _ in iterate_setting_rows()), *option_keys])]
    sections = {name.partition(".")[0] for name in keys if "." in name}
    for key, setting in settings().items():
        choices = ("true", "false") if setting.kind is bool else list_choices(setting.kind)
        values += [f"{key}={choice}" for choice in choices if key not in known_groups]
    single = [f"{name}=" for name in (*keys, "output_dir") if "." not in name]
    heads = [*(f"{group}=" for group in known_groups), *(f"{name}." for name in sorted(sections)), *single]
    return CompletionNames(list(commands), list(dict.fromkeys(heads)), [f"{key}=" for key in keys], values)


def format_completion_script(shell: str, names: CompletionNames) -> str:
    """Return the completion script of a shell, with all names in it."""
    lists = {**names._asdict(), "flags": FLAGS}
    lists["with_run"] = [name for name in names.commands if name not in NO_RUN]
    texts = {name: shlex.quote(" ".join(names_of_kind)) for name, names_of_kind in lists.items()}
    texts |= {f"{name}_list": shlex.join(names_of_kind) for name, names_of_kind in lists.items()}
    fish_flags = "\n".join(f"complete -c trainrun -l {flag.removeprefix('--')}" for flag in FLAGS)
    return SCRIPTS[shell].format(**texts, fish_flags=fish_flags)
