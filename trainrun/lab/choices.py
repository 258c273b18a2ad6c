"""Words of a run that are exchanged for others, and the words that say what a run chose for itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from trainrun.config import RunConfig
from trainrun.lab.orders import Ready
from trainrun.words.compose import compose_run, prepare

LOADER_KEYS = ("data.engine", "data.num_workers", "data.num_threads")


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def exchanged(words: Iterable[str], others: Iterable[str]) -> list[str]:
    """The words with others in the place of those that say the same key, or a value inside the same group."""
    others = list(others)
    taken = {key_of(word) for word in others}
    inside = tuple(f"{key}." for key in taken if "." not in key)
    kept = [word for word in words if key_of(word) not in taken and not key_of(word).startswith(inside)]
    return [*kept, *others]


def plain_words(argv: Sequence[str]) -> list[str]:
    """The words of a command line by the names that the config has, with its folders of configs and its own keys."""
    words, _ = prepare(list(argv), Path.cwd())
    own = [f"{key}={value}" for key, value in words.own.items()]
    return [*[f"--config-dir={folder}" for folder in words.config_dirs], *own, *words.overrides]


def config_of(words: Sequence[str]) -> RunConfig:
    """Compose the config of a run whose steps repeat: with a seed, and no name of its own. Raises ConfigError.

    Composing takes as long as hundreds of steps, and a search asks for the same words again and again.
    """
    return copy.deepcopy(_remembered(tuple(words), Path.cwd()))


@lru_cache(maxsize=512)
def _remembered(words: tuple[str, ...], working_dir: Path) -> RunConfig:
    return composed_anew(words)


def composed_anew(words: Sequence[str]) -> RunConfig:
    """`config_of`, from the files as they are now."""
    config = compose_run(list(words)).config
    config.seed = 0 if config.seed is None else config.seed
    config.run_name = None
    return config


def measured_choices(config: RunConfig, ready: Ready) -> list[str]:
    """What the run found out when it started, as words: two runs then differ only in what is compared."""
    words = [f"trainer.num_threads={ready.num_threads}"] if config.trainer.num_threads == "auto" else []
    if config.precision.mode == "auto":
        words.append(f"precision.mode={ready.precision}")
    if ready.attention not in ("", "auto") and (config.model or {}).get("attention") == "auto":
        words.append(f"model.attention={ready.attention}")
    if ready.engine:
        words += loader_words(config, ready.engine, ready.number)
    return words


def loader_words(config: RunConfig, engine: str, number: int) -> list[str]:
    """Return the overrides that select one engine; keys of other engines that the config sets are reset."""
    wanted = {"data.engine": engine, "data.num_workers": "auto", "data.num_threads": "auto"}
    if engine != "resident":
        wanted[f"data.num_{engine}"] = str(number)
    now = {key: str(getattr(config.data, key.partition(".")[2])) for key in LOADER_KEYS}
    return [f"{key}={value}" for key, value in wanted.items() if now[key] != value]
