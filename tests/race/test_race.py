"""A race from its first run to its report, with scripts in place of trainings; and a judged training as it is."""

from __future__ import annotations

import csv
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.plots.chart_pages import charts_in
from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import read_json, write_json
from trainrun.race import race_command, racer_process
from trainrun.race.judged_loop import training_limit
from trainrun.race.race_report import build_notes, print_report, race_table, write_report
from trainrun.race.racers import read_racers, validation_reads, variations
from trainrun.race.turns import PILOT, PILOT_SEED, Race, RaceGoal
from trainrun.sweep.job_queue import StopRelay

pytestmark = pytest.mark.process

# Ends with the accuracy of its word `lr`, a hundredth later for each seed. It takes 1 second of training a look.
SCRIPT = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
judge, seed = request["judge"], request["seed"]
lr = float(next(word for word in request["words"] if word.startswith("optimizer.lr=")).partition("=")[2])
with open(folder.parent / "ran.txt", "a") as ran:
    ran.write(f"{lr:g}/{seed} ")
with open(folder / "judged.jsonl", "w") as rows:
    print(json.dumps({"began": 0.0, "every": judge["every"] or 40}), file=rows)
    for look in range(1, 11):
        value = min(lr, look * lr / 5)
        row = {"samples": 40 * look, "step": look, "seconds": look + seed / 100, "value": value, "peak_bytes": 10**8}
        print(json.dumps(row), file=rows)
if os.path.exists(folder.parent / "fails") and lr == 0.6:
    print("trainrun: the loss is not finite", file=sys.stderr, flush=True)
    sys.exit(1)
(folder / "status.json").write_text(json.dumps({"state": "done", "step": 10, "value": 0.5, "monitor": "val/acc"}))
"""


def fake_command(folder: Path) -> list[str]:
    return [sys.executable, "-S", "-c", SCRIPT, str(folder)]


def race_in(folder: Path, texts: list[str], target: float | None = 0.5, seeds: int = 2, **about: Any) -> Race:
    return Race(folder, read_racers(texts, []), RaceGoal("val/acc", "max", target), seeds, **about)


def run(race: Race) -> list[str]:
    """Run what is missing; return all runs so far, in order."""
    race.open()
    race.run_all(StopRelay(), fake_command)
    return (race.folder / "ran.txt").read_text().split()


def test_turns_go_forth_and_back_and_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    race = race_in(tmp_path, ["lr=0.8", "lr=0.6"], seeds=3)
    assert run(race) == ["0.8/0", "0.6/0", "0.6/1", "0.8/1", "0.8/2", "0.6/2"]
    assert race.every == 40
    assert [run.arrived for run in race.list_seed_runs("A")] == [4.0, 4.01, 4.02]
    assert [run.arrived for run in race.list_seed_runs("B")] == [5.0, 5.01, 5.02]
    capsys.readouterr()
    print_report(race, [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("B lr=0.6  3 of 3  ")
    assert "worse" in lines[2]
    write_report(race, [])
    with (tmp_path / "race.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["racer"], row["seed"]) for row in rows] == [
        (name, str(n)) for name in "AB" for n in range(3)
    ]
    (chart,) = charts_in((tmp_path / "race.html").read_text())
    assert [series["name"] for series in chart["series"]][:1] == ["A, seed 0"]
    assert chart["series"][0]["x"]["samples"][:2] == [40, 80]


def test_a_second_call_does_what_is_missing(tmp_path: Path):
    before = run(race_in(tmp_path, ["lr=0.8", "lr=0.6"], seeds=1))
    assert before == ["0.8/0", "0.6/0"]
    race = race_in(tmp_path, ["lr=0.8", "lr=0.6"], target=None, seeds=2)
    assert run(race) == [*before, "0.6/1", "0.8/1"]
    assert race.goal.value == 0.5
    third = race_in(tmp_path, ["lr=0.8", "lr=0.7"], seeds=2)  # another B: A is there
    assert run(third)[4:] == ["0.7/0", "0.7/1"]
    assert run(race_in(tmp_path, ["lr=0.8", "lr=0.7", "lr=0.6"], seeds=2))[6:] == []


@pytest.mark.parametrize(
    ("texts", "target", "about"),
    [
        (["lr=0.9", "lr=0.6"], 0.5, {}),
        (["lr=0.8", "lr=0.6"], 0.4, {}),
        (["lr=0.8", "lr=0.6"], 0.5, {"every": 7}),
    ],
)
def test_another_race_in_the_folder_is_refused(
    tmp_path: Path, texts: list[str], target: float, about: dict[str, Any]
):
    run(race_in(tmp_path, ["lr=0.8", "lr=0.6"], seeds=1))
    with pytest.raises(ConfigError, match="--out|--every"):
        race_in(tmp_path, texts, target, **about).open()


def test_a_racer_that_is_refused_at_its_start_leaves_no_race(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    refusing = [sys.executable, "-S", "-c", "import sys; sys.exit(2)"]
    monkeypatch.setattr("trainrun.race.turns.racer_command", lambda folder: refusing)
    words = ["race", "lr=0.8", "lr=0.6", "--until", "val/acc=0.5"]
    assert main(words) == 2
    assert main([*words, "--out", "here"]) == 2
    assert not list(workdir.glob("races")) + list(workdir.glob("here"))


def test_a_damaged_file_is_refused(tmp_path: Path):
    (tmp_path / "race.json").write_text('{"goal": {"metric"')
    with pytest.raises(ConfigError, match="--out"):
        race_in(tmp_path, ["lr=0.8", "lr=0.6"]).open()


def test_the_target_is_fixed_by_a_run_that_is_not_raced(tmp_path: Path):
    race = race_in(tmp_path, ["lr=0.8", "lr=0.6"], target=None, seeds=1)
    assert run(race)[0] == f"0.8/{PILOT_SEED}"
    assert (tmp_path / PILOT).is_dir()
    assert race.goal.value == pytest.approx(0.792)
    assert race.results().standing("B", "A").late == 1


@pytest.mark.parametrize(("target", "note"), [(0.7, "no run of A arrived"), (0.95, "no run arrived")])
def test_a_note_says_what_a_run_that_did_not_arrive_counts_with(tmp_path: Path, target: float, note: str):
    race = race_in(tmp_path, ["lr=0.6", "lr=0.8"], target=target, seeds=1)
    run(race)
    assert [line for line in build_notes(race, race.results()) if note in line]
    assert not any("inf" in cell for row in race_table(race, race.results())[1] for cell in row)


def test_a_failed_run_counts_and_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "fails").touch()
    race = race_in(tmp_path, ["lr=0.8", "lr=0.6"], seeds=1)
    run(race)
    assert "B, seed 0: failed: the loss is not finite" in capsys.readouterr().out
    standing = race.results().standing("B", "A")
    assert (standing.late, standing.ends, standing.bound) == (1, [], "at most")


def test_a_run_that_the_race_ends_has_no_end(tmp_path: Path):
    late = (
        SCRIPT
        + """
with open(folder / "judged.jsonl", "a") as rows:
    rows.write('{"late": true}')
"""
    )
    race = race_in(tmp_path, ["lr=0.8", "lr=0.4"], seeds=1)
    race.open()
    race.run_all(StopRelay(), lambda folder: [sys.executable, "-S", "-c", late, str(folder)])
    (run_of_b,) = race.list_seed_runs("B")
    assert (run_of_b.arrived, run_of_b.end, len(run_of_b.curve)) == (None, None, 10)
    assert race.results().standing("B", "A").equivalence is None


def test_what_a_run_is_asked_for(tmp_path: Path):
    """From the second run on, those that take three times as long as A are ended."""
    race = race_in(tmp_path, ["lr=0.8", "lr=0.6"], seeds=1)
    run(race)
    first, second = (read_json(tmp_path / f"{name}-seed0" / "request.json")["judge"] for name in "AB")
    assert (first["every"], first["limits"]) == (None, None)
    (run_of_a,) = race.list_seed_runs("A")
    assert second["every"] == 40
    assert second["limits"] == {"with_start": 3 * (run_of_a.start + 4.0), "training": 12.0}


def test_a_run_is_stopped_where_it_is_late_with_its_start_and_without():
    """Of a race of milliseconds the start is most: a first step that takes a moment does not end it."""
    limits = {"with_start": 9.06, "training": 0.06}
    assert training_limit(limits, start=3.0) == pytest.approx(6.06)
    assert training_limit(limits, start=20.0) == 0.06
    assert training_limit(None, start=20.0) == math.inf


def test_each_difference_is_raced_alone_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    racers = read_racers(["lr=0.8", "lr=0.6 trainer.channels_last=true"], [])
    changes = variations(*racers)
    varied = [racer for change in changes for racer in (change.alone, change.left_out) if racer is not None]
    race = Race(tmp_path, [*racers, *varied], RaceGoal("val/acc", "max", 0.5), 1)
    run(race)
    capsys.readouterr()
    write_report(race, changes)
    print_report(race, changes)
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    table = {row[0]: row for row in rows}
    assert "1.00x (one pair)" in " ".join(table["trainer.channels_last=true"])
    assert "0.8" in " ".join(table["optimizer.lr=0.6"])  # 4 s against 5 s
    assert "100 MB" in " ".join(table["optimizer.lr=0.6"])


def test_the_command_prints_json_and_how_to_go_on(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("trainrun.race.turns.racer_command", fake_command)
    words = ["lr=0.8", "lr=0.6", "--until", "val/acc=0.5", "--seeds", "1", "--json"]
    assert main(["race", *words, "--out", "here"]) == 0
    output = json.loads(capsys.readouterr().out)
    output = output["result"]
    assert [racer["arrived"] for racer in output["racers"]] == [1, 1]
    assert output["target"] == 0.5
    stopped = StopRelay()
    stopped.number = signal.SIGINT
    monkeypatch.setattr(race_command, "StopRelay", lambda: stopped)
    assert (
        main(["race", "lr=0.8", "lr=0.6", "--until", "val/acc=0.5", "--seeds", "2", "--out", "here"]) == 130
    )
    assert "not finished; to continue: trainrun race lr=0.8 lr=0.6" in capsys.readouterr().out


# --- a judged training, in this process ---

TRAINED = ["data=digits", "model.hidden=[8]", "trainer.max_steps=30", "monitor.log_every_n_steps=10",
           "trainer.num_threads=1", "data.num_workers=0", "trainer.limit_val_batches=2"]  # fmt: skip


def iterate_points(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in row.items()
            if name.startswith(("train/", "val/")) and "seconds" not in name
        }
        for row in rows
        if row["kind"] in ("train", "eval")
    ]


def judge(folder: Path, words: list[str], **about: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    node = {"metric": "val/acc", "mode": "max", "every": 200, "target": None, **about}
    write_json(folder / "request.json", {"words": words, "seed": 3, "judge": node})
    code = racer_process.main([str(folder)])
    assert code == 0
    return [json.loads(line) for line in (folder / "judged.jsonl").read_text().splitlines()]


def test_a_judged_run_trains_as_ever_and_is_judged_on_all_of_the_validation_data(
    workdir: Path, capsys: pytest.CaptureFixture[str]
):
    """The judge sees the whole set; the run itself validates on two batches, as its settings say."""
    looks = judge(workdir / "judged", TRAINED)
    assert main([*TRAINED, "seed=3", "monitor.plots=false", "output_dir=plain"]) == 0
    assert iterate_points(workdir / "judged") == iterate_points(workdir / "plain")
    assert [row["step"] for row in looks[1:]] == [7, 13, 19, 26, 30]
    assert [row["samples"] for row in looks[1:]] == pytest.approx(
        [1438 / 45 * n for n in (7, 13, 19, 26, 30)]
    )
    capsys.readouterr()
    assert main(["evaluate", "plain", "--which", "last"]) == 0
    assert f"{looks[-1]['value']:.4f}"[:5] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"with_start": 0.0, "training": 0.0}, [7]),
        ({"with_start": 600.0, "training": 0.0}, [7, 13, 19, 26, 30]),
        ({"with_start": 0.0, "training": 600.0}, [7, 13, 19, 26, 30]),
    ],
)
def test_a_run_that_is_too_late_ends(workdir: Path, limits: dict[str, float], steps: list[int]):
    looks = judge(workdir / "judged", TRAINED, target=2.0, limits=limits, began=time.time())
    assert [row["step"] for row in looks if "step" in row] == steps
    if steps != [7]:
        return
    assert looks[-1] == {"late": True}
    assert "too late" in (workdir / "judged" / "status.json").read_text()


@pytest.mark.parametrize("words", [["trainer.limit_val_batches=0"], ["trainer.limit_val_batches=1.0"]])
def test_a_run_that_does_not_validate_is_judged_all_the_same(workdir: Path, words: list[str]):
    looks = judge(workdir / "judged", [*TRAINED[:-1], "trainer.max_steps=8", *words], every=None)
    assert looks[0]["every"] == 8 * 32 // 20
    assert looks[-1]["step"] == 8
    assert 0 <= looks[-1]["value"] <= 1


@pytest.mark.parametrize("metric", ["val/nothing", "val/night/acc"])
def test_a_metric_that_is_not_there(workdir: Path, metric: str, capsys: pytest.CaptureFixture[str]):
    folder = workdir / "judged"
    folder.mkdir()
    request = {"words": TRAINED, "seed": 3, "judge": {"metric": metric, "mode": "max", "every": 32}}
    write_json(folder / "request.json", request)
    assert racer_process.main([str(folder)]) == 2
    assert f"--until {metric}" in capsys.readouterr().err


TEXT = ["data=text", "data.path=book.txt", "data.train.kind=lines", "model=lstm", "model.width=8", "model.layers=1",
        "task=language_modeling", "data.batch_size=2", "trainer.max_steps=2", "trainer.num_threads=1",
        "data.num_workers=0", "trainer.check_task=false"]  # fmt: skip


def test_the_judge_reads_the_validation_data_as_the_first_racer_does(workdir: Path):
    """A racer that cuts its sequences is judged on whole ones: with no step in between all losses are equal."""
    (workdir / "book.txt").write_text("\n".join("word " * (number % 7 + 1) for number in range(40)))
    words = [*TEXT, "optimizer.lr=0"]
    whole = judge(workdir / "whole", words, metric="val/loss", mode="min", every=4)[-1]["value"]
    short = [*words, "data.max_sequence_length=4"]
    reads = validation_reads(read_racers(["lr=0", "lr=0.1"], TEXT)[0])
    judged = judge(workdir / "short", short, metric="val/loss", mode="min", every=4, reads=reads)[-1]["value"]
    own = judge(workdir / "own", short, metric="val/loss", mode="min", every=4)[-1]["value"]
    assert judged == pytest.approx(whole, rel=1e-6)
    assert own != pytest.approx(whole, rel=1e-6)
