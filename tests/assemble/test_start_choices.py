"""What `trainer.cpu_allocator=auto` decides."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from trainrun.assemble import start_choices
from trainrun.assemble.start_choices import set_allocator_rule
from trainrun.runtime import machine


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rules that the C library was given."""
    rules_set: list[str] = []
    monkeypatch.setattr(start_choices, "set_allocator", lambda rule: rules_set.append(rule) is None)
    monkeypatch.setattr(start_choices, "can_set_allocator", lambda: True)
    return rules_set


def choose(monkeypatch: pytest.MonkeyPatch, rule: str, coming: float, device: str = "cpu",
           ranks: int = 1) -> tuple[str, list[str]]:  # fmt: skip
    """Return the choice on a machine with 150 bytes. coming: bytes that a step takes."""
    monkeypatch.setattr(start_choices, "read_free_bytes", lambda device: 150)
    monkeypatch.setattr(start_choices, "estimate_max_step_bytes", lambda run: math.inf)
    forecast = SimpleNamespace(memory_forecast=lambda run, rough: ("", coming))
    monkeypatch.setattr(start_choices, "import_autotune", lambda lines: forecast)
    trainer = SimpleNamespace(cpu_allocator=rule)
    parallel = SimpleNamespace(device=SimpleNamespace(type=device), local_world_size=ranks)
    run: Any = SimpleNamespace(config=SimpleNamespace(trainer=trainer), parallel=parallel)
    return set_allocator_rule(run)


@pytest.mark.parametrize(
    ("coming", "ranks", "rule"),
    [(50, 1, "keep"), (51, 1, "libc"), (25, 2, "keep"), (30, 2, "libc"), (math.inf, 1, "libc")],
)
def test_auto_keeps_where_memory_is_ample(
    monkeypatch: pytest.MonkeyPatch, rules: list[str], coming: float, ranks: int, rule: str
) -> None:
    choice, lines = choose(monkeypatch, "auto", coming, ranks=ranks)
    assert (choice, rules) == (rule, ["keep"] if rule == "keep" else [])
    assert bool(lines) == (rule == "libc")


def test_other_devices_and_the_users_own_switches_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, rules: list[str]
) -> None:
    assert choose(monkeypatch, "auto", 1, device="cuda") == ("libc", [])
    assert choose(monkeypatch, "libc", 1) == ("libc", [])
    monkeypatch.setattr(start_choices, "can_set_allocator", lambda: False)
    assert choose(monkeypatch, "auto", 1) == ("libc", [])
    assert rules == []


@pytest.mark.parametrize("rule", ["keep", "return"])
def test_a_rule_is_set_or_the_screen_says_that_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, rules: list[str], rule: str
) -> None:
    assert choose(monkeypatch, rule, math.inf) == (rule, [])
    assert rules == [rule]
    monkeypatch.setattr(start_choices, "set_allocator", lambda rule: False)
    choice, (line,) = choose(monkeypatch, rule, 1)
    assert choice == "libc"
    assert f"trainer.cpu_allocator={rule}" in line


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("MALLOC_TRIM_THRESHOLD_", "1", False), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", False),
     ("GLIBC_TUNABLES", "glibc.cpu.x86_shstk=on", True)],
)  # fmt: skip
def test_variables_of_the_environment_have_priority(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: bool
) -> None:
    for each in (*machine.GLIBC_VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(machine, "find_glibc_function", lambda name: object())
    monkeypatch.setenv(name, value)
    assert machine.can_set_allocator() is allowed


@pytest.mark.parametrize(("accepts", "calls"), [(True, [(-1, -1), (-3, 2**31 - 1)]),
                                                (False, [(-1, -1), (-3, 2**31 - 1), (-4, 0)])])  # fmt: skip
def test_an_old_glibc_keeps_memory_without_maps(
    monkeypatch: pytest.MonkeyPatch, accepts: bool, calls: list[tuple[int, int]]
) -> None:
    made: list[tuple[int, int]] = []

    def mallopt(parameter: int, value: int) -> int:
        made.append((parameter, value))
        return int(accepts or parameter != machine.M_MMAP_THRESHOLD)

    monkeypatch.setattr(machine, "find_glibc_function", lambda name: mallopt)
    assert machine.set_allocator("keep")
    assert made == calls
