"""The monitors of rank 0: screen, log, metrics file and trackers, and what they show."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from trainrun.config.schema import RunConfig
from trainrun.folder.run_folder import RunDir, check_folder_exists
from trainrun.instantiate import build_node, import_satellite
from trainrun.interfaces import Monitor
from trainrun.monitor.bus import Bus
from trainrun.monitor.console import Console
from trainrun.monitor.hardware import Hardware
from trainrun.monitor.metric_rows import MetricsFile, delete_rows_after, remove_incomplete_line
from trainrun.monitor.tracker import Tracker
from trainrun.runtime.python_module import module_command
from trainrun.timing.phases import (
    CHECKPOINT,
    COMPILE,
    DATA,
    LOGGING,
    MEASURING,
    PLOTS,
    VALIDATION,
    PhaseTimer,
)
from trainrun.train_state import TrainState
from trainrun.training.components import Components

if TYPE_CHECKING:
    from trainrun.monitor.hardware import Hardware
    from trainrun.monitor.tracker import Tracker

LIVE_AFTER_SECONDS = 30.0  # a shorter run has its page at its end


class RunMonitors:
    """All monitors of rank 0, which are opened and closed together.

    bus: sends every report to all of them. sync_rows: writes the buffered rows and waits until they are on the disk;
        None without a metrics file.
    """

    def __init__(self, run: RunDir, config: RunConfig, phases: PhaseTimer) -> None:
        self._run, self._config, self._phases = run, config, phases
        self._closing = contextlib.ExitStack()
        self._hardware: Hardware | None = None
        self._told = ""
        self._components: Components | None = None
        self._state: TrainState | None = None
        self._page: subprocess.Popen[bytes] | None = None
        self._made = perf_counter()  # the process may be older: a notebook's
        wanted = config.monitor
        trackers = self._build_trackers()  # before any file is opened: they may be refused
        self._console: Console | None = None
        if wanted.verbose or wanted.progress_bar:
            log = self._closing.enter_context(run.log.open("a", encoding="utf-8"))
            self._console = Console(
                None, wanted.verbose, wanted.progress_bar, None, log, wanted.summary, self._best_metric_and_step,
                waited=lambda: phases.read_seconds(DATA), elsewhere=self._seconds_outside_training,
                activity=self._describe_activity,
            )  # fmt: skip
        self._has_file = wanted.metrics_file
        file = None
        if wanted.metrics_file:
            remove_incomplete_line(run.metrics)
            file = MetricsFile(run.metrics, check=partial(check_folder_exists, run))
        self._keeps_rows = bool(file or trackers)
        self.sync_rows: Callable[[], None] | None = None if file is None else file.sync
        screens = [] if self._console is None else [self._console]
        self.bus = Bus(file, screens, trackers, phases if self._keeps_rows else None)

    def _build_trackers(self) -> list[Tracker]:
        wanted = self._config.monitor
        if not wanted.listeners:
            return []
        from trainrun.trackers.sender import wrap_service

        def build_tracker(node: dict[str, Any], key: str) -> Tracker:
            built = build_node(node, key)
            return Tracker(wrap_service(built, key, self._run), key, self._note_once, type(built).__name__)

        nodes = {f"monitor.{name}": node for name, node in wanted.listeners.items()}
        return [build_tracker(node, key) for key, node in nodes.items()]

    @property
    def monitors(self) -> list[Monitor]:
        return [self.bus]

    def attach(self, run: Components, state: TrainState) -> None:
        """Connect the monitors with a run. Metric rows after the step of a resume are deleted, as these steps are
        repeated.
        """
        self._components, self._state = run, state
        if self._has_file and self._run.metrics.exists():
            delete_rows_after(self._run.metrics, state.step, state.validated_step == state.step)
        if self._keeps_rows and self._config.monitor.hardware:
            ranks = run.parallel.world_size > 1  # then their starter is the root of all processes
            root = os.getppid() if ranks else None
            self._hardware = Hardware(self.bus.write, lambda: run.monitors.step, root_pid=root,
                                      seconds=self._phases.read_from_any_thread,
                                      device=run.parallel.device.index or 0)  # fmt: skip

    def _seconds_outside_training(self) -> float:
        return sum(self._phases.read_seconds(account) for account in (VALIDATION, CHECKPOINT, PLOTS))

    def _best_metric_and_step(self) -> tuple[str, int]:
        """Return the metric that chooses the best checkpoint, and the step of its best value so far."""
        if self._components is None or self._state is None:
            return "", -1
        return self._components.triggers.best.metric or "", self._state.best_step

    def _describe_activity(self) -> str:
        """Return what the run does besides training, from its current phase; "" while it trains. Any thread may call
        it.
        """
        account = self._phases.account
        if account != VALIDATION or self._components is None:
            return {CHECKPOINT: "saving", PLOTS: "drawing", COMPILE: "compiling", MEASURING: "measuring"}.get(
                account, ""
            )
        number, total = self._components.monitors.validated
        return f"validating {number:,}" + (f"/{total:,}" if total is not None else "")

    def on_position(self, step: int) -> None:
        """Move the progress bar after a step."""
        if self._console is not None:
            self._console.on_batch(step)

    def on_log(self, step: int) -> None:
        """Start a process that draws the live page if the run has lasted long enough."""
        if not (self._config.monitor.plots and self._has_file):
            return
        if self._page is None and perf_counter() - self._made > LIVE_AFTER_SECONDS:
            command = module_command("trainrun.watch.live_page", str(self._run.root), str(os.getpid()))
            quiet = subprocess.DEVNULL
            self._page = subprocess.Popen(
                command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
            )

    def faults(self) -> dict[str, int]:
        """Return the number of failed calls of each tracker that failed."""
        return self.bus.faults()

    def end_hardware(self) -> dict[str, Any]:
        """Stop the hardware monitor and return the load of the machine for the summary."""
        if self._hardware is None:
            return {}
        self._hardware.close()
        return self._hardware.facts()

    def end(self, summary: dict[str, Any], rows: list[dict[str, Any]], stopped: bool) -> None:
        """Write the last rows, the report and the plots. Then show the summary.

        Another process draws the plots, so that nobody waits. This process draws them if the run was stopped, if
        trackers send them, or if the other process would end with this one.
        """
        self._phases.open(LOGGING)
        self._stop_live_page()
        for row in rows:
            self.bus.write(row)
        self.bus.on_end(summary)
        beside = False
        if self._config.monitor.plots and self._has_file:
            self.bus.write_phases()
            self.bus.flush()
            beside = self._draw_plots(may_wait=stopped or bool(self._config.monitor.listeners))
        ledger = self.bus.ledger or self._phases.read()
        self.bus.show_end(summary | {"ledger": ledger, "pictures_follow": beside})

    def _stop_live_page(self) -> None:
        """Stop the process that draws the live page. The final page is drawn at the end of the run."""
        if self._page is not None:
            self._page.kill()
            self._page.wait()

    def _draw_plots(self, may_wait: bool) -> bool:
        """Write the report and draw the plots. Return whether another process draws them. may_wait: draw in this
        process.
        """
        with self._phases.measure(PLOTS):
            plots = import_satellite("plots.draw", "no pictures are drawn", self._note_once)
            if plots is None:
                return False
            beside = not (may_wait or plots.is_killed_with_parent())
            drawing = plots.start_drawing_process if beside else plots.draw_all_plots
            for problem in (drawing(self._run), plots.write_run_report(self._run)):
                if problem:
                    self._note_once(problem)
        return beside

    def _note_once(self, text: str) -> None:
        if self._told != text:
            self.bus.on_note(text)
        self._told = text

    def close(self) -> None:
        """Close the monitors, also after a failure."""
        with self._closing as closing:
            closing.callback(self._stop_live_page)
            closing.callback(self.bus.close)
            if self._hardware is not None:
                closing.callback(self._hardware.close)
