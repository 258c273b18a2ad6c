"""Copies to the device have an account of time of their own."""

from __future__ import annotations

from functools import partial

import torch

from trainrun.data.engines.device_feed import DeviceFeed
from trainrun.interfaces import MicroBatch
from trainrun.timing.phases import COPY, FORWARD, PhaseTimer


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
    with phases.measure(FORWARD):  # whatever is open is open again after a copy
        batches = list(DeviceFeed(Source(), torch.device("meta"), partial(phases.measure, COPY)).epoch(0))
    assert all(batch.data.device.type == "meta" for batch in batches)
    assert phases.read()["copy"] == 2.0
