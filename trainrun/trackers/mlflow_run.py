"""MLflow: curves, the config as parameters, and images as artifacts, on a tracking server or in a database.

When: you have a server (`tracking_uri=http://server:5000`), or use `sqlite:///mlflow.db` for `mlflow ui`. When not:
    histograms are needed, which MLflow does not have. Source: https://mlflow.org/docs
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

from trainrun.trackers.packages import require_package

RUN_ID = "trainrun.run_id"
LONGEST = 500  # characters of a parameter
AT_ONCE = 100  # parameters of one call


class MlflowRun:
    """A tracking service: `monitor.tracker=mlflow`. tracking_uri: null for MLFLOW_TRACKING_URI, or MLflow's own
    default.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "trainrun") -> None:
        require_package("mlflow", "mlflow")
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._id = ""

    def open(self, run: Mapping[str, Any], step: int) -> None:
        """Continue the MLflow run with this id, or start a new one."""
        os.environ.setdefault(
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"
        )  # of its own: minutes; the sender tries a row again
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = client = MlflowClient(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        runs = client.search_runs([experiment_id], f"tags.`{RUN_ID}` = '{run['run_id']}'")
        if runs:
            self._id = runs[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return  # parameters cannot be written twice with other values
        tags = {RUN_ID: run["run_id"], "trainrun.folder": run["folder"]}
        self._id = client.create_run(experiment_id, tags=tags, run_name=run["name"]).info.run_id
        settings = {valid_name(name): value for name, value in iterate_parameters(run["config"]) if name}
        params = [Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        for start in range(0, len(params), AT_ONCE):
            client.log_batch(self._id, params=params[start : start + AT_ONCE])

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        from mlflow.entities import Metric

        at = int(1000 * seconds)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        metrics = [Metric(valid_name(name), value, at, step) for name, value in finite.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def text(self, name: str, text: str, step: int) -> None:
        mark = crc32(text.encode())  # several texts of a step are several files, and one sent again is one
        self._client.log_text(self._id, text, f"{name}/step-{step}-{mark:08x}.txt")

    def histogram(self, name: str, low: float, high: float, counts: list[int], step: int) -> None: ...

    def picture(self, name: str, path: str, step: int) -> None:
        self._client.log_artifact(self._id, path, "plots")

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def valid_name(name: str) -> str:
    """Return a name that MLflow accepts (`hit_1` for `hit@1`). It refuses a whole row for one invalid name."""
    return re.sub(r"[^\w./: -]", "_", name)


def iterate_parameters(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its dotted name, as `a.b`, 1 for `{"a": {"b": 1}}`."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from iterate_parameters(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
