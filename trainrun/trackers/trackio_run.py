"""Trackio: curves on this machine (`trackio show`) or on a Space of Hugging Face. It has W&B's interface and needs
no account.

Runs are in the folder TRACKIO_DIR. When not: notes of a run are needed, which Trackio does not have. Source:
https://github.com/gradio-app/trackio
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainrun.trackers.packages import require_package


class TrackioRun:
    """A tracking service: `monitor.tracker=trackio`. space_id: a Hugging Face Space; null for this machine."""

    def __init__(self, project: str = "trainrun", space_id: str | None = None) -> None:
        require_package("trackio", "trackio")
        self._project, self._space_id = project, space_id
        self._run: Any = None

    def open(self, run: Mapping[str, Any], step: int) -> None:
        import trackio

        self._run = trackio.init(
            self._project, name=f"{run['name']}-{run['run_id'][:8]}", space_id=self._space_id, resume="allow",
            config=dict(run["config"]), embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        self._run.log(dict(values), step=step)

    def text(self, name: str, text: str, step: int) -> None: ...

    def histogram(self, name: str, low: float, high: float, counts: list[int], step: int) -> None:
        import numpy as np
        import trackio

        edges = np.linspace(low, high, len(counts) + 1)
        self._run.log({name: trackio.Histogram(np_histogram=(np.asarray(counts), edges))}, step=step)

    def picture(self, name: str, path: str, step: int) -> None:
        import trackio

        self._run.log({name: trackio.Image(path)}, step=step)

    def finish(self) -> None:
        self._run.finish()
