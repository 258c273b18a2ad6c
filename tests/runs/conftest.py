"""A fixture of several files."""

from __future__ import annotations

import pytest
import torch


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
