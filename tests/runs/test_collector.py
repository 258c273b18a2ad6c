"""Python's collector during a run: frozen, run between steps, and afterwards as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from knotted import Knot, most, seen

import trainrun as package
from trainrun.runtime.collector import (
    BETWEEN,
    STARTING,
    LogPointCollector,
    restore_collector,
    suspend_collector,
)

SHORT = ("model=knotted.Knotted", "trainer.max_epochs=100", "monitor.plots=false", "trainer.num_threads=1")
STEPS, EVERY = 60, 10
AT_START = gc.get_freeze_count()  # 375 on Python 3.12


@pytest.fixture(autouse=True)
def _fresh(real_collector: None) -> Iterator[None]:
    most.clear()
    seen.clear()
    with restore_collector():
        yield


def test_a_run_freezes_what_was_built_and_ends_as_it_began(workdir: object):
    before = gc.isenabled(), gc.get_threshold()
    package.train(*SHORT, f"trainer.max_steps={STEPS}")
    threshold, frozen = seen[STEPS // 2]
    assert threshold == BETWEEN
    assert frozen > 10_000
    assert (gc.isenabled(), gc.get_threshold()) == before
    assert gc.get_freeze_count() <= AT_START


def test_a_collector_that_was_off_stays_off(workdir: object):
    gc.disable()
    frozen = gc.get_freeze_count()
    try:
        package.train(*SHORT, f"trainer.max_steps={STEPS}")
        assert not gc.isenabled()
        assert {count for _, count in seen} == {frozen}
    finally:
        gc.enable()


def test_what_the_user_froze_stays_frozen(workdir: object):
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        package.train(*SHORT, f"trainer.max_steps={STEPS}")
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def test_cycles_of_a_users_model_do_not_pile_up(workdir: object):
    """Log points and validations collect once there is enough."""
    words = (
        "trainer.val_check_interval=10",
        "monitor.log_every_n_steps=10",
        f"trainer.max_steps={3 * STEPS}",
    )
    package.train(*SHORT, *words)
    assert EVERY <= max(most) < 10 * EVERY


def test_log_points_collect_what_is_young_and_enough():
    gc.freeze()
    gc.set_threshold(BETWEEN, 10, 10)
    tidy = LogPointCollector()
    knots = [weakref.ref(Knot(torch.zeros(1))) for _ in range(10)]
    tidy(False)
    assert any(knot() is not None for knot in knots)
    knots += [weakref.ref(Knot(torch.zeros(1))) for _ in range(1000)]
    tidy(False)
    assert all(knot() is None for knot in knots)


def test_imports_are_not_interrupted_and_the_run_ends_that(workdir: object):
    usual = gc.get_threshold()
    suspend_collector()
    assert gc.get_threshold() == STARTING
    gc.freeze()  # of the user's own, so the runner sets nothing more
    package.train(*SHORT, f"trainer.max_steps={STEPS}")
    assert {threshold for threshold, _ in seen} == {usual[0]}
