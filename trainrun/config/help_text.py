"""`trainrun --help`, from the comments of the config files and `config/schema.py`; long texts on a terminal; a Tab.

On a terminal a text has hanging indents, rendered Markdown, and a pager if it is longer than the screen. In a pipe or a
file it stays as it is, a setting a line, so that other programs can search it. No torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainrun.config.argv import conf_dir, groups, options, user_conf_dirs
from trainrun.config.schema import RunConfig, settings
from trainrun.config.validate import describe_kind, nearest
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.limits import Setting, choices_of
from trainrun.output import encodable, plain, print_plain, say

WITH_OWN_KEYS = ("data", "model", "task", "optimizer", "scheduler")  # groups whose options bring keys along

EXAMPLES = """\
usage: trainrun [group=option ...] [key=value ...]     one run
       trainrun --multirun optimizer.lr=1e-3,3e-4      every combination
       trainrun COMMAND RUN_DIR ...                    something with a finished run
       trainrun --help GROUP                           the options of one group, as --help model
       trainrun --help SECTION                         its settings, as --help trainer; --help all: every setting
       trainrun --help GROUP=OPTION                    the settings of one option, as --help model=gpt
       trainrun --cfg job [key=value ...]              the composed config, without running
       trainrun help [TOPIC]                           the manual, by topic
       trainrun --completion bash                      a script for Tab; also zsh and fish

  trainrun                                             digits, a small network, 20 epochs
  trainrun data=fashion_mnist model=cnn preset=fast
  trainrun parallel=ddp precision=16-mixed
  trainrun model=my_net.Net model.width=9              your own class, from the folder you are in
"""


def help_text(topics: list[str], commands: dict[str, str], folders: list[Path]) -> str:
    """The overview, one group with its options, one section or option with its settings, one setting, or all.

    folders: with configs, the user's first, ours last.
    """
    known_groups, topic = groups(folders), topics[0] if topics else ""
    sections, keys = _sections(), _lines()
    group, equals, option = topic.partition("=")
    if equals and option in _option_files(group, folders):
        return "\n".join(option_lines(group, option, folders))
    if topic in known_groups or topic in sections:
        found = [_group(topic, folders)] if topic in known_groups else []
        return "\n\n".join([*found, *(["\n".join(sections[topic])] if topic in sections else [])])
    if topic == "all":
        own = [
            "\n".join(option_lines(group, name, folders))
            for group in WITH_OWN_KEYS
            for name in sorted(_option_files(group, folders))
        ]
        return "\n".join([*keys, "", *own])
    if found := [line for line in keys if line.partition("=")[0] == topic]:
        return found[0]
    if topic in commands:
        return f"trainrun {topic}: {commands[topic]}; see trainrun {topic} --help"
    if topic:
        known = [*known_groups, *(name for name in sections if name not in known_groups), "all"]
        near = nearest(topic, [*known, *(line.partition("=")[0] for line in keys)])
        if equals and group in known_groups:
            known = [f"{group}={name}" for name in sorted(_option_files(group, folders))]
            near = nearest(topic, known)
        raise ConfigError(f"--help {topic}: no such topic.{near} Choose from: {', '.join(known)}")
    lines = [EXAMPLES, "groups (the default comes first):"]
    defaults = _defaults(conf_dir())
    for group in known_groups:
        options = sorted(_option_files(group, folders), key=lambda name: (name != defaults.get(group), name))
        lines.append(f"  {group:<12} {', '.join(options)}")
    lines.append("\ncommands:")
    lines += [f"  {name:<12} {text}" for name, text in commands.items()]
    return "\n".join(lines)


def _group(group: str, folders: list[Path]) -> str:
    lines, options = [f"{group}="], _option_files(group, folders)
    width = max([16, *map(len, options)])
    for name, path in sorted(options.items()):
        lines.append(f"  {name:<{width}} {first_comment(path)}".rstrip())
    return "\n".join(lines)


def _option_files(group: str, folders: list[Path]) -> dict[str, Path]:
    """Those of an earlier folder hide those of a later one."""
    return {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}


def first_comment(path: Path) -> str:
    """What an option file says of itself."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""


def _defaults(folder: Path) -> dict[str, str]:
    pairs = [
        line.strip("- ").partition("#")[0] for line in (folder / "trainrun.yaml").read_text().splitlines()
    ]
    return {key.strip(): value.strip() for key, _, value in (pair.partition(":") for pair in pairs) if value}


def option_lines(group: str, option: str, folders: list[Path]) -> list[str]:
    """Return the settings that one option of a group brings along, with what its file says of them."""
    path = _option_files(group, folders)[option]
    lines, parents = [f"with {group}={option}: {first_comment(path)}"], [(-1, group)]
    text = path.read_text(encoding="utf-8")
    if "# @package _global_" in text:
        parents = [(-1, "")]
    for line in text.splitlines():
        key, colon, rest = line.partition(":")
        indent = len(key) - len(key.lstrip())
        if not colon or key.lstrip()[:1] in ("#", "-", "") or key.strip() == "defaults":
            continue
        while parents[-1][0] >= indent:
            parents.pop()
        name = f"{parents[-1][1]}.{key.strip()}".lstrip(".")
        value, _, comment = rest.partition(" #")
        if value.strip():
            lines.append(_line(f"  {name}={value.strip()}", comment.strip()))
        else:
            parents.append((indent, name))
    return lines


def _sections() -> dict[str, list[str]]:
    """By name the lines of every section, `trainer` and `trainer.compile`."""
    return {key: _lines(f"{key}.") for key, found in settings().items() if found.section is not None}


def _lines(prefix: str = "") -> list[str]:
    return [_line(f"{name}={value}", text) for name, value, text in setting_rows() if name.startswith(prefix)]


def setting_rows(schema: type = RunConfig) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning with what is allowed, for every setting of the config."""
    for key, found in settings(schema).items():
        if found.section is None:
            default = {"None": "null", "True": "true", "False": "false"}.get(
                str(found.default), str(found.default)
            )
            yield f"{found.typed}.NAME" if found.typed else key, default, found.help + _allowed(found)


def _allowed(found: Setting) -> str:
    """What a number or a name may be; the other types show in the default."""
    text = re.sub(r"^(one of|a whole number|a number)(, )?|, or null$", "", describe_kind(found.kind)).strip()
    limited = (
        choices_of(found.kind) or " or more" in text or "than" in text or "below" in text or "at most" in text
    )
    return f" ({text.removeprefix('or ')})" if limited and text else ""


def _line(setting: str, text: str) -> str:
    return f"{setting:<46}  {text}".rstrip()


# Long texts on a terminal

NARROW_COLUMN = 24  # of the second column where the window is narrow
COMMAND_STARTS = ("trainrun ", "python ", "torchrun ", "pip ")
UNQUOTED_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
WIDEST_PROSE = 100  # columns; longer lines of prose are hard to read
COLUMNS = re.compile(r"( *)(\S.*?)(?: {2,}(\S.*))?$")


def show_text(text: str) -> None:
    """Show a help text, a part of which may be Markdown: all from its first heading on."""
    if not sys.stdout.isatty():
        say(text)
        return
    size = shutil.get_terminal_size()
    lists, heading, pages = text.partition("\n# " if text.startswith("# ") else "\n## ")
    if text.startswith("#"):
        lists, heading, pages = "", "", text
    parts = [wrap_columns(plain(lists), size.columns)] if lists else []
    if pages:
        parts.append(rendered(heading.lstrip("\n") + pages, size.columns))
    show_in_pager("\n".join(parts), size.lines)


def wrap_columns(text: str, width: int) -> str:
    """Return the lines of a list, at most `width` wide; the second column of a line is wrapped below itself."""
    lines = text.splitlines()
    too_wide = {second_column(line) for line in lines if len(line) > width}
    return "\n".join(part for line in lines for part in wrapped_line(line, width, too_wide))


def second_column(line: str) -> int:
    """Return where the second column of a line begins; -1 without one."""
    match = COLUMNS.fullmatch(line.rstrip())
    return -1 if match is None else match.start(3)


def wrapped_line(line: str, width: int, too_wide: set[int]) -> list[str]:
    """Return one line as several. Words that are longer than the window stay whole.

    too_wide: the second columns of lists with a line that does not fit; the whole list gets a narrower first column.
    """
    match = COLUMNS.fullmatch(line.rstrip())
    if match is None:
        return [line.rstrip()]
    indent, head, body = match[1], match[2], match[3]
    if body is None:
        return filled(head, indent, indent + "    ", width)
    column = match.start(3)
    if column in too_wide and column > 0.45 * width:
        column = min(NARROW_COLUMN, width // 3)
    first = indent + head
    if len(first) + 2 > column:
        return [
            *filled(head, indent, indent + "    ", width),
            *filled(body, " " * column, " " * column, width),
        ]
    return filled(body, first.ljust(column), " " * column, width)


def filled(text: str, first: str, others: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(width, len(others) + 10), initial_indent=first, subsequent_indent=others,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def wrap_command(line: str, width: int) -> list[str]:
    """Return a command as lines that a shell joins again, with a backslash at each end; other code as it is."""
    if len(line) <= width or not line.startswith(COMMAND_STARTS):
        return [line]
    command, separator, comment = line.partition(" # ")
    if separator:
        return [f"# {comment.strip()}", *wrap_command(command.rstrip(), width)]
    words = UNQUOTED_WORD.findall(line)
    lines = [words[0]]
    for word in words[1:]:
        if len(f"{lines[-1]} {word} \\") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return [f"{part} \\" for part in lines[:-1]] + lines[-1:]


def rendered(markdown: str, width: int) -> str:
    """Return Markdown as a terminal shows it, without colours if NO_COLOR is set."""
    from rich.console import Console
    from rich.markdown import Markdown, MarkdownElement
    from rich.text import Text
    from rich.theme import Theme

    class WholeLines(MarkdownElement):
        """A block of code: a command can be copied, and other lines are not broken."""

        new_line = True

        def on_text(self, context: Any, text: Any) -> None:
            self.text = str(text)

        def __rich_console__(self, console: Any, options: Any) -> Any:
            indent = "    "
            code = self.text.rstrip().splitlines()
            lines = [part for line in code for part in wrap_command(line, options.max_width - len(indent))]
            text = "\n".join(indent + line for line in lines)
            yield Text(text, no_wrap=True, overflow="ignore")

    class Page(Markdown):
        elements = {**Markdown.elements, "fence": WholeLines, "code_block": WholeLines}

    theme = Theme({"markdown.code": "bold", "markdown.h1": "bold", "markdown.h2": "bold underline"})
    console = Console(
        file=io.StringIO(), force_terminal=True, width=min(width, WIDEST_PROSE), theme=theme, highlight=False
    )
    with console.capture() as capture:
        console.print(Page(markdown, hyperlinks=False), crop=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def show_in_pager(text: str, screen_lines: int) -> None:
    """Print a text that fits the screen; give a longer one to `$PAGER`, or to `less` if it is installed."""
    command = shlex.split(os.environ.get("PAGER", "less"))
    if text.count("\n") + 2 > screen_lines and command and shutil.which(command[0]):
        environment = {"LESS": "-FRX", **os.environ}
        with contextlib.suppress(BrokenPipeError):  # the pager was left before the end
            shown = encodable(text, sys.stdout.encoding or "utf-8")
            subprocess.run(command, input=shown, text=True, env=environment, errors="replace", check=False)
        return
    print_plain(text)


# Completion: all names are in the script, so that a Tab starts no Python

FLAGS = ("--help", "--version", "--multirun", "--cfg", "--config-dir", "--completion", "--summary")
NO_RUN = (
    "cache",
    "convert",
    "diagnose",
    "help",
    "import",
    "autotune",
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
        [ "$COMP_CWORD" -gt 1 ] && COMPREPLY+=($(compgen -d -- "$cur")) ;;
    esac
    case ${{COMPREPLY[0]}} in *[=.]) compopt -o nospace ;; esac
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
        *=*) compadd -- {values_list} || _files ;;
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


class Names(NamedTuple):
    """What is completed. heads: `model=` and `trainer.`; keys: `trainer.max_epochs=`; values: `model=cnn`."""

    commands: list[str]
    heads: list[str]
    keys: list[str]
    values: list[str]


def completion_command(words: Sequence[str], commands: Sequence[str]) -> int:
    """Print the script of a shell. Raise ConfigError for a shell that is not known."""
    shell = words[0] if words else ""
    if shell not in SCRIPTS:
        raise ConfigError(
            f"--completion {shell}: must be one of {', '.join(SCRIPTS)}.{nearest(shell, SCRIPTS)}"
        )
    say(completion_script(shell, all_names(commands, [*user_conf_dirs([], Path.cwd()), conf_dir()])), end="")
    return EXIT_DONE


def all_names(commands: Sequence[str], folders: list[Path]) -> Names:
    """Return the names of all commands, groups with their options, and settings with the values that are closed."""
    known_groups = groups(folders)
    values = [f"{group}={option}" for group in known_groups for option in options(group, folders)]
    own = [
        line.strip().partition("=")[0]
        for group in WITH_OWN_KEYS
        for option in options(group, folders)
        for line in option_lines(group, option, folders)[1:]
    ]
    keys = [*dict.fromkeys([*(name for name, _, _ in setting_rows()), *own])]
    sections = {name.partition(".")[0] for name in keys if "." in name}
    for key, setting in settings().items():
        choices = ("true", "false") if setting.kind is bool else choices_of(setting.kind)
        values += [f"{key}={choice}" for choice in choices if key not in known_groups]
    single = [f"{name}=" for name in (*keys, "output_dir") if "." not in name]
    heads = [*(f"{group}=" for group in known_groups), *(f"{name}." for name in sorted(sections)), *single]
    return Names(list(commands), list(dict.fromkeys(heads)), [f"{key}=" for key in keys], values)


def completion_script(shell: str, names: Names) -> str:
    """Return the script of a shell, with all names in it."""
    lists = {**names._asdict(), "flags": FLAGS}
    lists["with_run"] = [name for name in names.commands if name not in NO_RUN]
    texts = {name: shlex.quote(" ".join(found)) for name, found in lists.items()}
    texts |= {f"{name}_list": shlex.join(found) for name, found in lists.items()}
    fish_flags = "\n".join(f"complete -c trainrun -l {flag.removeprefix('--')}" for flag in FLAGS)
    return SCRIPTS[shell].format(**texts, fish_flags=fish_flags)
