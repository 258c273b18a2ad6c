"""A service in a process of its own: what it imports, prints or waits for is none of the training's; it can be killed.

    python -m trainrun.trackers.apart < calls

One call a line as JSON, answered by one line: an empty one, or what went wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trainrun.instantiate import build

PARENT_SECONDS = 2.0  # between looks whether the training is still there
ENDED = "its process has ended"
STEP_AT = {"scalars": 2, "text": 3, "histogram": 5, "picture": 3}  # where a call has its step
GRACE_SECONDS = 60.0  # to end what it is at: of a new database, a killed MLflow leaves half of the tables


class ServiceError(RuntimeError):
    """What the service said."""


class Apart:
    """Fills `Service`. node: its `_target_` and arguments.

    A process that ends is started again with the next row; `finish` then fails, as what it still held may be lost.
    """

    def __init__(self, node: Mapping[str, Any]) -> None:
        self._node = dict(node)
        self._process: subprocess.Popen[str] | None = None
        self._run: Mapping[str, Any] = {}
        self._ended = self._killed = False

    def open(self, run: Mapping[str, Any], step: int) -> None:
        self._run = run
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainrun.trackers.apart"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, encoding="utf-8", start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
            self._call("build", self._node)
        self._call("open", {**run, "config": json.loads(json.dumps(run["config"], default=str))}, step)

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._call("scalars", dict(values), step, seconds)

    def text(self, name: str, text: str, step: int) -> None:
        self._call("text", name, text, step)

    def histogram(self, name: str, low: float, high: float, counts: list[int], step: int) -> None:
        self._call("histogram", name, low, high, counts, step)

    def picture(self, name: str, path: str, step: int) -> None:
        self._call("picture", name, path, step)

    def finish(self) -> None:
        self._call("finish")
        assert self._process is not None
        self._process.communicate()  # its own ends too
        if self._ended:
            raise ServiceError(ENDED)

    def kill(self) -> None:
        """End it soon; from another thread than the one that waits for an answer."""
        self._killed = True
        if self._process is not None:
            self._process.terminate()

    def _call(self, *call: Any) -> None:
        process = self._process
        assert process is not None
        if process.poll() is not None and call[0] not in ("build", "open"):
            self._ended = True
            if self._killed or call[0] not in STEP_AT:
                raise ServiceError(ENDED)
            self.open(self._run, call[STEP_AT[call[0]]])
            process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(call) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            with suppress(BrokenPipeError):
                process.communicate()  # closes what led to it
            raise ServiceError(ENDED)
        if answer.strip():
            raise ServiceError(json.loads(answer))


def main() -> None:
    """Answer calls until there are no more, or the training is gone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the service prints is no answer
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    ending = threading.Event()

    def end_soon(*_: Any) -> None:
        ending.set()
        _exit_after(GRACE_SECONDS)

    signal.signal(signal.SIGTERM, end_soon)
    service: Any = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        fault = ""
        try:
            if name == "build":
                service = build(arguments[0], "monitor")
            else:
                getattr(service, name)(*arguments)
        except (Exception, SystemExit) as error:  # of foreign code
            fault = json.dumps(f"{type(error).__name__}: {error}")
        answers.write(f"{fault}\n")
        answers.flush()
        if ending.is_set():
            break


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    _exit_after(GRACE_SECONDS)


def _exit_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    main()
