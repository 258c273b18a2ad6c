"""Send the rows of a run that a tracker did not get, or all of them to one that never had any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainrun.errors import ANY_FAULT, TrainrunError
from trainrun.instantiate import build
from trainrun.runs.run_folder import RunDir
from trainrun.trackers.sender import Service, deliver, mark, marks


def resend(
    run: RunDir,
    name: str,
    node: Mapping[str, Any],
    facts: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
) -> int:
    """Return the number of rows. facts: as for `Service.open`. Raises TrainrunError with what the service said."""
    known = marks(run)
    since = known.get(name, 0.0)
    if since is None:
        return 0
    late = [row for row in rows if row.get("time", 0.0) >= since]
    service = build(dict(node), f"monitor.{name}")
    if not isinstance(service, Service):
        raise TrainrunError(
            f"--to {name}: {node.get('_target_')} is no service; it has no open, scalars, finish"
        )
    try:
        service.open(facts, late[0]["step"] if known.get(name) and late else 0)
        for row in late:
            deliver(service, row)
        for path in sorted(run.plots.glob("[!.]*.png")):
            deliver(service, {"kind": "picture", "step": late[-1]["step"] if late else 0, "path": str(path)})
        service.finish()
    except ANY_FAULT as error:  # of foreign code
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise TrainrunError(f"--to {name}: {what}; the rows stay marked, so try again later") from error
    mark(run, name, float("inf"))
    return len(late)
