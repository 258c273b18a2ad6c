"""The one way of every row of a run: from where it is made to the metrics file and to every tracker."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from trainrun.interfaces import Monitor, RunFacts
from trainrun.monitor.metric_rows import MetricsFile
from trainrun.timing.phases import PhaseTimer

if TYPE_CHECKING:
    from trainrun.monitor.console import Console as Screen
    from trainrun.monitor.tracker import Tracker

NOT_IN_ROWS = ("run_id", "config")  # of the facts: they stand in files of their own
LEDGER_SECONDS = 1.0  # between two rows of the account of time


class Bus:
    """Fills `Monitor`. screens: what people see; file, trackers: get every row; phases: the account of time.

    Rows may come from any thread. The file has them at once, trackers on the thread that trains, with its next
    row: theirs is code of users, which need not be safe for threads.
    """

    def __init__(
        self, file: MetricsFile | None = None, screens: Sequence[Screen] = (), trackers: Sequence[Tracker] = (),
        phases: PhaseTimer | None = None,
    ) -> None:  # fmt: skip
        self._file, self._screens, self._trackers = file, screens, trackers
        self._listeners: list[Monitor] = [*screens, *trackers]
        self._phases = phases
        self._ledger_at = 0.0
        self.ledger: dict[str, float] = {}  # the newest row of the account of time: seconds of each phase
        self._waiting: deque[dict[str, Any]] = deque()
        self._step = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Take a row of any kind: plain numbers, texts, lists and mappings."""
        if self._file is not None:
            self._file.write(row)
        if row.get("kind") == "layers":
            for screen in self._screens:
                screen.on_layers(row["layers"])
        if self._trackers:
            self._waiting.append(dict(row))

    def on_start(self, facts: RunFacts, step: int) -> None:
        self._step = step
        for monitor in self._listeners:
            monitor.on_start(facts, step)
        row = {item.name: getattr(facts, item.name) for item in fields(facts)}
        self._publish("start", facts={name: row[name] for name in row if name not in NOT_IN_ROWS})
        self.write_phases()

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._step = step
        for screen in self._screens:
            screen.on_step(step, epoch, row)
        self._publish("train", epoch=epoch, **row)
        self.write_phases(LEDGER_SECONDS)
        for tracker in self._trackers:
            tracker.on_step(step, epoch, row)
        self._hand_on()

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._step = step
        for screen in self._screens:
            screen.on_eval(step, epoch, row)
        self._publish("test" if any(name.startswith("test/") for name in row) else "eval", epoch=epoch, **row)
        self.write_phases(LEDGER_SECONDS)
        self.flush()
        for tracker in self._trackers:
            tracker.on_eval(step, epoch, row)
        self._hand_on()

    def on_note(self, text: str) -> None:
        for monitor in self._listeners:
            monitor.on_note(text)  # a tracker whose on_note fails is told of once, so this ends
        self._publish("note", text=text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Publish the last row. The screens show the summary in `show_end`, after the plots."""
        self._step = summary.get("step", self._step)
        self.write_phases()
        self._publish("end", summary=dict(summary))
        self.flush()

    def show_end(self, summary: Mapping[str, Any]) -> None:
        self._hand_on()
        for monitor in self._listeners:
            monitor.on_end(summary)

    def write_phases(self, every_seconds: float = 0.0) -> None:
        """Publish the seconds of every phase since the session began, unless the last such row is younger than
        `every_seconds`.
        """
        now = time.perf_counter()
        if self._phases is None or now - self._ledger_at < every_seconds:
            return
        self._ledger_at = now
        self.ledger = {name: round(value, 6) for name, value in self._phases.read().items()}
        self._publish("ledger", seconds=self.ledger)

    def flush(self) -> None:
        """Write the rows that the file held back."""
        if self._file is not None:
            self._file.flush()

    def sync(self) -> None:
        """Return when the disk has every row."""
        if self._file is not None:
            self._file.sync()

    def faults(self) -> dict[str, int]:
        """Return how many calls of each tracker failed, without the trackers that had no failure."""
        return {tracker.key: tracker.faults for tracker in self._trackers if tracker.faults}

    def _publish(self, kind: str, **values: Any) -> None:
        self.write({"kind": kind, "step": self._step, "time": time.time(), **values})

    def _hand_on(self) -> None:
        while self._waiting:
            row = self._waiting.popleft()
            for tracker in self._trackers:
                tracker.on_row(row)

    def close(self) -> None:
        """Close the trackers first: their failures are still shown and written."""
        with contextlib.ExitStack() as closing:  # from the last to the first, whatever one of them raises
            for screen in self._screens:
                closing.callback(screen.close)
            closing.callback(self.flush)
            for tracker in self._trackers:
                closing.callback(tracker.close)
