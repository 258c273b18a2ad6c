"""The ledger in `metrics.jsonl`: a row at the start, about once a second at log points, and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trainrun.device_times import DeviceTimes
from trainrun.interfaces import RunFacts
from trainrun.ledger import Ledger
from trainrun.monitor.vitals import Vitals


class LedgerRows:
    """Fills `Monitor`. Rows count from the start of their session: what lies between two is their difference."""

    def __init__(
        self,
        write: Callable[[Mapping[str, Any]], None],
        ledger: Ledger,
        device_times: DeviceTimes | None = None,
        every_seconds: float = 1.0,
    ) -> None:
        self._write, self._ledger, self._every_seconds = write, ledger, every_seconds
        self._device_times = device_times
        self._vitals = Vitals()
        self._written = 0.0

    def on_start(self, facts: RunFacts, step: int) -> None:
        self.write(step)

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        if time.perf_counter() - self._written >= self._every_seconds:
            self.write(step)

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self.on_step(step, epoch, row)

    def on_note(self, text: str) -> None:
        """Nothing to book."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.write(summary["step"])

    def write(self, step: int) -> None:
        self._written = time.perf_counter()
        seconds = {name: round(value, 6) for name, value in self._ledger.read().items()}
        vitals = {name: round(value, 6) for name, value in self._vitals.read().items()}
        row = {"kind": "ledger", "step": step, "time": time.time(), "seconds": seconds, "vitals": vitals}
        if self._device_times is not None:
            row["device"] = {name: round(value, 6) for name, value in self._device_times.read().items()}
        self._write(row)

    def close(self) -> None:
        self._vitals.close()
