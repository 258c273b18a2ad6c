"""Prepare the command line for Hydra: separate flags, translate other trainers' names, quote numbers and paths.

Hydra cannot do this itself. It reads `precision=32` as a number and stops, allows no flags between overrides, and
parses lists, quotes and equal signs in a path. This module works on plain strings. It also finds the folders of
config options: the user's folders, which are searched first, and trainrun's own.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainrun.config.aliases import (
    CASES,
    OPTIONS,
    collect_aliases,
    load_replacement_hints,
    resolve_alias,
    resolve_value_alias,
    translate_setting,
)
from trainrun.config.schema import is_tracker, list_open_nodes, settings
from trainrun.config.validate import suggest_closest_name
from trainrun.errors import ConfigError
from trainrun.instantiate import CALLED
from trainrun.limits import NAMED, NODE, NODES

WARMUP_UNITS = {"steps": "0", "ratio": "null", "epochs": "null"}
OWN_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
RENAME = "init.rename"
DATA_SETS = ("data.train", "data.val", "data.test")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
SHARE_OF_ALL = re.compile(
    r"(eval|save|logging)_steps=0?\.\d+"
)  # of all steps, by transformers; not known here
CUSTOM = "custom"  # the option of a group that holds nothing but what the user names

# data.path, data.train.val_path, data.train.labels, ... ; init_from, ckpt_path and task.teacher
_PATHS = re.compile(
    r"data\.(?:\w+\.)*(?:\w*path|cache_dir|tokenizer|labels|root|folder|weights)|init_from|ckpt_path|task\.teacher"
)
TRIAL = re.compile(r"(trainer\.|--)?(fast[_-]dev|dry)[_-]run\b")  # wins over any length beside it


@dataclass
class CommandLine:
    """A parsed command line.

    own: the settings of the runner itself, such as its folder.
    notes: one line for each translated name.
    twice: one line for each key with two values. The last value is used. A program may append settings on purpose.
    typed: the text as typed, by translated setting.
    quantities: a description of the targets if they are real numbers and come from Python; else "".
    """

    flags: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    typed: dict[str, str] = field(default_factory=dict)
    quantities: str = ""

    def restore_typed_setting(self, fault: str) -> str:
        """Return a message about a setting with the key and the value as the user typed them."""
        head, must, allowed = fault.partition(": must be ")
        for word in self.overrides:
            key, _, value = word.lstrip("+").partition("=")
            if must and head.startswith(f"{key}=") and not head.endswith("(a text)"):
                fault = f"{key}={value}{must}{allowed}"
        for meant, word in self.typed.items():
            if fault.startswith((f"{meant}:", f"{meant}=")):
                fault = word + fault[len(meant) :]
        return fault


def split_command_line(argv: list[str]) -> CommandLine:
    """Split a command line into flags, overrides, and settings of the runner itself. They may come in any order."""
    words = CommandLine()
    if any(word[:1] == "-" for word in argv):
        parts = separate_flags(argv, list_groups([find_conf_dir()]))
        argv, words.flags, words.config_dirs, words.typed = parts
    for word in argv:
        key, _, value = word.partition("=")
        if key not in OWN_KEYS:
            words.overrides.append(word)
            continue
        if words.own.get(key, value) != value:
            words.twice.append(f"{key}={words.own[key]} and {word}: two values; leave one of them out")
        words.own[key] = value
    return words


def translate_overrides(
    words: CommandLine, is_option: Callable[[str, str], bool], is_group: Callable[[str], bool]
) -> None:
    """Replace other trainers' names, shorthands and numbers in `words.overrides`, and add a note for each."""
    words.overrides.sort(key=lambda word: bool(TRIAL.match(word)))  # the last of two values counts
    typed = {key: (value, f"{key}={value}") for key, value in words.own.items()}
    may_vary = not {"--multirun", "-m"}.isdisjoint(words.flags)
    cleared: list[str] = []
    overrides: list[str] = []
    for word, shown, is_noted in _translate_foreign_settings(words):
        meaning = interpret_setting(word, is_option, is_group, may_vary)
        if not is_noted and not meaning.is_as_typed(word, shown):
            words.notes.append(f"{shown} is read as {meaning.overrides[-1]}")
        for part in meaning.overrides:
            if part != shown:
                words.typed[part.lstrip("+")] = shown
            words.twice += _describe_conflicting_values(part, shown, typed)
        if meaning.own_key:
            words.own[meaning.own_key] = meaning.value
            continue
        if meaning.key in DATA_SETS[1:] and meaning.is_target:
            cleared.insert(0, f"{meaning.key}=null")  # the option's arguments are not those of another target
        overrides += meaning.overrides
    words.overrides = _add_custom_options(_add_ddp_mode(words, [*cleared, *overrides]), is_group)


@dataclass
class InterpretedSetting:
    """A typed setting and the overrides that it stands for.

    typed_key, value: the setting as typed.
    key: the setting for which `typed_key` stands.
    is_target: whether the value is the `_target_` of the node at the key.
    own_key: a setting of the runner itself, such as its folder; else "".
    """

    overrides: list[str]
    typed_key: str
    key: str
    value: str
    is_target: bool = False
    is_path: bool = False
    own_key: str = ""

    def is_as_typed(self, word: str, shown: str) -> bool:
        """Return whether no note is needed: the setting is unchanged, quoted, a documented short form, or the
        runner's own.
        """
        if self.own_key or (self.is_path and self.key == self.typed_key and word == shown):
            return True
        last = self.overrides[-1]
        short_forms = (
            f"{self.typed_key}._target_={self.value}",
            f"{self.typed_key}.train._target_={self.value}",
        )
        return last.removeprefix("+") in short_forms or last.replace('"', "") == shown.replace('"', "")


def interpret_setting(
    word: str, is_option: Callable[[str, str], bool], is_group: Callable[[str], bool], may_vary: bool
) -> InterpretedSetting:
    """Return the overrides for which one typed setting stands.

    may_vary: whether the command line is a sweep, in which commas separate values.
    """
    bare = word.lstrip("+~")
    sign = word[: len(word) - len(bare)]
    typed_key, equals, value = bare.partition("=")
    key = typed_key if SHARE_OF_ALL.fullmatch(bare) else resolve_alias(typed_key, is_group)
    setting = settings().get(key)
    meaning = InterpretedSetting([], typed_key, key, value)
    if key == "data" and not is_option(key, value) and is_file_name(value):
        meaning.overrides = [f"data.path={quote_path(value, may_vary)}"]
    elif is_group(key) and equals:
        meaning.overrides = [sign + part for part in _choose_option(key, value, is_option)]
    elif setting is not None and setting.short and equals and not set(value) & set("{(,$"):
        short = f"{key}.{setting.short}"
        meaning.overrides = [f"{short}={resolve_value_alias(short, value)}"]
    elif _accepts_target(key) and DOTTED.fullmatch(value) and not os.path.exists(value):
        meaning.overrides, meaning.is_target = [f"+{key}._target_={value}"], True
    elif key in OWN_KEYS:
        meaning.overrides, meaning.own_key = [f"{key}={value}"], key
    elif equals and (is_path_setting(key) or value.startswith("~")):  # of a home folder
        meaning.overrides, meaning.is_path = [f"{sign}{key}={quote_path(value, may_vary)}"], True
    else:
        value = resolve_value_alias(key, value)
        value = unquote_map_keys(value) if key == RENAME else value
        meaning.overrides = [sign + key + equals + value]
    return meaning


SEVERAL_DEVICES = r"\+*parallel\.devices=(0*([2-9]|[1-9]\d+)|\[[^,]+,.+\])"


def _add_ddp_mode(words: CommandLine, overrides: list[str]) -> list[str]:
    """Add `parallel.mode=ddp` if several devices are typed and no option of `parallel`."""
    several = [word for word in overrides if re.fullmatch(SEVERAL_DEVICES, word)]
    if not several or any(re.match(r"\+*parallel(\.mode)?=", word) for word in overrides):
        return overrides
    words.notes.append(f"{several[-1]} is read as {several[-1]} parallel.mode=ddp")
    return [*overrides, "parallel.mode=ddp"]


def _translate_foreign_settings(words: CommandLine) -> Iterator[tuple[str, str, bool]]:
    """Yield each setting, translated from another trainer's; the text as typed; and whether a note was added for it."""
    for word in words.overrides:
        shown, meant = words.typed.get(word, word), translate_setting(word)
        if meant != [word]:
            words.notes.append(f"{shown} is read as {' '.join(meant)}")
        yield from ((part, shown, meant != [word]) for part in meant)


def _accepts_target(key: str) -> bool:
    """Return whether a class may be chosen by `key=my_file.MyClass`.

    This holds for the keys of open nodes, and for arguments that take a class, such as `task.loss`.
    """
    section, _, name = key.rpartition(".")
    setting, above = settings().get(key), settings().get(section)
    if setting is not None:
        return setting.opens in (NODE, NAMED)
    if name in CALLED and any(f"{section}.".startswith(f"{node}.") for node in list_open_nodes()):
        return True
    return (above is not None and above.opens == NODES) or (is_tracker(key) and key.count(".") == 1)


def _describe_conflicting_values(meant: str, word: str, typed: dict[str, tuple[str, str]]) -> list[str]:
    """Return a message if an earlier override set the same key to another value; else [].

    typed: the value and the override as typed, by key.
    """
    key, equals, value = meant.lstrip("+").partition("=")
    if not equals or meant.startswith("~") or TRIAL.match(word):
        return []
    earlier_value, earlier_word = typed.setdefault(key, (value, word))
    fault = f"{earlier_word} and {word}: two values for {key}; leave one of them out"
    return [] if earlier_value == value else [fault]


def _choose_option(group: str, value: str, is_option: Callable[[str, str], bool]) -> list[str]:
    """Return the overrides that choose an option of a group. `value`: its name, an alias of it, or the path of a
    class.
    """
    if value.isidentifier() and value != "none" and is_option(group, value):
        return [f"{group}={value}"]
    return resolve_group_option(group, value, is_option)


def keep_one_warmup(overrides: list[str]) -> list[str]:
    """Clear the option's default warm-up if the user typed a warm-up in another unit."""
    units = {f"scheduler.warmup_{unit}": empty for unit, empty in WARMUP_UNITS.items()}
    named = {word.lstrip("+").partition("=")[0] for word in overrides} & set(units)
    if len(named) != 1:
        return overrides
    return overrides + [f"{key}={empty}" for key, empty in units.items() if key not in named]


def _add_custom_options(overrides: list[str], is_group: Callable[[str], bool]) -> list[str]:
    """Add the empty option `custom` for each group of which only a `_target_` is typed."""
    chosen = {word.partition("=")[0] for word in overrides}
    added = []
    for word in overrides:
        key = word.lstrip("+").partition("=")[0]
        group = key.partition(".")[0]
        is_own_target = key == f"{group}._target_" or re.fullmatch(r"data\.train\.(\w+\.)?_target_", key)
        if is_own_target and is_group(group) and group not in chosen:
            added.append(f"{group}={CUSTOM}")
            chosen.add(group)
    return added + overrides


def is_path_setting(key: str) -> bool:
    return _PATHS.fullmatch(key) is not None


def find_conf_dir() -> Path:
    """Return the folder of trainrun's config groups, in the installed package or beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "trainrun.yaml").is_file():
            return folder
    raise FileNotFoundError(f"trainrun's own config files are not in {here}: install the package again")


def list_groups(folders: list[Path]) -> list[str]:
    return sorted({item.name for folder in folders for item in folder.iterdir() if item.is_dir()})


def list_options(group: str, folders: list[Path]) -> list[str]:
    return sorted({item.stem for folder in folders for item in (folder / group).glob("*.yaml")})


def find_user_conf_dirs(extra: list[str], working_dir: Path) -> list[Path]:
    """Return the config folders of the user: each --config-dir, then ./conf if it has one of the config groups.

    Raise ConfigError for a --config-dir that does not exist.
    """
    # No link, but to itself.
    folders = [Path(os.path.realpath(os.path.expanduser(folder))) for folder in extra]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: no such folder")
    beside = (working_dir / "conf").resolve()
    if beside != find_conf_dir() and any(
        (beside / group).is_dir() for group in list_groups([find_conf_dir()])
    ):
        folders.append(beside)
    return folders


FLAGS = ("--help", "-h", "--version", "--multirun", "-m")
FLAGS_WITH_VALUE = ("--cfg", "-c", "--config-dir", "-cd")
SHORT_FLAGS = {"-b": "--batch_size", "-j": "--num_workers"}  # of timm and of torch's own examples


def separate_flags(
    argv: list[str], groups: list[str]
) -> tuple[list[str], list[str], list[str], dict[str, str]]:
    """Split arguments into settings, Hydra's flags and the folders of --config-dir.

    Also return the text as typed for each setting whose name was translated.
    """
    settings, flags, config_dirs, typed = [], [], [], {}
    faults, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        setting, shown = translate_flag(word, rest, groups)
        if setting:
            typed[setting], word = shown, setting
        if not word.startswith("-"):
            settings.append(word)
            continue
        flag, equals, value = word.partition("=")
        if flag in FLAGS_WITH_VALUE and not equals and rest:
            value = rest.pop(0)
        if fault := _explain_wrong_flag(word, flag, value):
            faults.append(fault)
        elif flag in ("--config-dir", "-cd"):
            config_dirs.append(value)
        else:
            flags += [flag, value] if value else [flag]
    if faults:
        raise ConfigError(*faults)
    return settings, flags, config_dirs, typed


def translate_flag(word: str, rest: list[str], groups: list[str]) -> tuple[str, str]:
    """Translate a flag such as `--batch-size 64` into (`batch_size=64`, the flag as typed).

    The value of the flag is removed from `rest`. `--fp16` is `fp16=true`, and `--no-shuffle` is `shuffle=false`.
    Return ("", "") if the flag is not a setting.
    """
    flag, equals, value = word.partition("=")
    flag = SHORT_FLAGS.get(flag, flag)
    if not flag.startswith("--") or flag in FLAGS + FLAGS_WITH_VALUE:
        return "", ""
    name = flag.removeprefix("--").replace("-", "_")
    if not _is_known_name(name, groups):
        positive = name.removeprefix("no_")
        is_negated = positive != name and not equals and _is_known_name(positive, groups)
        return (f"{positive}=false", word) if is_negated else ("", "")
    if equals:
        return f"{name}={value}", word
    has_value = bool(rest) and not re.search(r"=|^--?[A-Za-z]", rest[0])
    if not has_value:
        return f"{name}=true", word
    value = rest.pop(0)
    return f"{name}={value}", f"{word} {value}"


def _is_known_name(name: str, groups: list[str]) -> bool:
    """Return whether a name is a setting, a group or another trainer's name. A name with a dot counts as a setting."""
    if "." in name or name in settings() or name in collect_aliases() or name in CASES or name in groups:
        return True
    return name in load_replacement_hints() or any(key.endswith(f".{name}") for key in settings())


def _explain_wrong_flag(word: str, flag: str, value: str) -> str:
    """Return the message for a wrong argument that begins with a dash; "" if it is right."""
    if flag not in FLAGS + FLAGS_WITH_VALUE:
        bare = word.lstrip("-")
        is_setting = "=" in word or "." in bare or bare in collect_aliases()
        near = suggest_closest_name(flag, FLAGS + FLAGS_WITH_VALUE)
        if is_setting:
            near = f" A setting is written without dashes: {bare}{'' if '=' in word else '=VALUE'}."
        return f"{word}: no such flag.{near} See trainrun --help"
    if flag in ("--cfg", "-c") and value != "job":
        return f"{word}: write --cfg job to show the composed config"
    if flag in FLAGS_WITH_VALUE and not value:
        return f"{word}: needs a value after it"
    return ""


_BRACES = re.compile(r"\{[^{}]*\}")
PLAIN = re.compile(r"(?:[+-]?\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?|(?i:true|false|null|none|nan|inf))\Z")


def resolve_group_option(group: str, value: str, is_option: Callable[[str, str], bool]) -> list[str]:
    """Return the overrides that choose an option of a group.

    `precision=32,bf16` gives `precision=32-true,bf16-mixed`. `model=my_net.Net` gives two overrides.
    """
    if value[:1] in ("[", "{", '"', "'", "$"):
        return [f"{group}={value}"]
    aliases = OPTIONS.get(group, {})
    options = [
        part if is_option(group, part) else aliases.get(part.lower(), part) for part in value.split(",")
    ]
    if len(options) == 1 and "." in value and not is_option(group, value) and re.fullmatch(r"[\w.]+", value):
        target = "data.train._target_" if group == "data" else f"{group}._target_"
        return [f"{group}={CUSTOM}", f"{target}={value}"]
    quoted = [f'"{part}"' if PLAIN.match(part) else part for part in options]
    return [f"{group}={','.join(quoted)}"]


def unquote_map_keys(value: str) -> str:
    """Remove the quotes around the keys of a map, which Hydra cannot parse. An empty key becomes `*`, which matches
    all.
    """
    return re.sub(r"""(["'])([^"',:{}]*)\1\s*:\s*""", lambda found: f"{found[2] or '*'}: ", value)


def quote_path(value: str, may_vary: bool) -> str:
    """Quote a path so that Hydra reads it as one string. may_vary: whether commas separate values, as in a sweep.

    Hydra still parses `null`, a reference `${...}`, a list `[a,b]`, a quoted value, and several values with commas.
    A value with the exact name of an existing file or folder is always quoted.
    """
    if not value or value.lower() == "null" or "${" in value:
        return value
    if is_file_name(value):
        return _quote_for_hydra(value)
    in_quotes = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    if in_quotes or value[0] == "[" or (may_vary and re.match(r"(?:choice|shuffle|sort)\(.*\)\Z", value)):
        return value
    parts = value.split(",")
    if "," in _BRACES.sub("", value) and all(parts) and (may_vary or all(map(is_file_name, parts))):
        return ",".join(part if part[0] in "\"'{" else _quote_for_hydra(part) for part in parts)
    return _quote_for_hydra(value)


def is_file_name(value: str) -> bool:
    """Return whether a text is the path of a file or folder, or a pattern that matches some."""
    try:
        return Path(value).expanduser().exists() or (glob.has_magic(value) and bool(glob.glob(value)))
    except (OSError, ValueError, RuntimeError):  # too long, or nobody knows of a home
        return False


def _quote_for_hydra(value: str) -> str:
    """Return a value in Hydra's quotes. A plain name stays unquoted. A backslash is escaped only before a quote."""
    if re.fullmatch(r"[A-Za-z_./][\w./-]*", value, re.ASCII) and not PLAIN.match(value):
        return value
    inner = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return '"' + re.sub(r"(\\+)\Z", r"\1\1", inner) + '"'
