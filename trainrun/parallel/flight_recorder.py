"""The exchanges between ranks that torch's flight recorder saw in this process."""

from __future__ import annotations

import json
from typing import Any

import torch


def read_last_exchanges() -> dict[str, list[Any]]:
    """Return by process group the number and the name of the exchange that this rank entered last, the newest one last.

    Return {} if torch does not record: the functions are not public, and record gloo only since torch 2.9.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries += json.loads(dump()).get("entries", []) if dump is not None else []
    exchanges: dict[str, list[Any]] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"])):
        group = str(entry["process_group"][0])
        exchanges.pop(group, None)
        exchanges[group] = [entry["collective_seq_id"], entry["profiling_name"].partition(":")[2]]
    return exchanges
