"""A service that raises, hangs or recovers: the run is the same, lost rows are reported, and can be sent again."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from approved import approve

from trainrun.cli.main import main
from trainrun.folder.lock import lock_run_folder
from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import RunFacts
from trainrun.trackers import sender
from trainrun.trackers.sender import Sender

pytestmark = pytest.mark.process

OWN = """
import json, threading, time
from pathlib import Path

class Mine:
    def __init__(self, fails="", hangs=""):
        self.fails, self.hangs = fails, hangs

def method(name):
    def call(self, *arguments):
        if name == self.fails and not Path("up").exists():
            raise ConnectionError("no route")
        if name == self.hangs:
            time.sleep(1e6)
        with Path("sent.jsonl").open("a") as file:
            file.write(json.dumps([name, *arguments], default=str) + chr(10))
    return call

for name in ("open", "scalars", "text", "histogram", "picture", "finish"):
    setattr(Mine, name, method(name))
"""
SHORT = [
    "trainer.max_steps=4", "monitor.log_every_n_steps=1", "monitor.progress_bar=false", "monitor.plots=false",
    "checkpoint.enabled=false", "trainer.num_threads=1", "output_dir=run", "monitor.mine._target_=own.Mine",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "CLOSE_SECONDS", 1.0)
    monkeypatch.setattr(sender, "MAX_PAUSE_SECONDS", 0.01)


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if row["kind"] == "train"]


def sent(name: str) -> list[Any]:
    return [
        call for line in Path("sent.jsonl").read_text().splitlines() if (call := json.loads(line))[0] == name
    ]


def test_a_service_gets_the_run_and_its_numbers(own: Path) -> None:
    sender.CLOSE_SECONDS = 60.0
    assert main([*SHORT, "user.note=kept"]) == 0
    (opened,) = sent("open")
    assert opened[1]["run_id"] == json.loads(Path("run/RUN.json").read_text())["run_id"]
    assert opened[1]["config"]["user"] == {"note": "kept"}
    told = {call[2]: call[1]["train/loss"] for call in sent("scalars") if "train/loss" in call[1]}
    assert list(told.values()) == losses(own / "run")
    assert len(sent("finish")) == 1


@pytest.mark.parametrize(
    "fault", ["fails=open", "fails=scalars", "fails=finish", "hangs=open", "hangs=scalars", "hangs=finish"]
)
def test_a_fault_of_a_service_does_not_change_the_run(
    own: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT[:-2], "output_dir=plain"]) == 0
    assert main([*SHORT, f"monitor.mine.{fault}"]) == 0
    assert losses(own / "run") == losses(own / "plain")
    said = capsys.readouterr().out
    assert re.findall(r"trainrun report \S+ --to (\w+)", said) == ["mine"]
    assert (
        not [thread for thread in threading.enumerate() if thread.name == "trainrun-mine"] or "hangs" in fault
    )

    (own / "up").touch()
    if "hangs" in fault:
        return
    for _ in range(2):  # every call sends all rows
        assert main(["report", "run", "--to", "mine"]) == 0
        sent_losses = [call[1]["train/loss"] for call in sent("scalars") if "train/loss" in call[1]]
        assert sent_losses[-4:] == losses(own / "run")


class Breaks:
    """Fails so many times, then works."""

    def __init__(self, times: int) -> None:
        self.times, self.steps = times, []

    def open(self, run: Any, step: int) -> None: ...

    def scalars(self, values: Any, step: int, seconds: float) -> None:
        if self.times:
            self.times -= 1
            raise TimeoutError("later")
        self.steps.append(step)

    def text(self, *_: Any) -> None: ...

    histogram = picture = text

    def finish(self) -> None: ...


def facts(folder: Path) -> RunFacts:
    return RunFacts("a", str(folder), "cpu", 1, 1, 1, 1, 1, 1, 1, 1, "", 1, 1)


@pytest.mark.parametrize(("times", "steps"), [(2, [1, 2, 3]), (3, [2, 3])])
def test_a_row_is_tried_again_and_one_that_is_refused_stops_no_other(
    tmp_path: Path, times: int, steps: list[int]
) -> None:
    sender.CLOSE_SECONDS = 60.0
    service = Breaks(times)
    tracker = Sender(service, "monitor.it", RunDir(tmp_path))
    tracker.on_start(facts(tmp_path), 0)
    for step in (1, 2, 3):
        with suppress(TimeoutError):  # told with a row
            tracker.on_row({"kind": "train", "step": step, "time": 10.0 * step, "lr": 0.1})
    while tracker._waiting:
        time.sleep(0.001)
    approve(tracker.close())
    assert service.steps == steps


def test_a_full_queue_loses_rows_and_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_WAITING_ROWS", 5)
    monkeypatch.setattr(sender, "CLOSE_SECONDS", 0.01)
    gate, service = threading.Event(), Breaks(0)
    service.open = lambda run, step: gate.wait()  # type: ignore[method-assign,assignment,misc]
    tracker = Sender(service, "monitor.it", RunDir(tmp_path))
    tracker.on_start(facts(tmp_path), 0)
    tracker.on_row({"kind": "confusion", "step": 0, "matrix": [[1]]})  # has no time, and no service takes it
    for step in range(8):
        tracker.on_row({"kind": "train", "step": step, "time": 1.0, "lr": 0.1})
    assert "monitor.it: 8 rows not sent (no answer within 0.01 s)" in tracker.close()
    gate.set()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "monitor.tracker=wanb",
            "monitor.tracker=wanb: must be csv, mlflow, tensorboard, trackio, wandb, or a list",
        ),
        ("monitor.tracker=[csv,x]", "monitor.tracker=[csv,x]: must be"),
        ("monitor.histograms_every_n_steps=0", "must be a whole number, 1 or more"),
    ],
)
def test_wrong_values_are_refused(workdir: Path, refuses: Callable[..., None], word: str, told: str) -> None:
    refuses([word], told)


@pytest.mark.parametrize(
    ("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("trackio", "trackio")]
)
def test_a_missing_package_names_the_extra(
    workdir: Path, refuses: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module, *_: None)
    refuses([*SHORT[:-1], f"monitor.tracker={name}"], f"({package}): pip install 'trainrun[{name}]'")


def test_rows_of_all_sessions_are_sent_to_a_tracker_that_some_did_not_have(workdir: Path) -> None:
    words = [word for word in SHORT if not word.startswith(("checkpoint", "monitor.mine"))]
    assert main(words) == 0
    assert main(["report", "run", "--to", "csv"]) == 0
    assert main(["resume", "run", "trainer.max_steps=6"]) == 0
    assert main(["report", "run", "--to", "csv"]) == 0
    assert main(["resume", "run", "trainer.max_steps=8"]) == 0
    assert main(["resume", "run", "trainer.max_steps=9", "monitor.tracker=csv"]) == 0
    assert main(["report", "run", "--to", "csv"]) == 0
    rows = [line.split(",") for line in Path("run/metrics.csv").read_text().splitlines()]
    assert [int(row[0]) for row in rows if row[2] == "train/loss"] == list(range(1, 10))
    with lock_run_folder(RunDir(workdir / "run")):
        assert main(["report", "run", "--to", "csv"]) == 75
