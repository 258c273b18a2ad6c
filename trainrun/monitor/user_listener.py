"""A listener of the user's own: each method is optional, and a fault in one does not end the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainrun.errors import PluginError
from trainrun.interfaces import Monitor, RunFacts
from trainrun.process.usercode import line_of

METHODS = ("on_start", "on_step", "on_eval", "on_note", "on_end", "close")


class UserListener:
    """Fills `Monitor` by calling those methods that `listener` has.

    key: as typed, `monitor.listeners.NAME`. stops: whether a fault ends the run (`monitor.on_error=raise`); a fault
    of `close` never does, since the run has ended by then. faults: how many calls failed.
    tell: shows one line; called at the first fault.
    Raises PluginError for an object without any of the methods.
    """

    def __init__(self, listener: Any, key: str, stops: bool, tell: Callable[[str], None]) -> None:
        self.key, self.faults = key, 0
        self._name, self._stops, self._tell = type(listener).__name__, stops, tell
        found = {name: getattr(listener, name, None) for name in METHODS}
        self._calls = {name: method for name, method in found.items() if callable(method)}
        if not self._calls:
            raise PluginError(
                f"{key}: {self._name} has none of the methods of a listener: {', '.join(METHODS)}; "
                "see trainrun.interfaces.Monitor"
            )

    def _call(self, name: str, *arguments: Any) -> None:
        method = self._calls.get(name)
        if method is None:
            return
        try:
            method(*arguments)
        except Exception as error:  # whatever fails in code of the user's that only listens
            self.faults += 1
            stops = self._stops and name != "close"
            if stops or self.faults == 1:
                self._tell(self._told(name, error, stops))
            if stops:
                raise

    def _told(self, name: str, error: Exception, stops: bool) -> str:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        then = "" if stops else "; the run goes on (monitor.on_error=raise ends it)"
        return f"{self.key}: {name} of {self._name} failed: {what}{line_of(error)}{then}"

    def on_start(self, facts: RunFacts, step: int) -> None:
        self._call("on_start", facts, step)

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._call("on_step", step, epoch, dict(row))  # a copy: what it changes is not what others get

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._call("on_eval", step, epoch, dict(row))

    def on_note(self, text: str) -> None:
        self._call("on_note", text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._call("on_end", dict(summary))

    def close(self) -> None:
        self._call("close")


def all_but(monitors: list[Monitor], key: str) -> Callable[[str], None]:
    """Shows a line to every monitor but the listener with this key."""

    def tell(text: str) -> None:
        for monitor in monitors:
            if not (isinstance(monitor, UserListener) and monitor.key == key):
                monitor.on_note(text)

    return tell
