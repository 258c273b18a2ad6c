"""Secrets of a config: what the environment gave is saved as the reference to it, what was typed apart from the rest.

A value that `${oc.env:NAME}` gave is a `FromEnvironment`: a string that remembers how it was written. Saved, it is that
reference again, and a run that goes on looks it up again. Texts of settings that are named like a secret are saved as
`***`, and themselves in `.secrets.json`, which only their owner may read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from trainrun.masking import HIDDEN, hides

ENVIRONMENT = "${oc.env:"
REFERENCE = re.compile(r"\$\{([\w.\[\]]+)\}")
Any_ = TypeVar("Any_")


class FromEnvironment(str):
    """A value with the reference that gave it."""

    reference: str

    @classmethod
    def of(cls, value: str, reference: str) -> FromEnvironment:
        found = cls(value)
        found.reference = reference
        return found

    def __repr__(self) -> str:
        """What messages show of it."""
        return repr(self.reference)


def is_environment(text: Any) -> bool:
    """Whether all references in it are to the environment."""
    return isinstance(text, str) and ENVIRONMENT in text and text.count("${") == text.count(ENVIRONMENT)


def remember(cfg: DictConfig, config: Any_) -> Any_:
    """Has the config remember which of its texts came from the environment. cfg: the same, as it was composed."""
    raw = OmegaConf.to_container(cfg, resolve=False)
    texts = {key: value for key, value in leaves_of(raw) if isinstance(value, str) and "${" in value}
    for _ in range(3):  # references to references to references
        texts = {key: REFERENCE.sub(partial(meant, texts), text) for key, text in texts.items()}
    known = {key: text for key, text in texts.items() if ENVIRONMENT in text}

    def kept(key: str, value: Any) -> Any:
        return FromEnvironment.of(value, known[key]) if key in known and isinstance(value, str) else value

    return changed(config, kept) if known else config


def meant(texts: dict[str, str], found: re.Match[str]) -> str:
    """What a reference to another setting leads to, where that is a reference too."""
    return texts.get(found[1], found[0])


def changed(value: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """A copy with other leaves; `change` gets the key and the value of each."""
    inner = f"{key}." if key else ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: changed(getattr(value, name), change, f"{inner}{name}") for name in names}
        )
    if isinstance(value, dict):
        return {name: changed(item, change, f"{inner}{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [changed(item, change, f"{inner}{number}") for number, item in enumerate(value)]
    return change(key, value)


def leaves_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values that hold no others, with their keys."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        yield key, value
        return
    for name, item in items:
        yield from leaves_of(item, f"{key}.{name}" if key else str(name))


def resolved(config: Any_) -> Any_:
    """With plain strings, as OmegaConf takes them."""
    found: Any_ = changed(
        config, lambda _, value: str(value) if isinstance(value, FromEnvironment) else value
    )
    return found


def public(config: Any_) -> tuple[Any_, dict[str, Any]]:
    """What may be saved, and the secrets of it by key."""
    secrets: dict[str, Any] = {}

    def shown(key: str, value: Any) -> Any:
        if isinstance(value, FromEnvironment):
            return value.reference
        if hides(key, value):
            secrets[key] = value
            return HIDDEN
        return value

    return changed(config, shown), secrets


def with_secrets(found: dict[str, Any], secrets: Any) -> dict[str, Any]:
    """Saved values with their secrets, as far as they are known."""
    known = secrets if isinstance(secrets, dict) else {}
    filled: dict[str, Any] = changed(
        found, lambda key, value: known.get(key, value) if value == HIDDEN and hides(key, value) else value
    )
    return filled


def missing_secrets(cfg: DictConfig) -> list[str]:
    """A line for each secret that was not kept."""
    return [
        f"{key}: a secret that is not kept in this folder (.secrets.json); give it again, as {key}=..."
        for key, value in leaves_of(OmegaConf.to_container(cfg, resolve=False))
        if value == HIDDEN and hides(key, value)
    ]
