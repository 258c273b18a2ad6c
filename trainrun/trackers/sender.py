"""A bounded queue and a thread between a run and a tracking service.

The training does not wait for the service, and does not fail if the service fails. If the service refuses a row, it
is sent again after increasing pauses. Rows that could not be sent are counted. `trainrun report RUN --to NAME` sends
all rows of a run again, from `metrics.jsonl`.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Protocol, runtime_checkable

from trainrun.errors import ANY_FAULT, TrainrunError
from trainrun.folder.run_folder import RunDir
from trainrun.instantiate import build_node
from trainrun.interfaces import RunFacts
from trainrun.output import format_count

MAX_WAITING_ROWS = 10_000  # an hour or more of a usual run
CLOSE_SECONDS = 8.0  # how long the end of a run waits for a service
TRIES = 3  # attempts to send one row
MAX_PAUSE_SECONDS = 30.0  # between two attempts
POSITION_KEYS = ("step", "epoch", "time")  # of a row; they are no curves
SCALAR_KINDS = ("train", "eval", "test", "hardware", "vae")
SENT_KINDS = (*SCALAR_KINDS, "ledger", "note", "histogram", "picture")


@runtime_checkable
class Service(Protocol):
    """A tracking service. One thread calls it with the rows in order. Any method may fail or hang.

    A custom service (`monitor.NAME._target_`) has these methods instead of those of a `Monitor`.
    """

    def open(self, run: Mapping[str, Any], step: int) -> None:
        """Start or continue a run.

        Args:
            run: name, run_id (the same after a resume), folder, config.
            step: the step from which the run continues; 0 for a new run, and when all rows are sent again.
        """

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Send the numbers of one step. seconds: since 1970."""

    def text(self, name: str, text: str, step: int) -> None: ...

    def histogram(self, name: str, low: float, high: float, counts: list[int], step: int) -> None:
        """Send the counts in equal bins from low to high."""

    def picture(self, name: str, path: str, step: int) -> None:
        """Send a PNG file."""

    def finish(self) -> None:
        """Wait until everything has arrived."""


class Sender:
    """A tracker that sends rows to a service through a queue and a thread."""

    def __init__(self, service: Service, key: str, run: RunDir) -> None:
        self._service, self._key, self._run = service, key, run
        self._close_seconds = CLOSE_SECONDS
        self._name = key.partition(".")[2]
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._closing = self._finished = False
        self._deadline = 0.0
        self._fault: BaseException | None = None  # raised with the next row, on the thread that trains
        self._num_lost, self._reason, self._step, self._num_failures = 0, "", 0, 0
        self._thread: threading.Thread | None = None

    def on_start(self, facts: RunFacts, step: int) -> None:
        self._step = step
        run = {name: getattr(facts, name) for name in ("name", "run_id", "folder")}
        run["config"] = dict(facts.config)
        self._thread = threading.Thread(
            target=self._send_rows, args=(run, step), name=f"trainrun-{self._name}", daemon=True
        )
        self._thread.start()

    def on_row(self, row: dict[str, Any]) -> None:
        self._step = row["step"]
        if row["kind"] not in SENT_KINDS:
            return
        with self._changed:
            if self._closing:
                return
            if len(self._waiting) < MAX_WAITING_ROWS:
                self._waiting.append(row)
                self._changed.notify()
            else:
                self._num_lost += 1
            fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Queue the plots of the run, which exist by now."""
        for row in picture_rows(self._run, self._step, time.time()):
            self.on_row(row)
        self._start_closing()

    def _start_closing(self) -> None:
        """Start the time limit for closing. Several trackers close at the same time."""
        with self._changed:
            self._deadline = self._deadline or time.monotonic() + self._close_seconds
            self._closing = True
            self._changed.notify()

    def close(self) -> str:
        """Send the waiting rows, for a limited time, and end the thread. Return a message about rows that were not
        sent, or "".
        """
        if self._thread is None:
            return ""
        self._start_closing()
        self._thread.join(max(self._deadline - time.monotonic(), 0.0))
        with self._changed:
            num_lost = self._num_lost + len(self._waiting)
            if self._thread.is_alive():
                self._reason = self._reason or f"no answer within {self._close_seconds:g} s"
            if self._finished and not num_lost:
                return ""
            missing = (
                f"{format_count(num_lost, 'row')} not sent" if num_lost else "the last rows may be missing"
            )
            return (
                f"{self._key}: {missing} ({self._reason}); to send all rows again: "
                f"trainrun report {quote(str(self._run.root))} --to {self._name}"
            )

    def _send_rows(self, run: Mapping[str, Any], step: int) -> None:
        if not self._try_repeatedly(lambda: self._service.open(run, step), math.inf):
            return
        while (row := self._wait_for_row()) is not None:
            sent = self._try_repeatedly(partial(send_row, self._service, row), TRIES)
            with self._changed:
                if not sent and self._closing:  # no time is left for the other rows
                    return
                self._waiting.popleft()
                self._num_lost += not sent
        self._finished = self._try_repeatedly(self._service.finish, 1)

    def _wait_for_row(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting else None

    def _try_repeatedly(self, work: Callable[[], None], max_tries: float) -> bool:
        """Call `work` until it succeeds. Return False after `max_tries` failures, or if the run ends first."""
        for attempt in itertools.count(1):
            try:
                work()
            except ANY_FAULT as error:  # of foreign code
                self._num_failures += 1
                with self._changed:
                    if not self._reason:
                        self._fault = error  # only the first fault is reported
                    self._reason = format_error_line(error)[:200]
                    if self._closing or attempt >= max_tries:
                        return False
                    pause = min(0.5 * 2.0 ** min(self._num_failures, 9), MAX_PAUSE_SECONDS)
                    self._changed.wait_for(lambda: self._closing, pause)
            else:
                self._num_failures = 0
                return True
        raise AssertionError


def send_all_rows(
    run: RunDir,
    name: str,
    node: Mapping[str, Any],
    facts: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
) -> int:
    """Send all rows and plots of a run to the service that `node` builds. Return how many were sent.

    facts: see `Service.open`. Raise TrainrunError if the service fails.
    """
    sent_rows = [row for row in rows if row["kind"] in SENT_KINDS]
    last: Mapping[str, Any] = sent_rows[-1] if sent_rows else {"step": 0, "time": 0.0}
    sent_rows += picture_rows(run, last["step"], last["time"])
    service = build_node(dict(node), f"monitor.{name}")
    if not isinstance(service, Service):
        raise TrainrunError(
            f"--to {name}: {node.get('_target_')} is no service; it has no open, scalars, finish"
        )
    try:
        service.open(facts, 0)
        for row in sent_rows:
            send_row(service, row)
        service.finish()
    except ANY_FAULT as error:  # of foreign code
        raise TrainrunError(f"--to {name}: {format_error_line(error)[:300]}") from error
    return len(sent_rows)


def picture_rows(run: RunDir, step: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each picture in `plots/`. seconds: since 1970."""
    return [
        {"kind": "picture", "step": step, "time": seconds, "path": str(path)}
        for path in sorted(run.plots.glob("[!.]*.png"))
    ]


def send_row(service: Service, row: Mapping[str, Any]) -> None:
    """Call the service's method for this kind of row. Other kinds are ignored."""
    kind, step = row["kind"], row["step"]
    if kind == "note":
        service.text("notes", row["text"], step)
    elif kind == "histogram":
        for name, (low, high, counts) in row["histograms"].items():
            service.histogram(name, low, high, counts, step)
    elif kind == "picture":
        service.picture(f"plots/{Path(row['path']).stem}", row["path"], step)
    elif values := dict(iterate_scalars(row)):
        service.scalars(values, step, row["time"])


def iterate_scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield name and value of each curve in a row, such as `train/loss`, `lr`, `hardware/memory_bytes`,
    `phases/forward` (seconds).

    Training means in a validation row are left out, because the training rows have those curves already.
    """
    kind = row["kind"]
    if kind == "ledger":
        yield from ((f"phases/{name}", value) for name, value in row["seconds"].items())
    elif kind in SCALAR_KINDS:
        prefix = f"{kind}/" if kind in ("hardware", "vae") else ""
        for name, value in row.items():
            if kind == "eval" and name.startswith("train/"):
                continue
            if name not in POSITION_KEYS and isinstance(value, int | float):
                yield prefix + name, value


def format_error_line(error: BaseException) -> str:
    """Return class and message of an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def wrap_service(built: Any, key: str, run: RunDir) -> Any:
    """Return a `Sender` for a service; return any other object, which is a monitor, unchanged."""
    return Sender(built, key, run) if isinstance(built, Service) else built
