"""How long a diagnosis may still take, and whether anything more can be asked in it."""

from __future__ import annotations

import time
from typing import Final

from trainrun.lab.orders import Turn
from trainrun.ledger import COMPILE

LEAST_TURN: Final = 0.1  # seconds


class TimeLeft:
    """deadline: by `time.monotonic()`."""

    def __init__(self, deadline: float) -> None:
        self._deadline, self._compiling = deadline, 0.0

    @property
    def seconds(self) -> float:
        """Below 0 when it is over."""
        return self._deadline - time.monotonic()

    def reserve(self, seconds: float) -> None:
        self._deadline -= seconds

    def of_a_turn(self, share: float = 1.0) -> float:
        """Seconds that it may take at most, of this share of all."""
        return max(share * self.seconds, LEAST_TURN)

    def note(self, turn: Turn) -> Turn:
        """Compiling cannot be interrupted, and where one turn compiled another shape, the next may have one more."""
        self._compiling = max(self._compiling, turn.booked(COMPILE))
        return turn

    def is_over(self, grace: float = 0.0) -> bool:
        return self.seconds + grace <= self._compiling
