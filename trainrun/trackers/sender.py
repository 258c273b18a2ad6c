"""A bounded queue and a thread between a run and a service: whatever the service does, the run neither waits nor ends.

A row that the service refuses is tried again, later each time; what could not be sent in the end is counted, and
`unsent.json` of the run folder says since when, so that `trainrun report RUN --to NAME` can send it.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Protocol, runtime_checkable

from trainrun.errors import ANY_FAULT
from trainrun.interfaces import RunFacts
from trainrun.output import counted
from trainrun.runs.run_folder import RunDir, read_json, write_json

MOST_WAITING = 10_000  # rows: an hour and more of a usual run
CLOSE_SECONDS = 8.0  # what the end of a run waits for a service
TRIES, LONGEST_PAUSE = 3, 30.0  # of one row; between tries, in seconds
PLACES = ("step", "epoch", "time")  # of a row, and no curves
SCALARS = ("train", "eval", "test", "hardware", "vae")
SENT = (*SCALARS, "ledger", "note", "histogram", "picture")


@runtime_checkable
class Service(Protocol):
    """Where rows are sent; called by one thread, in the order of rows. Any method may fail or hang.

    A service of one's own (`monitor.NAME._target_`) has these methods in place of those of a `Monitor`. With an
    attribute `apart = True` it lives in a process of its own, which is ended where it hangs.
    """

    def open(self, run: Mapping[str, Any], step: int) -> None:
        """run: name, run_id (the same after a resume), folder, config. step: above 0 after a resume."""

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Numbers of one step. seconds: since 1970."""

    def text(self, name: str, text: str, step: int) -> None: ...

    def histogram(self, name: str, low: float, high: float, counts: list[int], step: int) -> None:
        """Counts in equal bins from low to high."""

    def picture(self, name: str, path: str, step: int) -> None:
        """A PNG file."""

    def finish(self) -> None:
        """Return when everything has arrived."""


class Sender:
    """A tracker that hands what it gets to a service."""

    def __init__(self, service: Service, key: str, run: RunDir) -> None:
        self._service, self._key, self._run, self._patience = service, key, run, CLOSE_SECONDS
        self._name = key.partition(".")[2]
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._closing = self._finished = False
        self._until = 0.0
        self._fault: BaseException | None = None  # told with the next row, on the thread that trains
        self._lost, self._lost_since, self._why, self._step, self._fails = 0, math.inf, "", 0, 0
        self._thread: threading.Thread | None = None

    def on_start(self, facts: RunFacts, step: int) -> None:
        self._step = step
        self._lost_since = missing_since(
            self._run, self._name, step
        )  # an earlier session's are still to send
        self._began = min(time.time(), self._lost_since)
        mark(self._run, self._name, self._began)  # until the end says otherwise
        told = {name: getattr(facts, name) for name in ("name", "run_id", "folder")}
        told["config"] = dict(facts.config)
        self._thread = threading.Thread(
            target=self._work, args=(told, step), name=f"trainrun-{self._name}", daemon=True
        )
        self._thread.start()

    def on_row(self, row: dict[str, Any]) -> None:
        self._step = row["step"]
        if row["kind"] not in SENT:
            return
        with self._changed:
            if self._closing:
                return
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(row)
                self._changed.notify()
            else:
                self._lose(row)
            fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Pictures are drawn by now."""
        for path in sorted(self._run.plots.glob("[!.]*.png")):
            self.on_row({"kind": "picture", "step": self._step, "time": time.time(), "path": str(path)})
        self._begin_end()

    def _begin_end(self) -> None:
        """Start the clock: several trackers end at the same time."""
        with self._changed:
            self._until = self._until or time.monotonic() + self._patience
            self._closing = True
            self._changed.notify()

    def close(self) -> str:
        """Return what to tell of rows that were not sent; empty if all were."""
        if self._thread is None:
            return ""
        self._begin_end()
        self._thread.join(max(self._until - time.monotonic(), 0.0))
        with self._changed:
            for row in self._waiting:
                self._lose(row)
            lost, since = self._lost, self._lost_since
            if hangs := self._thread.is_alive():
                self._why = self._why or f"no answer within {self._patience:g} s"
        if hangs:
            getattr(self._service, "kill", lambda: None)()
        mark(self._run, self._name, since if self._finished else self._began, time.time(), self._step)
        if self._finished and not lost and math.isinf(since):
            return ""
        what = f"{counted(lost, 'row')} not sent" if lost else "it is not known whether every row has arrived"
        self._why = self._why or "those of an earlier session"
        return (
            f"{self._key}: {what} ({self._why}); to send: "
            f"trainrun report {quote(str(self._run.root))} --to {self._name}"
        )

    def _lose(self, row: Mapping[str, Any]) -> None:
        self._lost, self._lost_since = self._lost + 1, min(self._lost_since, row["time"])

    def _work(self, run: Mapping[str, Any], step: int) -> None:
        if not self._tried(lambda: self._service.open(run, step), math.inf):
            return
        while (row := self._next()) is not None:
            sent = self._tried(partial(deliver, self._service, row), TRIES)
            with self._changed:
                if not sent and self._closing:  # no time for the others
                    return
                self._waiting.popleft()
                if not sent:
                    self._lose(row)
        self._finished = self._tried(self._service.finish, 1)

    def _next(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting else None

    def _tried(self, work: Callable[[], None], most: float) -> bool:
        """Whether it succeeded at last."""
        for attempt in itertools.count(1):
            try:
                work()
            except ANY_FAULT as error:  # of foreign code
                self._fails += 1
                with self._changed:
                    self._fault = self._fault if self._why else error  # the first is told
                    self._why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                    if self._closing or attempt >= most:
                        return False
                    pause = min(0.5 * 2.0 ** min(self._fails, 9), LONGEST_PAUSE)
                    self._changed.wait_for(lambda: self._closing, pause)
            else:
                self._fails = 0
                return True
        raise AssertionError


def deliver(service: Service, row: Mapping[str, Any]) -> None:
    """What a service makes of a row; kinds that hold nothing for one are left out."""
    kind, step = row["kind"], row["step"]
    if kind == "note":
        service.text("notes", row["text"], step)
    elif kind == "histogram":
        for name, (low, high, counts) in row["histograms"].items():
            service.histogram(name, low, high, counts, step)
    elif kind == "picture":
        service.picture(f"plots/{Path(row['path']).stem}", row["path"], step)
    elif values := dict(scalars_of(row)):
        service.scalars(values, step, row["time"])


def scalars_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The curves of a row: `train/loss`, `lr`, `hardware/memory_bytes`, `phases/forward` in seconds."""
    kind = row["kind"]
    if kind == "ledger":
        yield from ((f"phases/{name}", value) for name, value in row["seconds"].items())
    elif kind in SCALARS:
        prefix = f"{kind}/" if kind in ("hardware", "vae") else ""
        for name, value in row.items():
            if name not in PLACES and isinstance(value, int | float):
                yield prefix + name, value


def missing_since(run: RunDir, name: str, step: int) -> float:
    """The time since when a tracker lacks rows of a run that begins at `step`; infinite: it has them."""
    known = marks(run).get(name) or {"until": 0.0, "step": 0}
    if not isinstance(known, dict):
        return float(known)
    return known["until"] if step > known["step"] else math.inf


def marks(run: RunDir) -> dict[str, Any]:
    """By tracker: since when rows are unsent, or the time and step up to which all were sent."""
    try:
        found = read_json(run.unsent)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def mark(run: RunDir, name: str, since: float, until: float = 0.0, step: int = 0) -> None:
    """since: infinite where all were sent, `until` then and up to this step."""
    told = since if math.isfinite(since) else {"until": until, "step": step}
    write_json(run.unsent, marks(run) | {name: told})


def listening(built: Any, node: Mapping[str, Any], key: str, run: RunDir) -> Any:
    """The tracker of a service; anything else listens itself."""
    if not isinstance(built, Service):
        return built
    if getattr(built, "apart", False):
        from trainrun.trackers.apart import Apart

        built = Apart(node)
    return Sender(built, key, run)
