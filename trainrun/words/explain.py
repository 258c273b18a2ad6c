"""What Hydra and OmegaConf say of a word, in words of the command line: one line, with the way out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from trainrun.config import RunConfig, conf_dir, groups
from trainrun.words.checks import nearest


def explain(error: Exception, words: list[str], folders: list[Path]) -> tuple[str, str | None]:
    """One line for the user, and the word to take out; None where no single word is to blame."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        culprit = _word_of(words, lambda key: key == group)
        names = [name for name in error.options if "/" not in name]
        text = f"{group}={option}: there is no such {group}.{nearest(option, names)} Choose from: {', '.join(names)}"
        return text, culprit
    if isinstance(error, OverrideParseException):
        return _explain_unreadable(str(error.override)), str(error.override)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        key = str(cause.full_key)
        culprit = _word_of(words, lambda typed: typed == key or typed.startswith(key + "."))
        value = culprit.partition("=")[2] if culprit else ""
        if culprit is None:
            return first_line(error), None
        return explain_value(cause, culprit.partition("=")[0].lstrip("+~"), value, folders), culprit
    if "Ambiguous value" in str(error):
        culprit = _word_of(words, lambda key: f"'{key}=" in str(error))
        return f"{culprit}: several values make a sweep: add --multirun (a list is [1,2])", culprit
    for word in words:
        name = word.partition("=")[0].lstrip("+~")
        if f"'{name}'" in str(error):
            return unknown_key(name, word, None, folders), word
        if not name:
            return f"{word}: cannot be read as key=value", word
    return first_line(error), None


def _explain_unreadable(word: str) -> str:
    """Hydra's grammar speaks of tokens; the usual reasons are few."""
    key, equals, _ = word.partition("=")
    if equals and key != key.rstrip():
        return f"{word}: cannot be read as key=value; no spaces around the ="
    if not equals or not key:
        return f"{word}: cannot be read as key=value"
    return (
        f"{word}: cannot be read as key=value; a bracket or quote may be open, or the value holds one of "
        f"= , : ( ) [ ] {{ }} or a quote: then quote it twice, as '{key}=\"...\"'"
    )


def explain_value(error: Exception, key: str, value: str, folders: list[Path] | None = None) -> str:
    if isinstance(error, OmegaConfBaseException):
        text = first_line(error)
        if "does not support deletion" in text:
            return f"~{key}: a setting cannot be taken away; give it another value, as {key}=null"
        if "is not a subclass of" in text:
            return (
                f"{key}={value}: is a section, not a single value; see trainrun --help all | grep '^{key}[.]'"
            )
        if "not in" in text or "is not in struct" in text:
            return unknown_key(key, f"{key}={value}", error.parent_node, folders)
        for kind, word in (
            ("Integer", "a whole number"),
            ("Float", "a number"),
            ("Boolean", "true or false"),
        ):
            if f"converted to {kind}" in text:
                return f"{key}={value}: must be {word}"
        if "is not a valid bool" in text:
            return f"{key}={value}: must be true or false"
    return f"{key}={value}: {first_line(error)}"


def unknown_key(key: str, word: str, parent: Any, folders: list[Path] | None) -> str:
    head, _, last = key.rpartition(".")
    first, _, rest = key.partition(".")
    sections = [item.name for item in fields(RunConfig)]
    if rest and first not in sections:
        near = nearest(first, sections)
        known = near[:-1] + f".{rest}?" if near else f" Known there: {', '.join(sections)}"
        return f"{word}: no such setting.{known}"
    names: list[str] = []
    with contextlib.suppress(AttributeError, TypeError):
        names = [str(name) for name in parent if str(name) != "hydra"]
    if not head:
        names = sorted({*names, *groups(folders or [conf_dir()])})
        kind = "no such group or setting"
    else:
        kind = "no such setting"
    elsewhere = [name for name in all_keys(RunConfig()) if name.rpartition(".")[2] == last]
    if 0 < len(elsewhere) <= 2 and last not in names:
        return f"{word}: {kind}. Did you mean {' or '.join(elsewhere)}?"
    near = nearest(last, names)
    known = "" if near or not names else f" Known there: {', '.join(names[:12])}"
    return f"{word}: {kind}.{near.replace('mean ', 'mean ' + (head + '.' if head else ''))}{known}"


def all_keys(section: Any, key: str = "") -> Iterator[str]:
    """Of every setting in the closed sections."""
    for item in fields(section):
        value, name = getattr(section, item.name), f"{key}{item.name}"
        if is_dataclass(value):
            yield from all_keys(value, f"{name}.")
        else:
            yield name


def _word_of(words: list[str], wanted: Any) -> str | None:
    return next((word for word in words if wanted(word.partition("=")[0].lstrip("+~"))), None)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
