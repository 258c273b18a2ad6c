"""A service that raises, hangs, or recovers: the run is the same, and what was not sent is known and sent later."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trainrun.cli.main import main
from trainrun.interfaces import RunFacts
from trainrun.runs.lock import only_writer
from trainrun.runs.run_folder import RunDir
from trainrun.trackers import sender
from trainrun.trackers.apart import Apart
from trainrun.trackers.sender import Sender, marks

pytestmark = pytest.mark.process

OWN = """
import json, threading, time
from pathlib import Path

class Mine:
    def __init__(self, fails="", hangs="", apart=False):
        self.fails, self.hangs, self.apart = fails, hangs, apart

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
    monkeypatch.setattr(sender, "LONGEST_PAUSE", 0.01)


@pytest.fixture
def own(workdir: Path) -> Path:
    (workdir / "own.py").write_text(OWN)
    return workdir


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if row["kind"] == "train"]


def sent(name: str) -> list[Any]:
    return [
        call for line in Path("sent.jsonl").read_text().splitlines() if (call := json.loads(line))[0] == name
    ]


@pytest.mark.parametrize("apart", [False, True])
def test_a_service_gets_the_run_and_its_numbers(own: Path, apart: bool) -> None:
    sender.CLOSE_SECONDS = 60.0
    assert main([*SHORT, f"monitor.mine.apart={apart}", "user.note=kept"]) == 0
    (opened,) = sent("open")
    assert opened[1]["run_id"] == json.loads(Path("run/RUN.json").read_text())["run_id"]
    assert opened[1]["config"]["user"] == {"note": "kept"}
    told = {call[2]: call[1]["train/loss"] for call in sent("scalars") if "train/loss" in call[1]}
    assert list(told.values()) == losses(own / "run")
    assert len(sent("finish")) == 1
    assert marks(RunDir(own / "run"))["mine"]["step"] == 4


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "at", ["fails=open", "fails=scalars", "fails=finish", "hangs=open", "hangs=scalars", "hangs=finish"]
)
def test_what_it_does_is_nothing_to_the_run(
    own: Path, at: str, apart: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if apart and at != "hangs=scalars":
        pytest.skip("one is enough")
    assert main([*SHORT[:-2], "output_dir=plain"]) == 0
    assert main([*SHORT, f"monitor.mine.{at}", f"monitor.mine.apart={apart}"]) == 0
    assert losses(own / "run") == losses(own / "plain")
    printed = capsys.readouterr().out
    assert printed.count("to send: trainrun report") == 1
    assert marks(RunDir(own / "run"))["mine"] > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "trainrun-mine"] or "hangs" in at

    (own / "up").touch()
    if "hangs" in at:
        return
    assert main(["report", "run", "--to", "mine"]) == 0
    assert "mine: has every row already" not in capsys.readouterr().out
    assert [call[1]["train/loss"] for call in sent("scalars") if "train/loss" in call[1]][-4:] == losses(
        own / "run"
    )
    assert main(["report", "run", "--to", "mine"]) == 0
    assert "mine: has every row already; " in capsys.readouterr().out


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


@pytest.mark.parametrize(("times", "steps", "lost"), [(2, [1, 2, 3], ""), (3, [2, 3], "1 row not sent")])
def test_a_row_is_tried_again_and_one_that_is_refused_stops_no_other(
    tmp_path: Path, times: int, steps: list[int], lost: str
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
    assert lost in tracker.close()
    assert service.steps == steps
    assert (marks(RunDir(tmp_path))["it"] == 10.0) == bool(lost)


def test_a_full_queue_loses_rows_and_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MOST_WAITING", 5)
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


def test_a_process_that_dies_is_an_error_with_a_name(own: Path) -> None:
    (own / "dies.py").write_text("import os\nclass Dies:\n def open(self, run, step): os._exit(3)\n")
    with pytest.raises(RuntimeError, match="its process has ended"):
        Apart({"_target_": "dies.Dies"}).open({"config": {}}, 0)


def test_a_process_that_dies_is_started_again(own: Path) -> None:
    (own / "once.py").write_text(
        "import os\nfrom pathlib import Path\nimport own\nclass Once(own.Mine):\n"
        " def scalars(self, values, step, seconds):\n  if step == 2 and not Path('died').exists():\n"
        "   Path('died').touch()\n   os._exit(9)\n  super().scalars(values, step, seconds)\n"
    )
    apart = Apart({"_target_": "once.Once"})
    apart.open({"config": {}}, 0)
    apart.scalars({"a": 1.0}, 1, 0.0)
    with pytest.raises(RuntimeError, match="its process has ended"):
        apart.scalars({"a": 1.0}, 2, 0.0)
    apart.scalars({"a": 1.0}, 2, 0.0)
    with pytest.raises(RuntimeError, match="its process has ended"):  # what it held may be lost
        apart.finish()
    assert [call[2] for call in sent("open")] == [0, 2]
    assert [call[2] for call in sent("scalars")] == [1, 2]
    assert len(sent("finish")) == 1


def test_a_process_that_shall_end_does_what_it_is_at(own: Path) -> None:
    (own / "slow.py").write_text(
        "import time\nfrom pathlib import Path\nclass Slow:\n def open(self, run, step):\n"
        "  Path('began').touch()\n  time.sleep(0.3)\n  Path('ended').touch()\n"
    )
    apart = Apart({"_target_": "slow.Slow"})
    waits = threading.Thread(target=apart.open, args=({"config": {}}, 0))
    waits.start()
    while not Path("began").exists():
        time.sleep(0.01)
    apart.kill()
    waits.join()
    assert Path("ended").exists()
    assert apart._process is not None
    assert apart._process.wait() == 0
    apart._process.communicate()


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


class Down:
    """A service that cannot be reached until `up`."""

    up = False

    def open(self, run: Any, step: int) -> None:
        if not self.up:
            raise OSError("down")

    def scalars(self, *_: Any) -> None: ...

    text = histogram = picture = finish = scalars


def test_rows_of_an_earlier_session_stay_to_be_sent(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    run, service, told = RunDir(tmp_path / "a b"), Down(), []
    for session in range(2):
        listener = Sender(service, "monitor.mine", run)
        listener.on_start(facts(tmp_path), 2 * session)
        for step in (1, 2):
            with suppress(OSError):
                row = {"kind": "train", "step": step, "epoch": 0.0, "time": time.time(), "train/loss": 1.0}
                listener.on_row(row)
        told.append(listener.close())
        service.up = True
    assert "2 rows not sent" in told[0]
    assert told[0].endswith(f"trainrun report '{tmp_path}/a b' --to mine")
    assert "of an earlier session" in told[1]
    assert not isinstance(marks(run)["mine"], dict)


def test_rows_of_a_session_without_the_tracker_are_sent_too(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in SHORT if not word.startswith(("checkpoint", "monitor.mine"))]
    assert main(words) == 0
    assert main(["report", "run", "--to", "csv"]) == 0
    assert main(["resume", "run", "trainer.max_steps=6"]) == 0
    capsys.readouterr()
    assert main(["report", "run", "--to", "csv"]) == 0
    assert main(["resume", "run", "trainer.max_steps=8"]) == 0
    assert main(["resume", "run", "trainer.max_steps=9", "monitor.tracker=csv"]) == 0
    assert "monitor.csv: it is not known whether every row has arrived" in capsys.readouterr().out
    assert main(["report", "run", "--to", "csv"]) == 0
    rows = [line.split(",") for line in Path("run/metrics.csv").read_text().splitlines()]
    assert [int(row[0]) for row in rows if row[2] == "train/loss"] == list(range(1, 10))
    with only_writer(RunDir(workdir / "run")):
        assert main(["report", "run", "--to", "csv"]) == 75
