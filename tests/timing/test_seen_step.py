"""Copies that are booked, and a step whose hidden waits are named: as far as that goes without a GPU."""

from __future__ import annotations

import _thread
import json
import sys
import threading
import warnings
from functools import partial
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
from trainrun.timing.phases import COPY, FORWARD, PhaseTimer
from trainrun.training.checks.first_step import Checked
from trainrun.training.checks.sync_debug import Watched, hidden_syncs

SYNC = "called a synchronizing CUDA operation (Triggered internally at c10/cuda/CUDAFunctions.cpp:1)"


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
        batches = list(DeviceFeed(Source(), torch.device("meta"), partial(phases.on, COPY)).epoch(0))
    assert all(batch.data.device.type == "meta" for batch in batches)
    assert phases.read()["copy"] == 2.0


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
    assert hidden_syncs(Checked(watched)) == hidden_syncs(watched) == {"hidden_syncs": {place: 4}}
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
        seen_step(config, lambda *args: None, torch.device("cpu"), print)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
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
