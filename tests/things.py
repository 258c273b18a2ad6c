"""What tests of several rooms have in common, once. Short runs: quiet_runs.py. Messages: approved.py."""

from __future__ import annotations

import importlib
import json
import tarfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from trainrun.config.compose import compose_run
from trainrun.data.readers.records.record import encode_sample
from trainrun.errors import ConfigError


class LateModule:
    """A module that is imported at the first use of a name in it.

    For packages that take a second to import and serve few tests: every process collects all tests, and each fork of
    one that holds them takes longer.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def rows_of(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rows of one kind in the metrics of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def status_of(folder: Path) -> dict[str, Any]:
    """Return the status of the run in `run` below a folder."""
    status: dict[str, Any] = json.loads((folder / "run" / "status.json").read_text())
    return status


def faults_of(*words: str) -> Any:
    """Return the faults for which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        compose_run(list(words))
    return caught.value.faults


def with_setting(words: Iterable[str], new: str) -> list[str]:
    """Return the words with another value for one key."""
    key = new.partition("=")[0]
    return [*(word for word in words if word.partition("=")[0] != key), new]


def is_alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tar_of_arrays(numbers: Iterable[int]) -> bytes:
    """Return a tar shard whose samples are 1,500 times their number, and whether it is odd."""
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for number in numbers:
            sample = encode_sample((np.full(1500, number, np.float32), number % 2))
            member = tarfile.TarInfo(f"{number:04d}.safetensors")
            member.size = len(sample)
            archive.addfile(member, BytesIO(sample))
    return content.getvalue()


def write_tar(path: Path, numbers: Iterable[int]) -> None:
    """Write a tar shard whose samples are `{"a": number}`."""
    with tarfile.open(path, "w") as archive:
        for number in numbers:
            content = json.dumps({"a": number}).encode()
            member = tarfile.TarInfo(f"{number:04d}.json")
            member.size = len(content)
            archive.addfile(member, BytesIO(content))


def supports_lstm(dtype: Any) -> bool:
    """Return whether torch trains an LSTM under the autocast to `dtype` on this CPU."""
    torch = importlib.import_module("torch")
    lstm = torch.nn.LSTM(1, 1)
    try:
        with torch.autocast("cpu", dtype):
            lstm(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True
