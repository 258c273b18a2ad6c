"""Makes `exact_parts` importable, by name in a config, as a user's own code is; and the package `faults`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture
def said_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of threads is said and not used: a later fork of a process that computed with two would wait for ever
    for its second one, which no fork has."""
    said = torch.get_num_threads()

    def say(number: int) -> None:
        nonlocal said
        said = number

    monkeypatch.setattr(torch, "set_num_threads", say)
    monkeypatch.setattr(torch, "get_num_threads", lambda: said)
