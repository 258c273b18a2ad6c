"""Send the rows of a run that a tracker did not get, or all of them to one that never had any."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from trainrun.errors import ANY_FAULT, TrainrunError
from trainrun.instantiate import build
from trainrun.runs.run_folder import RunDir
from trainrun.trackers.sender import SENT, Service, deliver, mark, marks


def resend(
    run: RunDir,
    name: str,
    node: Mapping[str, Any],
    facts: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
) -> int:
    """Return the number of rows and pictures. facts: as for `Service.open`. Raises TrainrunError."""
    known: Any = marks(run).get(name) or 0.0
    rows = [row for row in rows if row["kind"] in SENT]
    all_until = isinstance(known, dict)
    until = known["until"] if all_until else math.nextafter(known, -1)
    late = [row for row in rows if row.get("time", 0.0) > until]
    if all_until and not late:
        return 0
    last: Mapping[str, Any] = rows[-1] if rows else {"step": 0, "time": 0.0}
    late += [{**last, "kind": "picture", "path": str(path)} for path in sorted(run.plots.glob("[!.]*.png"))]
    service = build(dict(node), f"monitor.{name}")
    if not isinstance(service, Service):
        raise TrainrunError(
            f"--to {name}: {node.get('_target_')} is no service; it has no open, scalars, finish"
        )
    try:
        service.open(facts, max((row["step"] for row in rows if row.get("time", 0.0) <= until), default=0))
        for row in late:
            deliver(service, row)
        service.finish()
    except ANY_FAULT as error:  # of foreign code
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise TrainrunError(f"--to {name}: {what}; the rows stay marked, so try again later") from error
    mark(run, name, math.inf, last["time"], last["step"])
    return len(late)
