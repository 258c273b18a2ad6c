"""Rows survive the way to the disk and back, and what a crash does to them."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
from approved import refused

from trainrun.errors import DataError
from trainrun.interfaces import RunFacts
from trainrun.monitor.bus import Bus
from trainrun.monitor.metric_rows import (
    MetricsFile,
    delete_rows_after,
    read_metric_rows,
    remove_incomplete_line,
)

FACTS = RunFacts("nan", "runs/x", "cpu", 1, 32, 1, 100, 20, 4, 8, 2, "MLP", 10, 10, ("a=1: why",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_of_every_kind_come_back(path: Path) -> None:
    file = Bus(MetricsFile(path))
    file.on_start(FACTS, 0)
    file.on_step(2, 0.5, {"train/loss": 1.5})
    file.on_note("saved a <checkpoint>\nwith ünicode")
    file.on_eval(4, 1.0, {"val/loss": 0.5})
    file.on_eval(4, 1.0, {"test/loss": 0.25})
    file.on_end({"reason": "done", "value": 0.5, "step": 5})
    file.close()
    rows = read_metric_rows(path)
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("start", 0), ("train", 2), ("note", 2), ("eval", 4), ("test", 4), ("end", 5),
    ]  # fmt: skip
    assert rows[0]["facts"]["choices"] == ["a=1: why"]
    assert rows[1]["epoch"] == 0.5
    assert rows[1]["train/loss"] == 1.5
    assert rows[2]["text"] == "saved a <checkpoint>\nwith ünicode"
    assert rows[5]["summary"] == {"reason": "done", "value": 0.5, "step": 5}


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(path: Path) -> None:
    file = Bus(MetricsFile(path))
    file.on_start(FACTS, 0)
    file.on_step(1, 0.1, {"train/loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    file.write({"kind": "confusion", "step": 1, "class_names": ["nan", "inf"], "matrix": [[1, 0], [0, 1]]})
    file.on_note("nan")
    file.on_end({"value": math.nan, "metrics": {"val/loss": math.inf}})
    file.close()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    start, train, confusion, note, end = read_metric_rows(path)
    assert math.isnan(train["train/loss"])
    assert train["grad_norm"] == math.inf
    assert train["lr"] == -math.inf
    assert math.isnan(end["summary"]["value"])
    assert end["summary"]["metrics"] == {"val/loss": math.inf}
    assert start["facts"]["name"] == "nan"  # texts stay texts
    assert confusion["class_names"] == ["nan", "inf"]
    assert note["text"] == "nan"


def test_rows_are_held_back_until_an_evaluation(path: Path) -> None:
    file = Bus(MetricsFile(path, flush_seconds=1e9))
    file.on_step(1, 0.1, {"train/loss": 1.0})
    assert not path.exists()
    file.on_eval(1, 0.1, {"val/loss": 1.0})
    assert len(read_metric_rows(path)) == 2
    file.on_step(2, 0.2, {"train/loss": 1.0})
    assert len(read_metric_rows(path)) == 2
    file.close()
    assert len(read_metric_rows(path)) == 3


def test_a_cut_last_line_is_left_out(path: Path) -> None:
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "train", "st')
    assert [row["step"] for row in read_metric_rows(path)] == [1]


@pytest.mark.parametrize("damage", [b'{"kind": "tr', b"\xff\xfe", b"[1]", b'{"a": NaN}', b""])
def test_a_damaged_middle_line_is_named(path: Path, damage: bytes) -> None:
    path.write_bytes(b'{"kind": "train", "step": 1}\n' + damage + b'\n{"kind": "train", "step": 2}\n')
    with refused(DataError, "metrics.jsonl"):
        read_metric_rows(path)


def test_a_damaged_last_line_that_was_written_whole_is_no_cut(path: Path) -> None:
    path.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": \n')
    with refused(DataError):
        read_metric_rows(path)


def test_rows_behind_the_step_of_a_resume_are_cut(path: Path) -> None:
    file = Bus(MetricsFile(path))
    file.on_start(FACTS, 0)
    for step in (2, 4, 6):
        file.on_step(step, step / 4, {"train/loss": math.nan})
        file.on_eval(step, step / 4, {"val/loss": 1.0})
    file.on_end({"step": 4})
    file.close()
    before = path.read_bytes().splitlines()
    with path.open("ab") as cut:
        cut.write(b'{"kind": "train", "st')
    delete_rows_after(path, 4)
    assert path.read_bytes().splitlines() == before[:5]  # the kept lines are untouched
    assert path.read_bytes().endswith(b"\n")
    file.on_step(5, 1.25, {"train/loss": 2.0})  # a file that was open before goes on behind the cut
    file.close()
    assert [row["step"] for row in read_metric_rows(path)] == [0, 2, 2, 4, 4, 5]


def test_notes_of_what_is_done_again_stay_at_the_step_it_goes_on_from(path: Path) -> None:
    file = Bus(MetricsFile(path))
    for step in (2, 4, 6):
        file.on_step(step, step / 4, {"train/loss": 1.0})
        file.on_note(f"step {step}: so it is")
    file.close()
    delete_rows_after(path, 4)
    assert [(row["step"], row.get("text", "")) for row in read_metric_rows(path)] == [
        (2, ""), (2, "step 2: so it is"), (4, ""), (4, "step 4: so it is"), (4, "step 6: so it is")
    ]  # fmt: skip


def test_what_an_ended_session_wrote_at_its_end_is_cut(path: Path) -> None:
    file = Bus(MetricsFile(path))
    file.on_eval(4, 1.0, {"val/loss": 1.0})
    file.write({"kind": "confusion", "step": 4, "split": "val", "class_names": [], "matrix": []})
    file.on_end({"step": 4})
    delete_rows_after(path, 4)
    assert [row["kind"] for row in read_metric_rows(path)] == ["eval"]


def test_a_validation_that_a_resume_does_again_is_cut(path: Path) -> None:
    file = Bus(MetricsFile(path))
    for step in (2, 4):
        file.on_step(step, step / 4, {"train/loss": 1.0})
        file.on_eval(step, step / 4, {"val/loss": 1.0})
    delete_rows_after(path, 4, validated=False)
    assert [(row["kind"], row["step"]) for row in read_metric_rows(path)] == [
        ("train", 2),
        ("eval", 2),
        ("train", 4),
    ]


def test_rows_of_several_threads_stay_whole(path: Path) -> None:
    file = Bus(MetricsFile(path, flush_seconds=0))

    def write(first: int) -> None:
        for step in range(first, first + 50):
            file.write({"kind": "hardware", "step": step})

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = {row["step"] for row in read_metric_rows(path)}
    assert steps == {*range(50), *range(100, 150), *range(200, 250)}


def test_a_full_disk_leaves_no_half_line() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    file = Bus(MetricsFile(full))
    file.on_step(1, 0.1, {"train/loss": 1.0})
    with pytest.raises(OSError):
        file.close()


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_a_line_that_was_cut_off_is_taken_away_before_more_is_written(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainrun.monitor.metric_rows.BLOCK_BYTES", block)
    path = tmp_path / "metrics.jsonl"
    remove_incomplete_line(path)
    for whole in ("", '{"a": 1}\n', '{"a": 1}\n{"b": 22}\n'):
        for cut in ("", "{", '{"a": 100000'):
            path.write_text(whole + cut)
            remove_incomplete_line(path)
            assert path.read_text() == whole
