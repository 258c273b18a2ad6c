"""The bus of a run: every row goes from its source through the bus to the metrics file and to all trackers."""

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
    """The monitor that distributes rows to screens, the metrics file and trackers.

    screens: what people see. file, trackers: get every row. phases: the timer of the run's phases. Rows may come
        from any thread. The file gets them at once. Trackers are user code, which need not be thread-safe: they get
        waiting rows on the training thread, together with its next row.
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
        """Write a row to the file and queue it for the trackers. Values are plain numbers, texts, lists and
        mappings.
        """
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
        self._send_to_trackers()

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._step = step
        for screen in self._screens:
            screen.on_eval(step, epoch, row)
        self._publish("test" if any(name.startswith("test/") for name in row) else "eval", epoch=epoch, **row)
        self.write_phases(LEDGER_SECONDS)
        self.flush()
        for tracker in self._trackers:
            tracker.on_eval(step, epoch, row)
        self._send_to_trackers()

    def on_note(self, text: str) -> None:
        for monitor in self._listeners:
            monitor.on_note(text)  # a tracker whose on_note fails is told of once, so this ends
        self._publish("note", text=text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Write the last row. The screens show the summary later, in `show_end`, when the plots are drawn."""
        self._step = summary.get("step", self._step)
        self.write_phases()
        self._publish("end", summary=dict(summary))
        self.flush()

    def show_end(self, summary: Mapping[str, Any]) -> None:
        self._send_to_trackers()
        for monitor in self._listeners:
            monitor.on_end(summary)

    def write_phases(self, every_seconds: float = 0.0) -> None:
        """Write a row with the seconds of every phase since the session began, if the last such row is at least
        `every_seconds` old.
        """
        now = time.perf_counter()
        if self._phases is None or now - self._ledger_at < every_seconds:
            return
        self._ledger_at = now
        self.ledger = {name: round(value, 6) for name, value in self._phases.read().items()}
        self._publish("ledger", seconds=self.ledger)

    def flush(self) -> None:
        """Write the buffered rows to the file."""
        if self._file is not None:
            self._file.flush()

    def faults(self) -> dict[str, int]:
        """Return the number of failed calls of each tracker that failed at all."""
        return {tracker.key: tracker.faults for tracker in self._trackers if tracker.faults}

    def _publish(self, kind: str, **values: Any) -> None:
        self.write({"kind": kind, "step": self._step, "time": time.time(), **values})

    def _send_to_trackers(self) -> None:
        while self._waiting:
            row = self._waiting.popleft()
            for tracker in self._trackers:
                tracker.on_row(row)

    def close(self) -> None:
        """Close the trackers, then the file and the screens. Failures of trackers are still shown and written."""
        with contextlib.ExitStack() as closing:  # from the last to the first, whatever one of them raises
            for screen in self._screens:
                closing.callback(screen.close)
            closing.callback(self.flush)
            for tracker in self._trackers:
                closing.callback(tracker.close)
