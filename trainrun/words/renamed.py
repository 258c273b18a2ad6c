"""Keys that had another name when a run was saved."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainrun.config import SAME
from trainrun.output import say
from trainrun.words.argv import SCOPE_WORDS


def in_words_of_today(saved: Any, path: Path) -> Any:
    """A saved config in which keys that were renamed since have their new names."""
    options = OmegaConf.select(saved, "trainer.compile") if isinstance(saved, DictConfig) else None
    if isinstance(options, DictConfig) and "enabled" in options:
        value = str(options.pop("enabled")).lower()
        scope = SCOPE_WORDS.get(value, value)
        options.setdefault("scope", scope)
        _note_renamed(path, f"trainer.compile.enabled={value} is read as trainer.compile.scope={scope}")
    data = OmegaConf.select(saved, "data") if isinstance(saved, DictConfig) else None
    if isinstance(data, DictConfig) and data.get("transform") and "val_transform" not in data:
        data["val_transform"] = SAME  # its validations went through data.transform too
        _note_renamed(
            path, "data.transform is of training alone now; data.val_transform=same goes on as before"
        )
    ranks = OmegaConf.select(saved, "parallel") if isinstance(saved, DictConfig) else None
    if isinstance(ranks, DictConfig) and "stop_grace_seconds" in ranks:
        del ranks["stop_grace_seconds"]  # it was of the ranks alone; the run's own has another meaning
        _note_renamed(path, "parallel.stop_grace_seconds is left out; it is trainer.stop_grace_seconds now")
    trainer = OmegaConf.select(saved, "trainer") if isinstance(saved, DictConfig) else None
    if isinstance(trainer, DictConfig) and "return_freed_memory" in trainer:
        rule = "return" if trainer.pop("return_freed_memory") else "auto"
        trainer.setdefault("freed_memory", rule)
        if rule == "return":
            _note_renamed(path, "trainer.return_freed_memory=true is read as trainer.freed_memory=return")
    return saved


@cache
def _note_renamed(path: Path, text: str) -> None:
    """Once, though a run reads its config several times."""
    say(f"note: {path}: {text}", file=sys.stderr)
