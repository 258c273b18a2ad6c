"""The time of each rank by phase, and the name of a rank for which the others wait.

What: at log points the ranks exchange their seconds in data, forward, backward and waiting. Only data and forward show
    which rank is slow: the backward ends with an exchange, so the time of every rank includes its wait for the
    slowest. When: several ranks. When not: GPUs that differ in speed; these are times of the host, which only hands
    the work to the GPU. Cost: one exchange of four numbers per log point. Source: the search for stragglers in
    MegaScale (Jiang et al. 2024, arXiv:2402.15627).
"""

from __future__ import annotations

import socket
from statistics import median
from typing import Any

from trainrun.interfaces import Parallel
from trainrun.timing.phases import ACCOUNTS, BACKWARD, DATA, FORWARD, RANKS, PhaseTimer

MEASURED = (DATA, FORWARD, BACKWARD, RANKS)
LEAST_STEPS = 50
SLOWER = 1.2  # than the median of the ranks
LEAST_SHARE = 0.05  # of the step: a smaller difference costs too little to be named


class RankTimes:
    """The seconds of all ranks since the previous log point. Each rank has one, because measuring is an exchange."""

    def __init__(self, phases: PhaseTimer, parallel: Parallel) -> None:
        self._phases, self._parallel = phases, parallel
        # where a forward gathers weights of other ranks, it waits for the slowest rank too
        self._own_phases = (DATA,) if parallel.forward_is_collective else (DATA, FORWARD)
        self._step = 0
        self._read = [0.0] * len(MEASURED)
        self._num_steps = 0  # since the last comparison
        self._own_seconds = [0.0] * parallel.world_size
        self._step_seconds = 0.0
        self._warm = False
        self._named: set[int] = set()

    def start(self, step: int) -> None:
        """Begin to measure after `step`."""
        self._step, self._read = step, self._read_phases()

    def measure(self, step: int) -> tuple[dict[str, Any], str]:
        """Return the row of a log point, with the seconds of each rank by phase, and a note that names a slow rank or
        is "". Called on all ranks.
        """
        read = self._read_phases()
        by_rank = self._parallel.gather([now - before for now, before in zip(read, self._read, strict=True)])
        num_steps = step - self._step
        self._step, self._read = step, read
        seconds = dict(zip(MEASURED, zip(*by_rank, strict=True), strict=True))
        note = self._compare(seconds, num_steps) if self._warm else ""
        self._warm = True  # the first steps of a rank may be slow for reasons that end
        rounded = {
            ACCOUNTS[phase]: [round(value, 6) for value in values] for phase, values in seconds.items()
        }
        return {"steps": num_steps, "seconds": rounded}, note

    def _read_phases(self) -> list[float]:
        return [self._phases.read_seconds(phase) for phase in MEASURED]

    def _compare(self, seconds: dict[int, tuple[float, ...]], num_steps: int) -> str:
        """Add the seconds. After 50 steps, return the note about a slow rank that has not been named."""
        self._num_steps += num_steps
        self._step_seconds += max(map(sum, zip(*seconds.values(), strict=True)))
        for rank in range(self._parallel.world_size):
            self._own_seconds[rank] += sum(seconds[phase][rank] for phase in self._own_phases)
        if self._num_steps < LEAST_STEPS:
            return ""
        usual = median(self._own_seconds)
        least = max(SLOWER * usual, usual + LEAST_SHARE * self._step_seconds)
        slow = [
            rank for rank, spent in enumerate(self._own_seconds) if spent > least and rank not in self._named
        ]
        note = ""
        if slow:  # the same on all ranks, which computed it from the same numbers
            slowest = max(slow, key=self._own_seconds.__getitem__)
            self._named.add(slowest)
            host = self._parallel.gather(socket.gethostname())[slowest]
            spent, usual = (1000 * value / self._num_steps for value in (self._own_seconds[slowest], usual))
            names = " and ".join(ACCOUNTS[phase] for phase in self._own_phases)
            note = (
                f"rank {slowest} on {host} is slow, and the other ranks wait for it: {names} took {spent:.3g} ms a "
                f"step over {self._num_steps} steps, the median of the ranks is {usual:.3g} ms"
            )
        self._num_steps, self._step_seconds = 0, 0.0
        self._own_seconds = [0.0] * self._parallel.world_size
        return note
