"""The texts of `trainrun --help`, built from the comments of the config files and from `config/schema.py`.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from trainrun.config.argv import find_conf_dir, list_groups
from trainrun.config.schema import RunConfig, settings
from trainrun.config.validate import describe_kind, suggest_closest_name
from trainrun.errors import ConfigError
from trainrun.limits import Setting, list_choices

WITH_OWN_KEYS = ("data", "model", "task", "optimizer", "scheduler")  # groups whose options bring keys along

EXAMPLES = """\
usage: trainrun [group=option ...] [key=value ...]     one run
       trainrun --multirun optimizer.lr=1e-3,3e-4      every combination
       trainrun COMMAND RUN_DIR ...                    a command on a finished run
       trainrun --help GROUP                           the options of one group, as --help model
       trainrun --help SECTION                         its settings, as --help trainer; --help all: every setting
       trainrun --help GROUP=OPTION                    the settings of one option, as --help model=gpt
       trainrun --cfg job [key=value ...]              the composed config, without running
       trainrun help [TOPIC]                           the manual, by topic
       trainrun COMMAND ... --json                     the result as one JSON object; see trainrun help agents
       trainrun --completion bash                      a script for Tab; also zsh and fish

  trainrun                                             digits, a small network, 20 epochs
  trainrun data=fashion_mnist model=cnn preset=fast
  trainrun parallel=ddp precision=16-mixed
  trainrun model=my_net.Net model.width=9              your own class, from the folder you are in
"""


def build_help_text(topics: list[str], commands: dict[str, str], folders: list[Path]) -> str:
    """Return the help of one group, section, option or setting, of all settings, or an overview if no topic is
    given.

    folders: of configs, the user's first, trainrun's last.
    """
    known_groups, topic = list_groups(folders), topics[0] if topics else ""
    sections, keys = _format_sections(), _format_settings()
    group, equals, option = topic.partition("=")
    if equals and option in _find_option_files(group, folders):
        return "\n".join(format_option_settings(group, option, folders))
    if topic in known_groups or topic in sections:
        parts = [_format_group(topic, folders)] if topic in known_groups else []
        return "\n\n".join([*parts, *(["\n".join(sections[topic])] if topic in sections else [])])
    if topic == "all":
        option_texts = [
            "\n".join(format_option_settings(group, name, folders))
            for group in WITH_OWN_KEYS
            for name in sorted(_find_option_files(group, folders))
        ]
        return "\n".join([*keys, "", *option_texts])
    if parts := [line for line in keys if line.partition("=")[0] == topic]:
        return parts[0]
    if topic in commands:
        return f"trainrun {topic}: {commands[topic]}; see trainrun {topic} --help"
    if topic:
        topic_names = [*known_groups, *(name for name in sections if name not in known_groups), "all"]
        near = suggest_closest_name(topic, [*topic_names, *(line.partition("=")[0] for line in keys)])
        if equals and group in known_groups:
            topic_names = [f"{group}={name}" for name in sorted(_find_option_files(group, folders))]
            near = suggest_closest_name(topic, topic_names)
        raise ConfigError(f"--help {topic}: no such topic.{near} Choose from: {', '.join(topic_names)}")
    lines = [EXAMPLES, "groups (the default comes first):"]
    defaults = _read_default_options(find_conf_dir())
    for group in known_groups:
        options = sorted(
            _find_option_files(group, folders), key=lambda name: (name != defaults.get(group), name)
        )
        lines.append(f"  {group:<12} {', '.join(options)}")
    lines.append("\ncommands:")
    lines += [f"  {name:<12} {text}" for name, text in commands.items()]
    return "\n".join(lines)


def _format_group(group: str, folders: list[Path]) -> str:
    lines, options = [f"{group}="], _find_option_files(group, folders)
    width = max([16, *map(len, options)])
    for name, path in sorted(options.items()):
        lines.append(f"  {name:<{width}} {read_first_comment(path)}".rstrip())
    return "\n".join(lines)


def _find_option_files(group: str, folders: list[Path]) -> dict[str, Path]:
    """Return the files of a group's options by name. A file in an earlier folder hides its namesake in a later
    folder.
    """
    return {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}


def read_first_comment(path: Path) -> str:
    """Return the first comment of an option file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""


def _read_default_options(folder: Path) -> dict[str, str]:
    pairs = [
        line.strip("- ").partition("#")[0] for line in (folder / "trainrun.yaml").read_text().splitlines()
    ]
    return {key.strip(): value.strip() for key, _, value in (pair.partition(":") for pair in pairs) if value}


def format_option_settings(group: str, option: str, folders: list[Path]) -> list[str]:
    """Return the lines of one option's help: its settings with the comments of its file."""
    path = _find_option_files(group, folders)[option]
    lines, parents = [f"with {group}={option}: {read_first_comment(path)}"], [(-1, group)]
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
            lines.append(_format_setting(f"  {name}={value.strip()}", comment.strip()))
        else:
            parents.append((indent, name))
    return lines


def _format_sections() -> dict[str, list[str]]:
    """Return the help lines of every section by name, such as `trainer` and `trainer.compile`."""
    return {
        key: _format_settings(f"{key}.") for key, setting in settings().items() if setting.section is not None
    }


def _format_settings(prefix: str = "") -> list[str]:
    return [
        _format_setting(f"{name}={value}", text)
        for name, value, text in iterate_setting_rows()
        if name.startswith(prefix)
    ]


def iterate_setting_rows(schema: type = RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the default, and the meaning with the allowed values of every setting."""
    for key, setting in settings(schema).items():
        if setting.section is None:
            default = {"None": "null", "True": "true", "False": "false"}.get(
                str(setting.default), str(setting.default)
            )
            yield (
                f"{setting.typed}.NAME" if setting.typed else key,
                default,
                setting.help + _format_allowed_values(setting),
            )


def _format_allowed_values(found: Setting) -> str:
    """Return the allowed values of a number or a closed choice as ` (...)`; "" for other settings."""
    text = re.sub(r"^(one of|a whole number|a number)(, )?|, or null$", "", describe_kind(found.kind)).strip()
    limited = (
        list_choices(found.kind)
        or " or more" in text
        or "than" in text
        or "below" in text
        or "at most" in text
    )
    return f" ({text.removeprefix('or ')})" if limited and text else ""


def _format_setting(setting: str, text: str) -> str:
    return f"{setting:<46}  {text}".rstrip()
