"""State that no checkpoint holds: what the attributes of model, task and optimizer say after a trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainrun.training.checks.task_watch import comparable, digest, held_by, parts_of
from trainrun.training.components import Components
from trainrun.training.task_calls import saves_itself

KEPT = ("state", "param_groups", "defaults", "step")  # of an optimizer, or the task's own function


def attributes_of(run: Components) -> dict[str, str]:
    """Place and value, as a short text. What a state_dict holds is left out: the checkpoint has it."""
    owners: dict[str, Any] = {
        f"model.{name}".rstrip("."): module for name, module in run.model.named_modules()
    }
    if not saves_itself(run.task):
        owners["task"] = run.task
    if type(run.optimizer).__module__.partition(".")[0] != "torch":
        owners["optimizer"] = run.optimizer
    known = parts_of(run.model)
    found = {
        f"{at}.{name}": comparable(value, known, exact)
        for at, owner in owners.items()
        for name, value in held_by(owner).items()
        if name not in KEPT
    }
    return {place: digest(repr(value).encode()) for place, value in found.items() if value is not None}


def exact(tensor: Tensor) -> str:
    return digest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
