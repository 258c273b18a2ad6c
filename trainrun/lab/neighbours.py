"""What else runs on this machine while something is measured: it widens every interval, and shifts some."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import psutil

IDLE: Final = ("idle", "iowait", "guest", "guest_nice")  # guests are in user and nice as well


class Neighbours:
    """From now on. Time that a host takes from a virtual machine counts as theirs."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(), own_seconds()

    def cores(self) -> float:
        """That others kept busy, on average; this process and those under it are left out."""
        others = busy_seconds() - self._busy - (own_seconds() - self._own)
        return max(others, 0.0) / max(time.monotonic() - self._began, 1e-9)


def busy_seconds() -> float:
    """Return the seconds that all cores together have been busy since the machine started."""
    times = psutil.cpu_times()._asdict()
    return float(sum(seconds for name, seconds in times.items() if name not in IDLE))


def own_seconds() -> float:
    """Return the CPU seconds of this process, its descendants, and their children that have ended."""
    process, total = psutil.Process(), 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has just ended
            spent = one.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total
