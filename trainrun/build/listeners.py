"""Who listens to a run on rank 0: the screen, the log, the metrics file, the hardware, the user's own."""

from __future__ import annotations

import contextlib
import os
import shlex
from typing import Any

from trainrun.config import RunConfig
from trainrun.device_times import DeviceTimes
from trainrun.instantiate import build
from trainrun.interfaces import Monitor
from trainrun.ledger import LOGGING, PLOTS, Ledger
from trainrun.monitor.console import Console
from trainrun.monitor.hardware import Hardware
from trainrun.monitor.ledger_rows import LedgerRows
from trainrun.monitor.metrics_file import MetricsFile, cut_rows_after, mend_end
from trainrun.monitor.user_listener import UserListener, all_but
from trainrun.parts import Parts
from trainrun.rundir import RunDir, check_there
from trainrun.satellites import satellite
from trainrun.state import TrainState


class Listeners:
    """The monitors of rank 0, opened together and closed together."""

    def __init__(
        self, run: RunDir, config: RunConfig, ledger: Ledger, device_times: DeviceTimes | None = None
    ) -> None:
        self._run, self._config, self._ledger = run, config, ledger
        self._closing = contextlib.ExitStack()
        wanted = config.monitor
        self._consoles: list[Console] = []
        self.monitors: list[Monitor] = []
        self._file: MetricsFile | None = None
        self._hardware: Hardware | None = None
        self._rows: LedgerRows | None = None
        self._told = ""
        keys = {f"monitor.listeners.{name}": node for name, node in wanted.listeners.items()}
        users = [  # before any file is opened: they may be refused
            UserListener(build(node, key), key, wanted.on_error == "raise", all_but(self.monitors, key))
            for key, node in keys.items()
        ]
        if wanted.verbose or wanted.progress_bar:
            screen = Console(None, wanted.verbose, wanted.progress_bar, wanted.window_size)
            log = self._closing.enter_context(run.log.open("a", encoding="utf-8"))
            self._consoles = [screen, Console(False, wanted.verbose, False, wanted.window_size, log)]
            self.monitors += self._consoles
        if wanted.metrics_file:
            mend_end(run.metrics)
            self._file = MetricsFile(run.metrics, check=lambda: check_there(run))
            self._rows = LedgerRows(self._file.write, ledger, device_times)
            self.monitors += [self._file, self._rows]
        self.monitors += users

    def attach(self, parts: Parts, state: TrainState) -> None:
        """Rows behind the step that a resume starts from are redone, so they are cut."""
        if self._file is None:
            return
        cut_rows_after(self._run.metrics, state.step, state.validated_step == state.step)
        if self._config.monitor.hardware:
            ranks = parts.parallel.world_size > 1  # then their starter is the root of all processes
            root = os.getppid() if ranks else None
            self._hardware = Hardware(self._file.write, lambda: parts.board.step, root_pid=root)

    def on_position(self, step: int) -> None:
        """After every step: where the progress bar is."""
        for console in self._consoles:
            console.on_batch(step)

    def on_log(self, step: int) -> None:
        """Pictures while the run goes on, every `monitor.plot_every_n_steps`."""
        every = self._config.monitor.plot_every_n_steps
        if every and step % every == 0 and self._config.monitor.plots and self._file is not None:
            self._file.flush()
            self._draw(report=False)

    def flush(self) -> None:
        """Ahead of a checkpoint: a run that goes on from it has every row before it, also after a power loss."""
        if self._file is not None:
            self._file.sync()

    def faults(self) -> dict[str, int]:
        """How many calls of each listener of the user's failed; those without a fault are left out."""
        users = [monitor for monitor in self.monitors if isinstance(monitor, UserListener)]
        return {user.key: user.faults for user in users if user.faults}

    def end(self, summary: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """The last rows, the pictures and the report, and last the summary on the screen."""
        self._ledger.open(LOGGING)
        if self._hardware is not None:
            self._hardware.close()
        if self._file is not None and self._rows is not None:
            for row in rows:
                self._file.write(row)
            self._rows.write(summary["step"])
            self._file.on_end(summary)
            if self._config.monitor.plots:
                self._draw(report=True)
                self._rows.write(summary["step"])  # what the pictures took is in the next ones
        summary = summary | {"ledger": self._ledger.read()}
        for monitor in self.monitors:
            if monitor not in (self._file, self._rows):
                monitor.on_end(summary)

    def _draw(self, report: bool) -> None:
        with self._ledger.on(PLOTS):  # matplotlib costs half a second: only where it draws
            plots = satellite("plots.draw", "no pictures are drawn", self._note)
            if plots is not None and (problem := plots.draw(self._run, report)):
                again = f"trainrun report {shlex.quote(str(self._run.root))}"
                self._note(f"not all pictures were drawn: {problem}; where that is mended: {again}")

    def _note(self, text: str) -> None:
        if self._told != text:
            for monitor in self.monitors:
                monitor.on_note(text)
        self._told = text

    def close(self) -> None:
        """Always called; after a failure too. The user's first: their faults are still shown and written."""
        with self._closing as closing:
            for (
                monitor
            ) in self.monitors:  # called in the order from the last to the first, whatever one of them raises
                closing.callback(monitor.close)
            if self._hardware is not None:
                closing.callback(self._hardware.close)
