"""Sweeps of tiny scripts instead of trainings: each writes the `status.json` that its words ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import json, os, pathlib, signal, sys, time
folder, *words = sys.argv[1:]
folder = pathlib.Path(folder)
ask = dict(word.split("=", 1) for word in words)
def status(state, **fields):
    (folder / "status.tmp").write_text(json.dumps({"state": state, "pid": os.getpid(), **fields}))
    os.replace(folder / "status.tmp", folder / "status.json")  # whoever sees it sees all of it
def save():
    (folder / "checkpoints" / "step-7").mkdir(parents=True, exist_ok=True)
with open(folder.parent / "ran.txt", "a") as ran:
    ran.write(folder.name + "\\n")
do = ask.get("do", "train")
if do == "train":
    value = float(ask["lr"])
    status("done", value=value, monitor=ask.get("monitor", "val/acc"), mode=ask.get("mode", "max"), seconds=1.5)
elif do == "meet":  # done once so many jobs run at the same time
    (folder / "here").write_text(json.dumps({
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "words": words,
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
    }))
    end = time.monotonic() + 600
    while len(list(folder.parent.glob("*/here"))) < int(ask["number"]) and time.monotonic() < end:
        time.sleep(0.01)
    status("done", value=1.0, monitor="val/acc", mode="max", seconds=1.5)
elif do == "curve":  # five validations; a job below 0.5 waits after the first for SIGTERM, once
    rows = open(folder / "metrics.jsonl", "a")
    def row(**fields):
        print(json.dumps(fields), file=rows, flush=True)
    goes_on = (folder / "checkpoints").exists()
    row(kind="start", time=0.0, facts={"monitor": "val/acc", "mode": "max", "total_steps": 50, "num_train": 100})
    for number in range(1, 6):
        row(kind="eval", step=10 * number, epoch=number, time=float(number), **{"val/acc": float(ask["lr"]) + number})
        if float(ask["lr"]) < 0.5 and not goes_on:
            def stop(signal_number, frame):
                save()
                status("stopped", value=float(ask["lr"]) + 1, monitor="val/acc", mode="max")
                sys.exit(75)
            signal.signal(signal.SIGTERM, stop)
            time.sleep(60)
            sys.exit(1)
    status("done", value=float(ask["lr"]) + 5, monitor="val/acc", mode="max", seconds=1.5)
elif do == "fail":
    status("failed", message="the loss is not finite\\nat step 3")
    sys.exit(1)
elif do == "refuse":
    print("note: something", file=sys.stderr)
    print("trainrun: lr=9: must be below 1", file=sys.stderr)
    sys.exit(2)
elif do == "die":
    status("running", value=None)
    os.kill(os.getpid(), signal.SIGKILL)
elif do == "hang":
    def stop(number, frame):
        with open(folder / "signals.txt", "a") as file:
            file.write(signal.Signals(number).name + "\\n")
        if ask.get("obey", "yes") == "yes":
            save()
            status("stopped", value=0.5, monitor="val/acc", mode="max", message="interrupted")
            sys.exit(130 if number == signal.SIGINT else 75)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    (folder / "hangs").touch()
    end = time.monotonic() + 600  # a test that fails leaves nothing behind for long
    while time.monotonic() < end:
        time.sleep(0.01)
"""


def fake_command(words: list[str], folder: Path) -> list[str]:
    return [sys.executable, "-S", "-c", SCRIPT, str(folder), *words]


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a test are its own: no other sweep of this user holds one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def command() -> Callable[[list[str], Path], list[str]]:
    return fake_command
