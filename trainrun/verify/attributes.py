"""State that no checkpoint saves: the attributes of model, task and optimizer after a trial."""

from __future__ import annotations

from typing import Any

from trainrun.runtime.held_state import format_state
from trainrun.runtime.held_state import list_unsaved_attributes as own_attributes
from trainrun.training.checks.unsaved_state import collect_saved_ids, saves_whole_state
from trainrun.training.components import Components

KEPT = ("state", "param_groups", "defaults", "step")  # of an optimizer, or the task's own function


def describe_unsaved_attributes(run: Components) -> dict[str, str]:
    """Return the attributes that are not in a state_dict, as short texts by name."""
    owners: dict[str, Any] = {
        f"model.{name}".rstrip("."): module for name, module in run.model.named_modules()
    }
    if not saves_whole_state(run.task):
        owners["task"] = run.task
    if type(run.optimizer).__module__.partition(".")[0] != "torch":
        owners["optimizer"] = run.optimizer
    saved_ids = collect_saved_ids(run.model)
    texts = {
        f"{owner_name}.{name}": format_state(value, saved_ids)
        for owner_name, owner in owners.items()
        for name, value in own_attributes(owner).items()
        if name not in KEPT
    }
    return {owner_name: text for owner_name, text in texts.items() if text}
