"""Runs under test: the real loop, a few steps at each order, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from safetensors.torch import load_file

from trainrun.cli import main
from trainrun.errors import ConfigError
from trainrun.interfaces import MicroBatch
from trainrun.lab.bench import Bench, Subject, SubjectFailed
from trainrun.lab.contender import RealContender
from trainrun.lab.duel import Rules, Side, duel, steps_for
from trainrun.lab.findings import UNCHANGED
from trainrun.lab.limits import FEW_BATCHES
from trainrun.lab.orders import Measure, Train, Turn
from trainrun.lab.removals import REMOVALS, RING, Ring
from trainrun.lab.rounds import Rounds, without
from trainrun.ledger import DATA, LOGGING
from trainrun.monitor.metrics_file import read_rows
from trainrun.start import audition
from trainrun.start.budget import Budget
from trainrun.start.trial import foreign_loop
from trainrun.words.compose import compose_run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="stops processes")
WORDS = ["seed=3", "trainer.max_epochs=2", "data.num_threads=1", "data.engine=threads"]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench() as found:
        yield found


@pytest.fixture(scope="module")
def subject(bench: Bench) -> Subject:
    return bench.start(compose_run(WORDS).config)


def test_the_first_steps_are_those_of_the_run(bench: Bench, tmp_path: Path) -> None:
    traced = bench.start(compose_run(WORDS).config)
    path = traced.trace(4)
    update = load_file(path.update)

    folder = tmp_path / "run"
    assert (
        main([*WORDS, f"hydra.run.dir={folder}", "trainer.max_steps=4", "monitor.log_every_n_steps=1"]) == 0
    )
    losses = [row["train/loss"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert list(path.losses) == pytest.approx(losses, rel=1e-6)
    assert update
    assert all(bool(change.any()) for change in update.values())
    traced.close()


def test_turns_count_their_steps_and_items(subject: Subject) -> None:
    turn = subject.train(7, warm=1)
    assert turn.steps == 7
    assert 6 * 32 < turn.items <= 7 * 32
    assert turn.accounts["forward"] > 0
    assert turn.accounts["backward"] > 0
    assert turn.peak_bytes > 1e6
    assert sum(turn.accounts.values()) == pytest.approx(
        turn.seconds, rel=0.05, abs=0.2
    )  # no second of another turn, nor of the start


def test_a_turn_ends_with_its_time_but_not_without_a_step(subject: Subject) -> None:
    turn = subject.train(100_000, warm=3, most_seconds=0.0)
    assert turn.steps == 1
    assert turn.items <= 32
    assert 1 <= subject.train(1_000_000, most_seconds=0.1).steps < 1_000_000
    assert subject.train(3, most_seconds=60.0).steps == 3


def test_a_run_does_not_end_while_it_is_tested(subject: Subject) -> None:
    assert subject.train(3 * 45 * 2).steps == 270  # two epochs of 45 steps is what was asked for
    assert subject.load(50).items > 49 * 21
    subject.validate()
    subject.save()
    assert subject.train(2).steps == 2


@pytest.mark.parametrize("name", [*REMOVALS, "cached", "cached+silent", "threads=1", "whole", "saving"])
def test_a_removal_leaves_the_run_where_it_was(subject: Subject, name: str) -> None:
    assert 4 * 32 < subject.train(5, variant=name).items <= 5 * 32  # the last batch of an epoch is smaller
    assert subject.train(2).steps == 2


def test_turns_that_are_compared_start_from_the_same_numbers() -> None:
    asked: list[Train] = []

    def ask(order: Train, limit: float) -> Turn:
        asked.append(order)
        return Turn(1.0, order.steps, 1.0)

    contender = RealContender(SimpleNamespace(facts=SimpleNamespace(reads_ahead=False), ask=ask), 9.0)  # type: ignore[arg-type]
    contender.pace(0.1)
    contender.turn()
    assert len(asked) > 1
    assert all(order.again for order in asked)


def test_every_save_writes_a_step_that_is_not_saved_yet(bench: Bench) -> None:
    subject, newest = bench.start(compose_run(WORDS).config), []
    for _ in range(2):
        subject.save()
        newest.append(max(path.name for path in subject._folder.glob("run/checkpoints/step-*")))
    assert newest[0] < newest[1]


def test_the_end_of_a_turn_is_not_saved_as_that_of_a_run(bench: Bench) -> None:
    often = [
        *WORDS,
        "checkpoint.every_n_train_steps=4",
        "checkpoint.keep_last=9",
        "checkpoint.async_save=false",
    ]
    saving = bench.start(compose_run(often).config)
    saving.train(7, 0, "saving")
    assert [path.name for path in saving._folder.glob("run/checkpoints/step-*")] == ["step-00000004"]
    saving.train(1, 0, "saving")
    assert len(list(saving._folder.glob("run/checkpoints/step-*"))) == 2


@pytest.mark.parametrize("reading", ["workers", "threads"])
def test_who_reads_ahead_goes_on_after_a_turn_that_reads_nothing(bench: Bench, reading: str) -> None:
    words = ["seed=3", "data=custom", "data.train._target_=lab_worlds.Numbers", "data.num_classes=3",
             f"data.engine={reading}", f"data.num_{reading}=1", "data.batch_size=4", "data.shuffle=false"]  # fmt: skip
    told = bench.start(compose_run(words).config)
    turns = [told.train(3, variant=name) for name in ("cached", "", "silent", "cached", "silent", "")]
    assert {turn.items for turn in turns} == {12}
    assert told.load(3).items == 12


def test_reading_goes_on_after_the_limits_were_measured(bench: Bench) -> None:
    """Also where the training stands just behind the batches that were looked at."""
    words = ["seed=3", "data=custom", "data.train._target_=lab_worlds.Numbers", "data.num_classes=3",
             "data.engine=workers", "data.num_workers=0", "data.batch_size=4"]  # fmt: skip
    told = bench.start(compose_run(words).config)
    told.train(FEW_BATCHES, 0)
    told.ask(Measure())
    assert told.load(3).items == 12


def test_a_run_under_test_chooses_for_itself_as_the_run_does(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audition, "ALL", Budget(10.0, 1.0))  # of the run too, which is a fork of this process
    words = ["seed=3", "data=custom", "data.train._target_=lab_worlds.Sleepers", "data.num_classes=3",
             "data.batch_size=8", "trainer.max_epochs=1000"]  # fmt: skip
    assert bench.start(compose_run(words).config).facts.number > 0  # threads or workers: reading waits
    own = [*words, "loop._target_=lab_worlds.fit"]
    assert foreign_loop(compose_run(own).config)


def test_between_two_orders_nothing_moves(subject: Subject) -> None:
    subject.train(1)
    family = list(subject._family())

    def found() -> set[str]:
        return {process.status() for process in family}

    deadline = time.monotonic() + 30
    while found() != {psutil.STATUS_STOPPED} and time.monotonic() < deadline:
        time.sleep(0.01)  # a signal is on its way
    time.sleep(0.05)
    assert found() == {psutil.STATUS_STOPPED}


def test_a_run_that_cannot_start_says_why(bench: Bench) -> None:
    linear = [
        "model=custom",
        "model._target_=torch.nn.Linear",
        "model.in_features=-3",
        "model.out_features=2",
    ]
    with pytest.raises(SubjectFailed, match="RuntimeError"):
        bench.start(compose_run([*linear, "seed=1"]).config)
    with pytest.raises(ConfigError, match="loop"):
        bench.start(compose_run(["loop._target_=my.fit", "seed=1"]).config)


def test_a_run_that_dies_says_so_and_others_go_on(bench: Bench, subject: Subject) -> None:
    dying = bench.start(compose_run(WORDS).config)
    dying._process.kill()
    with pytest.raises(SubjectFailed):
        dying.train(1)
    assert subject.train(1).steps == 1


def test_nothing_is_left_behind() -> None:
    with Bench() as bench:
        subject = bench.start(compose_run([*WORDS, "data.engine=workers", "data.num_workers=1"]).config)
        subject.train(1)
        family = list(subject._family())
        assert len(family) > 1
    assert not bench.folder.exists()
    assert not [process for process in family if process.is_running()]


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_runs_that_ended_hold_nothing_open(bench: Bench) -> None:
    def started() -> int:
        subject = bench.start(compose_run(WORDS).config)
        subject.train(1)
        subject.close()
        subject.close()
        with pytest.raises(SubjectFailed, match="ended with -9"):
            subject.train(1)
        gc.collect()  # of other tests
        return len(os.listdir("/proc/self/fd"))

    assert started() == started()


def test_what_was_read_for_another_turn_is_not_read_again(bench: Bench, tmp_path: Path) -> None:
    """Of 400 samples: turns that read, with steps ahead of them, and some that read only once."""
    file = tmp_path / "read"
    words = ["seed=3", "data=custom", "data.train._target_=lab_worlds.Written", f"data.train.file={file}",
             "data.num_classes=3", "data.engine=workers", "data.num_workers=0", "data.batch_size=10"]  # fmt: skip
    subject = bench.start(compose_run(words).config)
    file.unlink(missing_ok=True)  # of the samples that were looked at before the first step
    turn = subject.train(1, warm=2)
    assert (turn.items, turn.ahead_items) == (10, 20)
    assert turn.booked(DATA) >= 10 * 0.002
    assert turn.ahead_data_seconds >= 20 * 0.002
    cached = subject.train(2, warm=3, variant="cached")
    assert (cached.items, cached.ahead_items) == (20, 30)
    assert cached.ahead_data_seconds < turn.ahead_data_seconds
    subject.train(1, warm=1)
    subject.train(1, warm=1, variant="cached")
    subject.load(2, warm=1)
    subject.train(1, warm=0, variant="silent")
    read = file.read_text().split()
    assert 80 < len(read) == len(set(read))
    subject.close()


def side(speed: float, said: list[str], name: str):
    def take() -> Turn:
        said.append(name)
        return Turn(seconds=1.0, steps=1, items=speed)

    return take


def test_a_duel_takes_turns_and_ends_when_it_is_clear() -> None:
    said: list[str] = []
    found = duel(side(10, said, "a"), side(20, said, "b"), Rules())
    assert "".join(said[:6]) == "abbaab"
    assert found.ratio().value == pytest.approx(2.0)
    assert len(found.pairs) == 5


def test_rounds_share_the_turns_of_the_base() -> None:
    said: list[str] = []
    sides = {name: side(speed, said, name) for name, speed in (("b", 20), ("c", 5), ("d", 10))}
    found = Rounds()
    for _ in range(3):
        found.take(side(10, said, "a"), sides)
    assert "".join(said).startswith("abcadaadcaba")
    assert found.ratio("b").value == pytest.approx(2.0)
    assert found.ratio("c").value == pytest.approx(0.5)
    assert found.ratio("b", to="c").value == pytest.approx(4.0)
    assert found.seconds() == pytest.approx(0.1)
    assert [found.always_below(name, 0.6) for name in ("b", "c")] == [False, True]


def test_what_the_base_booked_can_be_taken_off() -> None:
    own = Turn(1.0, 10, 10, accounts={"data": 0.5, "logging": 0.2, "forward": 0.3})
    found = Rounds()
    for _ in range(2):
        found.take(lambda: own, {"b": lambda: Turn(1.0, 10, 10)})
    assert found.ratio(without(DATA)).value == pytest.approx(2.0)
    assert found.ratio(without(LOGGING)).value == pytest.approx(1.25)


def test_a_stall_of_the_data_is_no_difference_between_two_that_read_the_same() -> None:
    stalls, its = iter([0.0, 8.0, 0.0, 4.0, 0.0, 0.0]), iter([2.0, 0.0, 2.0])

    def turn(around: float, stall: float) -> Turn:
        return Turn(around + stall, 10, 10, accounts={"data": stall})

    found = Rounds()
    for _ in range(3):
        found.take(lambda: turn(10.0, next(stalls)), {"b": lambda: turn(8.0, next(its))})
    assert found.ratio("b").high > 1.5
    assert found.apart("b") == pytest.approx((1.2, 1.2, 1.2, 3))


def test_few_stalls_are_known_from_all_that_read_the_same() -> None:
    """Six turns of the base and of another that reads: one of the latter stalled."""
    found = Rounds(reads_otherwise=lambda name: name == "cached")
    stalled = iter([0.0, 4.0])

    def turn(stall: float) -> Turn:
        return Turn(2.0 + stall, 10, 10, accounts={"data": stall})

    sides = {"b": lambda: turn(next(stalled)), "cached": lambda: turn(0.0)}
    for _ in range(2):
        found.take(lambda: turn(0.0), sides)
    assert found.ratio("cached").value == pytest.approx(1.0)
    unread = found.ratio_unread("cached")
    assert unread.value == pytest.approx((2.0 + 4.0 / 6) / 2.0)
    assert unread.low < 1.0  # one stall says little
    assert unread.pairs == 2


def test_the_steps_ahead_of_a_turn_read_as_well() -> None:
    """Two rounds of one step each, of which every reading takes about three seconds: they are sure of it."""
    found = Rounds(reads_otherwise=lambda name: name == "cached")
    waits = cycle([2.0, 4.0, 3.0])

    def turn() -> Turn:
        wait = next(waits)
        return Turn(
            1.0 + wait, 1, 10, accounts={"data": wait}, ahead_data_seconds=2 * next(waits), ahead_items=20
        )

    for _ in range(2):
        found.take(turn, {"b": turn, "cached": lambda: Turn(1.0, 1, 10)})
    read = sum(spent.items for spent in found.readings)
    assert read == 30 * 6  # of three turns of the base and of b in each round, one of cached not
    unread = found.ratio_unread("cached")
    assert unread.value == pytest.approx(4.0, rel=0.15)
    assert 2.5 < unread.low < 4.0 < unread.high < 6.0


def test_reading_that_was_shorter_in_every_round_counts() -> None:
    found = Rounds()
    for _ in range(3):
        found.take(lambda: Turn(10.0, 10, 10, accounts={"data": 4.0}),
                   {"b": lambda: Turn(5.0, 10, 10, accounts={"data": 1.0})})  # fmt: skip
    assert found.apart("b").value == pytest.approx(2.0)


def turns_of(*accounts: dict[str, float]) -> Rounds:
    """Rounds of a base that alone has turns, of ten steps each, with these accounts and 2 seconds of loading."""
    found, booked = Rounds(), iter(accounts)

    def own() -> Turn:
        named = {"data": 2.0, "forward": 1.0, **next(booked)}
        return Turn(sum(named.values()), 10, 10, accounts=named)

    for _ in accounts:
        found.take(own, {})
    return found


def test_a_base_that_became_slower_says_where() -> None:
    found = turns_of(*({"optimizer": seconds} for seconds in (1.0, 1.0, 6.0, 6.0)))
    assert found.slowed(flushed=True) == (pytest.approx(9.0 / 4.0), "optimizer", True)
    assert turns_of({}, {"optimizer": 4.0}).slowed() == (pytest.approx(7.0 / 3.0), "optimizer", False)


@pytest.mark.parametrize("later", [
    {"data": 9.0}, {"logging": 5.0}, {"compile": 30.0}, {"optimizer": 0.5}, {"forward": 2.0, "optimizer": 2.0},
])  # fmt: skip
def test_what_comes_by_chance_or_with_a_busy_machine_made_no_step_slower(later: dict[str, float]) -> None:
    assert turns_of({"optimizer": 1.0}, {"optimizer": 1.0, **later}).slowed() == UNCHANGED


def window(*batches: tuple[bool, bool]) -> list[MicroBatch]:
    return [MicroBatch(None, last=last, real=real) for last, real in batches]


def ring_of(*windows: list[MicroBatch]) -> tuple[int, list[MicroBatch]]:
    """How many windows were taken, and what is handed out."""
    ring = Ring(SimpleNamespace(train=None))
    return ring.fill(iter(windows)), list(islice(ring.epoch(0), 2))


def test_a_ring_takes_real_batches_up_to_the_end_of_an_epoch() -> None:
    usual, last, empty = window((False, True)), window((True, True)), window((True, False))
    assert ring_of(usual, usual, last, usual)[0] == 3
    assert ring_of(last, usual)[0] == 1
    assert ring_of(*[usual] * (RING + 5))[0] == RING
    for windows, taken in (((empty, usual, usual, last), 4), ((empty, empty, usual), 2)):
        number, handed = ring_of(*windows)
        assert number == taken
        assert not any(batch.last for batch in handed)
    assert [batch.real for batch in ring_of(empty, usual, last)[1]] == [True, True]


def test_compilation_is_no_part_of_a_comparison() -> None:
    def compiling() -> Turn:
        booked = {"compile": 4.0, "forward": 0.5}
        return Turn(seconds=5.0, steps=10, items=10, accounts=booked, compile_seconds=20.0)

    found = Rounds()
    for _ in range(2):
        found.take(compiling, {"b": lambda: Turn(seconds=1.0, steps=10, items=20)})
    assert found.ratio("b").value == pytest.approx(2.0)
    assert sum(turn.seconds - turn.running_seconds for turn in found.own) == pytest.approx(
        4.0 * len(found.own)
    )
    assert found.compiling(None) == pytest.approx(0.4)
    assert found.compiling(1000) == pytest.approx(0.02)


def test_a_thing_that_is_asked_no_more_keeps_its_rounds() -> None:
    said: list[str] = []
    found = Rounds()
    found.take(side(10, said, "a"), {"b": side(20, said, "b"), "c": side(5, said, "c")})
    found.take(side(20, said, "a"), {"b": side(40, said, "b")})
    assert found.ratio("c").value == pytest.approx(0.5)
    assert (found.ratio("b").value, found.ratio("b").pairs) == (pytest.approx(2.0), 2)


def test_where_time_is_short_what_gained_most_is_asked_again() -> None:
    said: list[str] = []
    found = Rounds()
    found.take(
        side(10, said, "a"),
        {name: side(speed, said, name) for name, speed in (("b", 9), ("c", 20), ("d", 12))},
    )
    found.took = {"": 1.0, "b": 1.0, "c": 2.0, "d": 1.0}
    assert found.seconds_of_a_round("bcd") == 7.0
    assert found.fitting("bcd", 7.0) == ["c", "d", "b"]
    assert found.fitting("bcd", 5.0) == ["c", "d"]
    assert found.fitting("bcd", 0.0) == ["c"]


def test_what_is_compared_is_asked_together() -> None:
    said: list[str] = []
    found = Rounds()
    speeds = (("cached", 12), ("silent", 10), ("larger", 20))
    found.take(side(10, said, "a"), {name: side(speed, said, name) for name, speed in speeds})
    found.took = {"": 0.3, "cached": 0.3, "silent": 0.3, "larger": 0.6}
    names = ["cached", "silent", "larger"]
    assert found.fitting(names, 1.6, {"larger": "silent"}) == ["larger", "silent"]
    assert found.fitting(names, 2.2, {"larger": "silent"}) == ["larger", "silent", "cached"]
    assert found.fitting(names, 1.3, {"larger": "silent"}, at_least_one=False) == ["cached", "silent"]
    assert found.fitting(names, 0.5, {"larger": "silent"}, at_least_one=False) == []


def test_compilation_does_not_slow_the_pace_of_a_side() -> None:
    compiling = iter([0.0, 0.0, 6.0, 0.0, 0.0])

    def take(steps: int) -> Turn:
        extra = next(compiling)
        return Turn(0.01 * steps + extra, steps, steps, accounts={"compile": extra})

    pacing = Side(take, 80, 0.3)
    assert [pacing().steps for _ in range(5)] == [10, 28, 28, 28, 28]
    compiling = iter([6.0, 6.0, 0.0, 0.0, 0.0])
    pacing = Side(take, 80, 0.3)
    assert [pacing().steps for _ in range(4)] == [10, 10, 10, 28]  # nor do turns grow that may compile more


def test_a_side_takes_about_so_long_whatever_its_speed() -> None:
    side_of = {
        multiple: Side(lambda steps: Turn(0.01 * steps, steps, steps), 80, 0.3, multiple)
        for multiple in (1, 7)
    }
    assert [side_of[1]().steps for _ in range(3)] == [10, 28, 28]  # with the 2 ahead of them 0.3 s
    assert [side_of[7]().steps for _ in range(3)] == [7, 28, 28]
    slow = Side(lambda steps: Turn(5.0 * steps, steps, steps), 80, 0.3)
    assert [slow().steps for _ in range(2)] == [10, 1]


def test_one_long_turn_of_a_side_changes_its_pace_by_its_share() -> None:
    paces = iter([1.0, 0.01, 0.01, 0.01, 0.03, 0.01])  # seconds a step; the first is the slowest of anything
    side = Side(lambda steps: Turn(next(paces) * steps, steps, steps), 80, 0.3)
    assert [side().steps for _ in range(6)] == [10, 1, 8, 28, 28, 14]


def test_steps_for_some_seconds() -> None:
    assert steps_for(lambda steps: Turn(0.01 * steps, steps, steps), 0.3) == 30
    assert steps_for(lambda steps: Turn(2.0 * steps, steps, steps), 0.3) == 1
    asked = []

    def cut(steps: int) -> Turn:
        asked.append(steps)
        return Turn(0.001 * min(steps, 3), min(steps, 3), steps)

    assert steps_for(cut, 0.3) == 3
    assert len(asked) == 2  # there was no time for more


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    temporary, here = tmp_path / "tmp", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    command = [sys.executable, "-m", "trainrun", "diagnose", "data.engine=workers", "data.num_workers=1"]
    paths = {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, cwd=here, env=os.environ | paths, stderr=subprocess.PIPE, text=True)
    deadline, family = time.monotonic() + 300, []
    try:
        while not list(temporary.glob("trainrun-lab-*/*/run")):
            assert process.poll() is None, process.communicate(timeout=300)[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, said = process.communicate(timeout=300)
        assert (process.returncode, said.strip()) == (130, "trainrun: interrupted")
        assert family
        assert not psutil.wait_procs(family, timeout=60)[1]
    finally:
        process.kill()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.communicate()
    assert not list(temporary.iterdir())
    assert not list(here.iterdir())
