"""Who listens to a run on rank 0: the screen, the log, the metrics file, the hardware, the user's own."""

from __future__ import annotations

from typing import Any

from trainrun.config import RunConfig
from trainrun.instantiate import build
from trainrun.interfaces import Monitor
from trainrun.monitor.console import Console
from trainrun.monitor.hardware import Hardware
from trainrun.monitor.metrics_file import MetricsFile, cut_rows_after
from trainrun.parts import Parts, TrainState
from trainrun.rundir import RunDir


class Listeners:
    """The monitors of rank 0, opened together and closed together."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self._run, self._config = run, config
        wanted = config.monitor
        self.console: Console | None = None
        self.monitors: list[Monitor] = []
        self._file: MetricsFile | None = None
        self._hardware: Hardware | None = None
        if wanted.verbose or wanted.progress_bar:
            self.console = Console(None, wanted.verbose, wanted.progress_bar)
            self.monitors.append(self.console)
        if wanted.metrics_file:
            self._file = MetricsFile(run.metrics)
            self.monitors.append(self._file)
        for name, node in wanted.listeners.items():
            self.monitors.append(build(node, f"monitor.listeners.{name}"))

    def attach(self, parts: Parts, state: TrainState) -> None:
        """Rows behind the step that a resume starts from are redone, so they are cut."""
        cut_rows_after(self._run.metrics, state.step)
        if self._config.monitor.hardware and self._file is not None:
            self._hardware = Hardware(self.write, lambda: parts.board.step)

    def write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(row)

    def draw_now(self, step: int) -> None:
        """Pictures while the run goes on, every `monitor.plot_every_n_steps`."""
        every = self._config.monitor.plot_every_n_steps
        if every and step % every == 0 and self._file is not None:
            self._file.flush()
            self._draw()

    def end(self, parts: Parts, summary: dict[str, Any]) -> None:
        if self._hardware is not None:
            self._hardware.close()
            self._hardware = None
        if self._file is not None:
            self._file.on_end(summary)
        if self._config.monitor.plots and self._file is not None:
            self._draw()
        for monitor in self.monitors:
            if monitor is not self._file:
                monitor.on_end(summary)

    def _draw(self) -> None:
        from trainrun.plots.curves import draw_run  # matplotlib costs half a second: not before the end

        draw_run(self._run)

    def close(self) -> None:
        if self._hardware is not None:
            self._hardware.close()
        for monitor in self.monitors:
            monitor.close()
