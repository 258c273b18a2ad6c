"""Flags: `--multirun` and the like, settings that are typed with dashes as other trainers have them, and `lr = 3`."""

from __future__ import annotations

import re

from trainrun.config.aliases import aliases, key_of_today
from trainrun.config.mistakes.value_words import nearest
from trainrun.config.other_trainers.names import CASES, NUMBER, answers
from trainrun.config.schema import settings
from trainrun.config.typed_values import PLAIN
from trainrun.errors import ConfigError
from trainrun.limits import choices_of

FLAGS = ("--help", "-h", "--version", "--multirun", "-m")
FLAGS_WITH_VALUE = ("--cfg", "-c", "--config-dir", "-cd")
SHORT_FLAGS = {"-b": "--batch_size", "-j": "--num_workers"}  # of timm and of torch's own examples
NAME = re.compile(r"[A-Za-z_][\w.]*")


def without_flags(
    argv: list[str], groups: list[str]
) -> tuple[list[str], list[str], list[str], dict[str, str]]:
    """The settings, Hydra's flags, the folders of --config-dir; and what was typed, by what it was translated to."""
    settings, flags, config_dirs, typed = [], [], [], {}
    faults, rest = spaced_out(argv), list(argv)
    if faults:
        raise ConfigError(*faults)
    while rest:
        word = rest.pop(0)
        setting, shown = setting_of_flag(word, rest, groups)
        if setting:
            typed[setting], word = shown, setting
        if not word.startswith("-"):
            settings.append(word)
            continue
        flag, equals, value = word.partition("=")
        if flag in FLAGS_WITH_VALUE and not equals and rest:
            value = rest.pop(0)
        if fault := _flag_fault(word, flag, value, groups):
            faults.append(fault)
        elif flag in ("--config-dir", "-cd"):
            config_dirs.append(value)
        else:
            flags += [flag, value] if value else [flag]
    if faults:
        raise ConfigError(*faults)
    return settings, flags, config_dirs, typed


def spaced_out(argv: list[str]) -> list[str]:
    """One line for each `lr = 3`, which a shell makes several words of."""
    faults = []
    for before, word, after in zip(["", *argv], argv, [*argv[1:], ""], strict=False):
        if word[:1] == "=" and NAME.fullmatch(before):
            typed = (before, word, after) if word == "=" else (before, word)
        elif word[-1:] == "=" and NAME.fullmatch(word[:-1]) and after and not re.search(r"=|^-", after):
            typed = (word, after)
        else:
            continue
        faults.append(f"{' '.join(typed).strip()}: no spaces around the =; write {''.join(typed)}")
    return faults


def setting_of_flag(word: str, rest: list[str], groups: list[str]) -> tuple[str, str]:
    """`--batch-size 64` as the setting `batch_size=64`, and as it was typed; its value is taken from `rest`.

    Empty for what is no setting, or has no value.
    """
    flag, equals, value = word.partition("=")
    flag = SHORT_FLAGS.get(flag, flag)
    name = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--") or flag in FLAGS + FLAGS_WITH_VALUE:
        return "", ""
    if name.startswith("no_") and not equals and not _is_known(name, groups) and _switch_words(name[3:]):
        return f"{name[3:]}=false", word
    if not _is_known(name, groups):
        return "", ""
    if equals:
        return f"{name}={value}", word
    follows = rest[0] if rest and not re.search(r"=|^--?[A-Za-z]", rest[0]) else ""
    switch = _switch_words(name)
    if switch and follows.lower() not in switch and not (NUMBER in switch and PLAIN.match(follows)):
        return f"{name}=true", word
    if not follows:
        return (f"{name}=true", word) if name in answers() else ("", "")
    rest.pop(0)
    return f"{name}={follows}", f"{word} {follows}"


def _is_known(name: str, groups: list[str]) -> bool:
    """Whether it is a setting, a group, or a name of another trainer; all names with dots are meant as settings."""
    if "." in name or name in settings() or name in aliases() or name in CASES or name in groups:
        return True
    return name in answers() or any(key.endswith(f".{name}") for key in settings())


def _switch_words(name: str) -> set[str]:
    """The values of what is switched on by its name alone; empty where a value must follow."""
    cases, found = CASES.get(name, {}), settings().get(key_of_today(name, lambda _: False))
    if found is not None and found.short:
        found = settings()[f"{found.key}.{found.short}"]
    words = {"true", "false", *cases}
    if found is None:
        return words if "true" in cases else set()
    return (
        words | {*found.words, *choices_of(found.kind)}
        if found.kind is bool or "true" in found.words
        else set()
    )


def _flag_fault(word: str, flag: str, value: str, groups: list[str]) -> str:
    """What is wrong with a word that begins with a dash; empty if nothing is."""
    if flag not in FLAGS + FLAGS_WITH_VALUE:
        bare = word.lstrip("-")
        is_setting = "=" in word or "." in bare or bare in aliases()
        near = nearest(flag, FLAGS + FLAGS_WITH_VALUE)
        if _is_known(name := bare.replace("-", "_"), groups) and word.startswith("--"):
            return f"{word}: needs a value after it, or write {name}=VALUE"
        if is_setting:
            near = f" A setting is written without dashes: {bare}{'' if '=' in word else '=VALUE'}."
        return f"{word}: no such flag.{near} See trainrun --help"
    if flag in ("--cfg", "-c") and value != "job":
        return f"{word}: write --cfg job, which shows the composed config"
    if flag in FLAGS_WITH_VALUE and not value:
        return f"{word}: needs a value after it"
    return ""
