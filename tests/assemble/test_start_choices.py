"""What `trainer.cpu_allocator=auto` decides, and when."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from trainrun.assemble import start_choices
from trainrun.assemble.start_choices import FreedMemory
from trainrun.runtime import machine


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def done(name: str) -> Any:
        return lambda: made.append(name) is None

    monkeypatch.setattr(start_choices, "keep_freed_memory", done("keep"))
    monkeypatch.setattr(start_choices, "return_freed_memory", done("return"))
    monkeypatch.setattr(start_choices, "can_keep", lambda: True)
    return made


def rule(monkeypatch: pytest.MonkeyPatch, wanted: str, rough: float, device: str = "cpu",
         ranks: int = 1) -> FreedMemory:  # fmt: skip
    """Of a machine with 150 bytes."""
    monkeypatch.setattr(start_choices, "free_bytes", lambda device: 150)
    monkeypatch.setattr(start_choices, "rough_guess", lambda run: rough)
    trainer = SimpleNamespace(cpu_allocator=wanted)
    parallel = SimpleNamespace(device=SimpleNamespace(type=device), local_world_size=ranks)
    run: Any = SimpleNamespace(config=SimpleNamespace(trainer=trainer), parallel=parallel)
    return FreedMemory(run)


@pytest.mark.parametrize(
    ("rough", "coming", "ranks", "early", "made"),
    [
        (50, 50, 1, ["keep"], ["keep"]),
        (51, 50, 1, [], ["keep"]),
        (51, 51, 1, [], []),
        (30, 30, 2, [], []),
        (25, 25, 2, ["keep"], ["keep"]),
        (math.inf, math.inf, 1, [], []),
    ],
)
def test_auto_keeps_where_memory_is_ample(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], rough: float, coming: float, ranks: int, early: list[str],
    made: list[str],
) -> None:  # fmt: skip
    found = rule(monkeypatch, "auto", rough, ranks=ranks)
    assert calls == early  # before anything is timed
    told = found.line(coming)
    assert calls == made
    assert bool(told) == (not made)


def test_other_devices_and_the_users_own_switches_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    assert rule(monkeypatch, "auto", 1, device="cuda").line(1) == ""
    assert rule(monkeypatch, "libc", 1).line(1) == ""
    monkeypatch.setattr(start_choices, "can_keep", lambda: False)
    assert rule(monkeypatch, "auto", 1).line(1) == ""
    assert calls == []


@pytest.mark.parametrize("wanted", ["keep", "return"])
def test_what_is_asked_for_is_done_or_said(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], wanted: str
) -> None:
    rule(monkeypatch, wanted, math.inf)
    assert calls == [wanted]
    monkeypatch.setattr(start_choices, f"{wanted}_freed_memory", lambda: False)
    assert "no such switch" in rule(monkeypatch, wanted, 1).line(1)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("MALLOC_TRIM_THRESHOLD_", "1", False), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", False),
     ("GLIBC_TUNABLES", "glibc.cpu.x86_shstk=on", True)],
)  # fmt: skip
def test_the_environment_goes_first(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: bool
) -> None:
    for each in (*machine.USERS, "GLIBC_TUNABLES"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(machine, "_glibc", lambda name: object())
    monkeypatch.setenv(name, value)
    assert machine.can_keep() is allowed
