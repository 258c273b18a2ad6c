"""What becomes of the memory of freed tensors, decided ahead of everything that is timed."""

from __future__ import annotations

from typing import Final

from trainrun.data.choice import free_bytes
from trainrun.parts import Parts
from trainrun.process.host_memory import can_keep, keep_freed_memory, return_freed_memory
from trainrun.start.forecast import memory_forecast, rough_guess

AMPLE: Final = 1 / 3  # of the free memory may come: holes that fit no other tensor can double it
NO_SWITCH: Final = "the C library of this machine has no such switch"


class FreedMemory:
    """`trainer.freed_memory` of one run. Every rank decides for itself: no number depends on it."""

    def __init__(self, parts: Parts) -> None:
        """Set it at once, unless only a forecast can tell whether memory is ample."""
        self._parts, self._free = parts, free_bytes(parts.parallel.device) / parts.parallel.local_world_size
        self._wanted, self._told = parts.config.trainer.freed_memory, ""
        self._undecided = self._wanted == "auto" and parts.parallel.device.type == "cpu" and can_keep()
        if self._wanted == "keep" and not keep_freed_memory():
            self._told = f"trainer.freed_memory: keep, but {NO_SWITCH}"
        if self._wanted == "return":
            done = return_freed_memory()
            self._told = f"trainer.freed_memory: {'tensors of 1 MB or more go back' if done else NO_SWITCH}"
        if self._undecided:
            self._decide(rough_guess(parts))

    def lines(self) -> list[str]:
        """For the first lines of the run: about this, and about what a step will take. The data is there."""
        line, coming = memory_forecast(self._parts)
        if self._undecided:
            self._decide(coming)
        if self._undecided:
            self._told = "trainer.freed_memory: libc, memory may become scarce (keep may be faster)"
        return [self._told, line]

    def _decide(self, coming: float) -> None:
        if coming <= AMPLE * self._free:
            keep_freed_memory()
            self._undecided = False
