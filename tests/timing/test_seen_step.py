"""A step that is timed on its device, and one whose hidden waits are named: as far as that goes without a GPU."""

from __future__ import annotations

import _thread
import contextlib
import json
import sys
import threading
import warnings
from pathlib import Path

import exact_parts
import pytest
import torch

from trainrun.assemble.step_function import seen_step
from trainrun.cli.main import main as cli
from trainrun.data.engines.device_feed import DeviceFeed
from trainrun.errors import ConfigError
from trainrun.interfaces import MicroBatch
from trainrun.runs.api import train
from trainrun.timing.cuda_events import MOST_WAITING, Copying, DeviceTimes, sampled
from trainrun.timing.phases import COPY, FORWARD, PhaseTimer
from trainrun.training.checks.sync_debug import Watched

SYNC = "called a synchronizing CUDA operation (Triggered internally at c10/cuda/CUDAFunctions.cpp:1)"


class Device:
    """Passes events only when it is told to; its clock is in milliseconds."""

    def __init__(self):
        self.now, self.passed = 0.0, -1.0

    def event(self):
        device = self

        class Event:
            def record(self, stream=None):
                device.now += 1.0
                self.at = device.now

            def query(self):
                return self.at <= device.passed

            def elapsed_time(self, end):
                assert end.query()
                return end.at - self.at

        return Event()


def test_phases_of_sampled_steps_are_read_once_the_device_passed_them():
    device = Device()
    times = DeviceTimes(device.event, every=3)
    run = exact_parts.parts_of((), batch_size=4, count=24)
    step = sampled(run.step, times)
    for batch in run.train.epoch(0):  # 6 steps, of which 2 are sampled
        step(run, [batch])
    assert times.read() == {"steps": 2, "pending": 2}  # the device is not that far, and nobody waits for it
    device.passed = 1e9
    found = times.read()
    assert (found.pop("steps"), found.pop("pending")) == (2, 0)
    assert {"forward", "backward", "optimizer", "runner"} <= found.keys()
    assert found["forward"] == pytest.approx(0.002)
    assert sum(found.values()) == pytest.approx((device.now - 2) / 1000)  # of n events there are n - 1 spans
    assert run.phases.read()["forward"] > 0  # the host's books go on


def test_a_step_is_the_same_when_it_is_timed():
    ends = []
    for every in (1, 10**9):
        run = exact_parts.parts_of((), batch_size=4)
        step = sampled(run.step, DeviceTimes(Device().event, every=every))
        for batch in run.train.epoch(0):
            step(run, [batch])
        ends.append([p.detach().clone() for p in run.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_no_sample_is_taken_while_many_wait():
    device = Device()
    times = DeviceTimes(device.event, every=1)

    def sample():
        if times.due("steps"):
            with times.sample("steps") as mark:
                mark(FORWARD)
                mark(None)

    for _ in range(3 * MOST_WAITING):
        sample()
    assert times.read() == {"steps": MOST_WAITING, "pending": MOST_WAITING}
    device.passed = 1e9
    with contextlib.suppress(KeyError), times.sample("steps"):
        raise KeyError  # a step that failed counts for nothing
    sample()
    steps = MOST_WAITING + 1
    assert times.read() == pytest.approx({"forward": 0.001 * steps, "steps": steps, "pending": 0})


def test_copies_have_an_account_of_their_own():
    class Clock:
        now = 0.0

        def __call__(self):
            self.now += 1.0
            return self.now

    class Source:
        num_batches, num_samples = 2, 2

        def epoch(self, epoch, start=0):
            yield from (MicroBatch(torch.ones(1)), MicroBatch(torch.ones(1)))

    phases = PhaseTimer(clock=Clock())
    with phases.on(FORWARD):  # whatever is open is open again after a copy
        batches = list(DeviceFeed(Source(), torch.device("meta"), Copying(phases, None)).epoch(0))
    assert all(batch.data.device.type == "meta" for batch in batches)
    assert phases.read()["copy"] == 2.0
    device = Device()
    times = DeviceTimes(device.event, every=2)
    for _ in range(4):
        with Copying(phases, times)("a stream"):
            pass
    device.passed = 1e9
    assert times.read() == pytest.approx({"copy": 0.002, "copies": 2, "pending": 0})
    assert COPY


def waits(model):
    warnings.warn(SYNC, UserWarning, stacklevel=1)


def test_lines_that_wait_are_named_once_and_counted():
    modes, notes = [], []

    def step(run, window):
        for _ in range(2):
            waits(None)
        warnings.warn("something else", UserWarning, stacklevel=1)

    watched = Watched(step, notes.append, modes.append)
    with pytest.warns(UserWarning, match="something else"):
        watched(None, [])
    with pytest.warns(UserWarning, match="something else"):
        watched(None, [])
    place = f"{__file__}:{waits.__code__.co_firstlineno + 1}"
    assert watched.found == {place: 4}
    assert notes == [
        f"{place} makes the host wait for the GPU: warnings.warn(SYNC, UserWarning, stacklevel=1)"
    ]
    assert modes == ["warn", "default"] * 2


def test_what_another_thread_waits_for_is_no_line_of_the_step():
    def step(run, window):
        other = threading.Thread(target=waits, args=(None,))
        other.start()
        other.join()

    watched = Watched(step, lambda text: None, lambda mode: None)
    watched(None, [])
    assert not watched.found


def test_what_the_backward_waits_for_in_a_thread_of_torch_is_heard():
    def step(run, window):
        done = threading.Lock()
        done.acquire()
        _thread.start_new_thread(lambda: (waits(None), done.release()), ())  # as Python sees one of torch's
        done.acquire()

    watched = Watched(step, lambda text: None, lambda mode: None)
    watched(None, [])
    assert watched.found == {f"{__file__}:{waits.__code__.co_firstlineno + 1}": 1}


def test_it_is_refused_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli(["monitor.sync_debug=true", "parallel.accelerator=cpu"]) == 2
    said = capsys.readouterr().err
    assert "monitor.sync_debug=true: does not go with parallel.accelerator=cpu" in said
    assert cli(["monitor.sync_debug=yes-please"]) == 2
    assert "monitor.sync_debug" in capsys.readouterr().err
    config = exact_parts.composed(("monitor.sync_debug=true",))
    with pytest.raises(ConfigError, match="this run is on cpu; use monitor.sync_debug=false"):
        seen_step(config, lambda *args: None, torch.device("cpu"), None, print)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    def test_device_times_and_copies_are_in_the_rows(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        words = ("trainer.max_epochs=4", "monitor.plots=false", "data.engine=threads")
        rows = [row for row in train(*words).metrics if row["kind"] == "ledger"]
        assert rows[-1]["device"]["forward"] > 0
        assert rows[-1]["device"]["copy"] > 0
        assert rows[-1]["seconds"]["device"] > 0

    def test_a_line_of_the_users_own_is_named(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
        Path("waiting_net.py").write_text(
            "from torch import nn\n\n\nclass Net(nn.Linear):\n    def forward(self, x):\n"
            "        x = super().forward(x.flatten(1))\n        x.sum().item()\n        return x\n"
        )
        words = ("model._target_=waiting_net.Net", "model.in_features=64", "model.out_features=10",
                 "monitor.sync_debug=true", "trainer.max_epochs=1", "monitor.plots=false")  # fmt: skip
        found = json.loads((train(*words).folder / "status.json").read_text())["hidden_syncs"]
        assert [place for place in found if place.endswith("waiting_net.py:7")]
