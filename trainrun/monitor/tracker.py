"""Trackers (`monitor.NAME`): user code or built-in code that receives what a run reports and changes nothing.

The first error of a tracker is printed, all errors are counted, and training continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainrun.errors import ANY_FAULT, PluginError
from trainrun.interfaces import RunFacts
from trainrun.user_code import format_user_line

METHODS = ("on_start", "on_step", "on_eval", "on_row", "on_note", "on_end", "close")


class Tracker:
    """A monitor that calls the methods of `target`, which may have only some of the methods of `Monitor`.

    key: the setting, `monitor.NAME`. faults: the number of failed calls. tell: prints one line; called at the first
        error. Raises PluginError if `target` has none of the methods.
    """

    def __init__(self, target: Any, key: str, tell: Callable[[str], None], name: str = "") -> None:
        self.key, self.faults = key, 0
        self._name, self._tell = name or type(target).__name__, tell
        methods = {name: getattr(target, name, None) for name in METHODS}
        self._calls = {name: method for name, method in methods.items() if callable(method)}
        if not self._calls:
            raise PluginError(
                f"{key}: {self._name} has none of the methods of a monitor: {', '.join(METHODS)}; "
                "see trainrun.interfaces.Monitor"
            )

    def _call(self, name: str, *arguments: Any) -> Any:
        method = self._calls.get(name)
        if method is None:
            return None
        try:
            return method(*arguments)
        except ANY_FAULT as error:  # of the user's code, which only listens
            self.faults += 1
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if self.faults == 1:
                where = f"{self.key}: {name} of {self._name}"
                self._tell(f"{where} failed: {reason}{format_user_line(error)}; the run goes on")
        return None

    def on_start(self, facts: RunFacts, step: int) -> None:
        self._call("on_start", facts, step)

    def on_step(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._call("on_step", step, epoch, dict(row))  # a copy: what it changes is not what others get

    def on_eval(self, step: int, epoch: float, row: Mapping[str, float]) -> None:
        self._call("on_eval", step, epoch, dict(row))

    def on_row(self, row: Mapping[str, Any]) -> None:
        self._call("on_row", dict(row))

    def on_note(self, text: str) -> None:
        self._call("on_note", text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._call("on_end", dict(summary))

    def close(self) -> None:
        """Close the tracker, and print the text that it returns."""
        if (message := self._call("close")) and isinstance(message, str):
            self._tell(message)
