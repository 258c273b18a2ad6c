"""The account of time as rows: one at the start, about one a second at log points, and one at the end."""

from __future__ import annotations

import time
from typing import Any

from trainrun.runtime.process_stats import Vitals
from trainrun.timing.cuda_events import DeviceTimes
from trainrun.timing.phases import PhaseTimer


class PhaseRows:
    """Rows count from the start of their session: what lies between two is their difference."""

    def __init__(
        self, phases: PhaseTimer, device_times: DeviceTimes | None = None, every_seconds: float = 1.0
    ) -> None:
        self._phases, self._device_times, self._every_seconds = phases, device_times, every_seconds
        self._vitals = Vitals()
        self._made = 0.0

    def is_due(self) -> bool:
        return time.perf_counter() - self._made >= self._every_seconds

    def row(self, step: int) -> dict[str, Any]:
        """Seconds of every account, what else took time in the process, and the phases on a GPU."""
        self._made = time.perf_counter()
        row: dict[str, Any] = {"kind": "ledger", "step": step, "time": time.time()}
        row["seconds"] = _rounded(self._phases.read())
        row["vitals"] = _rounded(self._vitals.read())
        if self._device_times is not None:
            row["device"] = _rounded(self._device_times.read())
        return row

    def close(self) -> None:
        self._vitals.close()


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in values.items()}
