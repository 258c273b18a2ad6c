"""A tracker of the user's own in a real run: what reaches it, what it may leave out, and what an error in it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from things import rows_of

from trainrun.cli.main import main
from trainrun.monitor import metric_rows

pytestmark = [pytest.mark.train, pytest.mark.process]

OWN = """
import json, threading
from pathlib import Path

class Rows:  # two of six methods
    def on_step(self, step, epoch, row):
        row["train/loss"] = 0.0  # of its own copy
        with Path("rows.txt").open("a") as file:
            file.write(f"{step} ")

class Fails:
    def __init__(self, at):
        self.at = at

def failing(name):
    def method(self, *arguments):
        if name == self.at:
            raise ValueError("no connection")
    return method

for name in ("on_start", "on_step", "on_eval", "on_row", "on_note", "on_end", "close"):
    setattr(Fails, name, failing(name))

class All:
    def on_start(self, facts, step):
        self.rows = []
        self.begin = {"id": facts.run_id, "lr": facts.config["optimizer"]["lr"], "token": facts.config["user"]["token"]}

    def on_row(self, row):
        self.rows.append(row | {"thread": threading.current_thread() is threading.main_thread()})

    def close(self):
        Path("all.json").write_text(json.dumps([self.begin, self.rows]))

class Useless:
    def on_epoch(self): ...

class Exits:
    def on_step(self, step, epoch, row):
        raise SystemExit
"""
SHORT = [
    "trainer.max_steps=4", "monitor.log_every_n_steps=1", "monitor.progress_bar=false", "monitor.plots=false",
    "monitor.hardware=false", "checkpoint.enabled=false", "trainer.num_threads=1", "output_dir=run",
]  # fmt: skip


def test_methods_are_optional_and_rows_are_its_own(own: Path) -> None:
    assert main([*SHORT, "monitor.mine._target_=own.Rows"]) == 0
    assert (own / "rows.txt").read_text() == "1 2 3 4 "
    assert all(row["train/loss"] for row in rows_of(own / "run", "train"))
    assert "listener_faults" not in json.loads((own / "run" / "status.json").read_text())


def test_every_row_of_the_file_reaches_it_with_the_config_and_the_id(own: Path) -> None:
    words = [*SHORT[:4], *SHORT[5:], "user.token=hidden", "monitor.mine._target_=own.All"]
    assert main(words) == 0
    begin, rows = json.loads((own / "all.json").read_text())
    assert begin["id"] == json.loads((own / "run" / "RUN.json").read_text())["run_id"]
    assert begin["lr"] == 0.001
    assert begin["token"] != "hidden"
    assert all(row.pop("thread") for row in rows)
    written = [json.loads(line) for line in (own / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"start", "train", "eval", "hardware", "ledger", "end"}

    def in_order(some: list[dict[str, object]]) -> list[str]:
        return sorted(json.dumps(row, sort_keys=True) for row in some)

    assert in_order(rows) == in_order(written)


@pytest.mark.parametrize("at", ["on_start", "on_step", "on_eval", "on_row", "on_note", "on_end", "close"])
def test_a_fault_is_told_once_and_the_run_goes_on(
    own: Path, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["monitor.mine._target_=own.Fails", f"monitor.mine.at={at}"]
    assert main([*SHORT, *words]) == 0
    printed = capsys.readouterr().out
    told = f"monitor.mine: {at} of Fails failed: ValueError: no connection ({own / 'own.py'} line"
    assert printed.count(told) == (at != "on_note")  # nothing was noted in this run
    if at == "on_note":
        return
    assert len(rows_of(own / "run", "train")) == 4
    if at == "on_step":
        assert json.loads((own / "run" / "status.json").read_text())["listener_faults"] == {"monitor.mine": 4}
        assert "monitor.mine: 4 calls" in printed


def test_two_that_fail_at_each_others_lines_are_told_once_each(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"monitor.{name}._target_=own.Fails" for name in "ab"]
    assert main([*SHORT, *words, "monitor.a.at=on_step", "monitor.b.at=on_note"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("monitor.a: on_step") == 1 == printed.count("monitor.b: on_note")


def test_one_that_exits_is_named_and_the_run_goes_on(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "monitor.mine._target_=own.Exits"]) == 0
    assert "monitor.mine: on_step of Exits failed: SystemExit:" in capsys.readouterr().out
    status = json.loads((own / "run" / "status.json").read_text())
    assert status["state"] == "done"
    assert status["listener_faults"] == {"monitor.mine": 4}


def test_an_object_that_listens_to_nothing_is_refused(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "monitor.mine._target_=own.Useless"]) == 2
    told = "monitor.mine: Useless has none of the methods of a monitor: on_start, on_step, on_eval, on_row"
    assert told in capsys.readouterr().err


def test_arguments_of_a_monitor_without_a_target_are_refused(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "monitor.mine.at=1"]) == 2
    assert "needs a class or function; name it, as monitor.mine._target_=" in capsys.readouterr().err


def test_our_own_metrics_file_that_cannot_grow_ends_the_run(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(metric_rows, "_append_or_nothing", full)
    assert main(SHORT) == 1
    assert "No space left on device" in capsys.readouterr().err
