"""What a training waits for: named from the measurements alone, and found in a real run with a planted fault."""

from __future__ import annotations

import gzip
import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainrun.cli import main
from trainrun.commands.budget import take_seconds
from trainrun.config import RunConfig
from trainrun.data.stages import Stages
from trainrun.errors import ConfigError
from trainrun.lab import diagnosis, duel, removals, rounds, time_left
from trainrun.lab.findings import Diagnosis, Slowed, WhatIf
from trainrun.lab.orders import Limits, Ready, Turn
from trainrun.lab.rare import Rare
from trainrun.lab.report import lines_of, write_report
from trainrun.lab.rounds import Rounds
from trainrun.lab.statistics import Ratio
from trainrun.lab.time_left import TimeLeft
from trainrun.lab.verdict import CAUSES, WORDS, verdict
from trainrun.plots.diagnosis import draw_what_ifs

READY = Ready("samples", "resident", 0, 1, 1000, "cpu", 1, 45, 900, 45.0)


def found(fused: bool = True, load_busy: float = 0.1, **gains: float | tuple[float, float]) -> Diagnosis:
    what_ifs = []
    for name, gain in gains.items():
        value, low = gain if isinstance(gain, tuple) else (gain, 0.98 * gain)
        what_ifs.append(WhatIf(name, Ratio(value, low, 2 * value - low, 9), "trainer.num_threads=1"))
    limits = Limits({"compute": 3000.0, "memory": 9000.0, "data": 1e6}, {"compute": "", "memory": ""}, 0.7)
    return Diagnosis(READY, 1500.0, 0.02, what_ifs, limits, {}, load_busy, fused, 0.2)


def test_a_training_that_waits_for_nothing_is_healthy() -> None:
    told = verdict(found(data=1.05, logging=1.0, threads=0.8, update=1.4, dispatch=1.2))
    assert told.first == "healthy"
    assert "computing, of which 50 %" in told.text


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_can_be_the_first(name: str) -> None:
    told = verdict(found(fused=False, **{name: 1.8}))
    assert told.first == name
    assert "80 %" in told.text


def test_at_most_two_causes_the_larger_first() -> None:
    told = verdict(found(data=1.3, logging=2.0, validation=1.2))
    assert [cause.what_if.name for cause in told.causes] == ["logging", "data"]


def test_what_noise_could_be_is_not_a_cause() -> None:
    told = verdict(found(data=(1.5, 0.9)))
    assert (told.first, told.causes) == ("unclear", ())
    assert "loading may cost something (-10 to +110 % faster without)" in told.text
    assert verdict(found(data=(1.5, 0.9), logging=1.3)).first == "logging"


def test_one_turn_is_no_proof(tmp_path: Path) -> None:
    once = found()
    once.what_ifs.append(WhatIf("data", Ratio(1.5, 0.0, float("inf"), 1), "batches that are there already"))
    once.what_ifs.append(WhatIf("validation", Ratio(1.05, 1.05, 1.05, 1), "3 ms a step"))
    told = verdict(once)
    assert (told.first, told.causes) == ("unclear", ())
    assert "loading may cost something (50 % faster without, in a single turn)" in told.text
    data, validation = lines_of(once)[-4:-2]
    assert "one turn" in data
    assert "computed" in validation
    write_report(once, [], tmp_path)
    rows = json.loads((tmp_path / "diagnosis.json").read_text())["what_ifs"]
    assert [row["low"] for row in rows] == [None, 1.05]


def test_what_there_was_no_time_for_is_said() -> None:
    short = replace(found(), untried=("data.batch_size=64",))
    assert "No time was left for: data.batch_size=64" in verdict(short).text
    assert "time was left" not in verdict(found()).text


def test_other_processes_are_named() -> None:
    busy = replace(found(data=(1.5, 0.9)), others=0.7)
    assert "other processes" in verdict(busy).text
    assert "kept 0.7 cores busy" in "\n".join(lines_of(busy))
    assert "cores busy" not in "\n".join(lines_of(found()))


def test_a_large_batch_explains_what_nothing_else_does() -> None:
    assert verdict(found(dispatch=1.9)).first == "dispatch"
    assert verdict(found(dispatch=1.3, logging=1.4)).first == "logging"
    assert verdict(found(dispatch=1.9, data=1.4)).first == "dispatch"
    assert verdict(found(dispatch=1.9, threads=1.4)).first == "threads"
    assert verdict(found(dispatch=1.2)).first == "healthy"


def test_two_turns_of_a_larger_batch_are_too_few() -> None:
    few = found(dispatch=1.98, update=1.2)
    gain = few.what_ifs[0].gain._replace(pairs=2)
    few.what_ifs[0] = replace(few.what_ifs[0], gain=gain)
    assert verdict(few).first == "unclear"
    assert "(98 % faster without, in 2 turns); there was no time for more" in verdict(few).text
    few.what_ifs[0] = replace(few.what_ifs[0], gain=gain._replace(pairs=3))
    assert verdict(few).first == "dispatch"


def test_a_larger_cause_that_is_not_certain_is_told_beside_one_that_is() -> None:
    both = found(dispatch=4.0, data=1.15)
    both.what_ifs[0] = replace(both.what_ifs[0], gain=both.what_ifs[0].gain._replace(pairs=2))
    said = verdict(both)
    assert said.first == "data"
    assert "; unclear: calls that are too small" in said.text
    assert "(300 % faster without, in 2 turns)" in said.text
    assert "unclear" not in verdict(found(dispatch=4.0, data=1.15)).text


def test_a_fused_update_is_no_cause() -> None:
    assert verdict(found(fused=True, update=1.5)).first == "healthy"
    assert verdict(found(fused=False, update=1.5)).causes[0].words == ("optimizer.fused=true",)


def test_loading_that_waits_and_loading_that_computes_get_other_words() -> None:
    waits, computes = (verdict(found(data=3.0, load_busy=busy)).causes[0].words for busy in (0.1, 1.0))
    assert waits != computes


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (Stages(0.06, 0.06, 0.001, 0.0, 0.004), "samples are read, which mostly waits (a disk"),
        (Stages(0.06, 0.002, 0.001, 0.0, 0.004), "samples are read, which mostly waits for files"),
        (Stages(0.06, 0.06, 0.06, 0.01, 0.004), "samples are read, which mostly computes"),
        (Stages(0.01, 0.01, 0.01, 0.06, 0.004), "data.transform"),
        (Stages(0.01, 0.01, 0.01, 0.0, 0.04), "put together to batches"),
    ],
)
def test_the_stage_of_loading_that_takes_most_of_it_is_named(stages: Stages, said: str) -> None:
    diagnosed = replace(found(data=3.0), stages=stages)
    assert said in verdict(diagnosed).text
    assert any(line.startswith("loading   a batch: samples") for line in lines_of(diagnosed))


def test_what_is_promised_is_what_the_named_stage_costs() -> None:
    diagnosed = replace(
        found(data=5.0), stages=Stages(0.06, 0.06, 0.001, 0.0, 0.02)
    )  # 4/5 is loading, 3/4 samples
    assert verdict(diagnosed).causes[0].what_if.gain.value == pytest.approx(2.5)
    assert "up to 150 % faster" in verdict(diagnosed).text
    rested = Stages(
        0.06, 0.06, 0.001, 0.0, 0.02, awake=0.01
    )  # of which half is longer for the waiting before it
    assert verdict(replace(diagnosed, stages=rested)).causes[0].what_if.gain.value == pytest.approx(1 / 0.3)


def test_who_has_to_share_its_core_does_not_wait_for_a_disk() -> None:
    diagnosed = replace(found(data=3.0), stages=Stages(0.06, 0.06, 0.02, 0.0, 0.004))
    assert "mostly waits" in verdict(diagnosed).text
    assert "mostly computes" in verdict(replace(diagnosed, others=1.5)).text


def test_threads_are_named_only_where_the_data_bears_them() -> None:
    told = found(data=3.0)
    assert "workers" in verdict(told).causes[0].words[0]
    told = replace(told, ready=replace(READY, thread_safe=True))
    assert "threads" in verdict(told).causes[0].words[0]


def test_every_word_to_try_is_one_that_a_run_takes() -> None:
    from trainrun.words.compose import compose_run

    words = sorted({word for several in WORDS.values() for each in several for word in each.split()})
    apart = ["monitor=fast", "data.engine=workers", "data.num_workers=auto", "trainer.compile=step"]
    compose_run([word for word in words if word not in apart])
    assert compose_run(apart).config.trainer.compile.scope == "step"


def test_the_lines_hold_every_what_if() -> None:
    text = "\n".join(lines_of(found(data=1.3, logging=2.0)))
    assert re.search(r"logging +\+100 % +\+96 to \+104 %", text)
    assert "try: monitor.log_every_n_steps=500" in text


@pytest.mark.parametrize("words", [["--budget", "30"], ["--budget=30"], ["--budget", "0.5min"]])
def test_the_budget(words: list[str]) -> None:
    assert take_seconds(["model=cnn", *words, "seed=1"], 40.0, "diagnose") == (["model=cnn", "seed=1"], 30.0)


@pytest.mark.parametrize("words", [["--budget"], ["--budget", "soon"], ["--budget=1"]])
def test_a_wrong_budget(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="diagnose: --budget"):
        take_seconds(words, 40.0, "diagnose")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--traces"], "--traces: no flag of trainrun diagnose. Did you mean --trace?"),
        (["--cfg", "job"], "--cfg: no flag of trainrun diagnose"),
        (["-m", "seed=1,2"], "-m: no flag of trainrun diagnose"),
        (["--config-dir", "nowhere"], "nowhere: no such folder"),
        (["data.batchsize=3"], "Did you mean data.batch_size?"),
    ],
)
def test_a_word_that_it_does_not_know(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *words]) == 2
    assert said in capsys.readouterr().err


OWN = """
import time, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((16,), index / 2000), index % 3
"""
WORDS_OF_SLOW = ["data=custom", "data.train._target_=slow_data.Slow", "data.num_classes=3", "data.engine=workers",
                 "data.num_workers=0", "data.batch_size=16"]  # fmt: skip


@pytest.mark.parametrize(("slowed", "said"), [
    (Slowed(1.4, "optimizer"), None), (Slowed(4.9, "forward"), "4.9x as long as in the beginning, because of forward"),
    (Slowed(4.9, "optimizer", flushed=True), "because of optimizer"),
    (Slowed(4.9, "optimizer"), "because of optimizer: numbers next to 0 may do that, which trainer.flush_denormal"),
])  # fmt: skip
def test_steps_that_became_slower_are_told(slowed: Slowed, said: str | None) -> None:
    lines = lines_of(replace(found(data=1.0), slowed=slowed))
    (told,) = [line for line in lines if line.startswith("slower")] or [""]
    assert (said or "") in told
    assert bool(said) == bool(told)
    assert ("numbers" in told) == ("numbers" in (said or ""))


class Scripted:
    """A run whose turns take a second, on a clock of their own. names: of all turns, in their order."""

    def __init__(self, names: list[str]) -> None:
        self.now, self.names = 0.0, names

    def turn(self, name: str, items: float) -> Turn:
        self.now += 1.0
        self.names.append(name)
        return Turn(1.0, 1, items, accounts={"data": 0.5})


@pytest.mark.parametrize(
    ("deadline", "last"), [(13.5, []), (15.5, ["", "cached", ""]), (18.5, ["", "larger", "silent", ""])]
)
def test_what_is_left_of_the_time_is_for_what_gained_most(
    monkeypatch: pytest.MonkeyPatch, deadline: float, last: list[str]
) -> None:
    """Two rounds of a base and of what gains as much as its number, and phases, which are no finding."""
    names: list[str] = []
    run = Scripted(names)
    gains = {"cached": 3.0, "silent": 1.0, removals.FORWARD: 9.0}
    gains |= {"larger": 4.0} if "larger" in last else {}
    examined = examination(run, deadline, monkeypatch)
    sides = {name: partial(run.turn, name, gain) for name, gain in gains.items()}
    examined._measured(sides, Turn(1.0, 1, 1.0), lambda about: None)
    full = len(sides) + 1 + (len(sides) + 1) // 2
    assert names[2 * full :] == last


def examination(run: Scripted, deadline: float, monkeypatch: pytest.MonkeyPatch) -> diagnosis.Examination:
    """On the run's clock."""
    for module in (time_left, rounds):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: run.now))
    examined = diagnosis.Examination.__new__(diagnosis.Examination)
    examined._base = SimpleNamespace(  # type: ignore[assignment]
        train=lambda steps, warm, most_seconds: run.turn("", 1.0)
    )
    examined._steps, examined._warm, examined._time = 1, 0, TimeLeft(deadline)
    examined._rounds, examined._untried = Rounds(), []
    return examined


def test_the_first_round_ends_where_the_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    run = Scripted(names)
    examined = examination(run, 2.0, monkeypatch)
    sides = {name: partial(run.turn, name, 1.0) for name in ("cached", "silent", "without_update")}
    examined._measured(sides, Turn(1.0, 1, 1.0), lambda about: None)
    assert names == ["", "cached", "silent", ""]  # a second of grace


def test_where_finding_the_pace_takes_all_the_time_the_pace_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    run = Scripted(names)
    examined = examination(run, 8.5, monkeypatch)
    pace = Turn(11.0, 1, 4.0, accounts={"compile": 10.0}, compile_seconds=30.0)
    examined._time.note(pace)  # and another shape may take as long
    found = examined._measured({"cached": partial(run.turn, "cached", 1.0)}, pace, lambda about: None)
    assert names == []
    assert found.own == [pace]
    assert found.seconds() == 0.25
    assert examined._untried == ["batches that are there already"]


def test_what_comes_now_and_then_is_left_out_when_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "time", SimpleNamespace(monotonic=lambda: 10.0))
    for deadline, late in ((8.1, False), (7.9, True)):
        rare = Rare(SimpleNamespace(), RunConfig(), few=True, time=TimeLeft(deadline))  # type: ignore[arg-type]
        assert rare.is_too_late() == late


@pytest.mark.parametrize(("steps", "told"), [(50, [("logging", 0.004)]), (20, [])])
def test_log_points_are_told_by_whole_turns_only(steps: int, told: list[tuple[str, float]]) -> None:
    """Where shapes are compiled meanwhile, a turn ends before it comes to one."""
    turn = Turn(0.5, steps, 1.0, accounts={"logging": 0.2})
    base = SimpleNamespace(train=lambda number, warm, most_seconds: turn)
    rare = Rare(base, RunConfig(), few=False, time=TimeLeft(0.0))  # type: ignore[arg-type]
    assert list(rare.logging(10, 0.01)) == [(name, pytest.approx(seconds)) for name, seconds in told]


def test_a_diagnosis_without_time_does_not_say_healthy() -> None:
    what_ifs = [WhatIf("data", Ratio(1.0, 1.0, 1.0, 1), "")]
    assert verdict(replace(found(), what_ifs=what_ifs)).first == "healthy"
    told = verdict(replace(found(), what_ifs=what_ifs, untried=("no optimizer",)))
    assert told.first == "unclear"
    assert "no optimizer" in told.text


def test_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "time", SimpleNamespace(monotonic=lambda: 100.0))
    left = TimeLeft(110.0)
    assert left.of_a_turn(0.6) == pytest.approx(6.0)
    assert not left.is_over()
    left.note(Turn(6.0, 1, 1.0, accounts={"compile": 5.0}))
    left.reserve(4.0)
    assert not left.is_over()
    left.reserve(1.5)
    assert left.is_over()
    assert not left.is_over(grace=1.0)
    left.reserve(9.0)
    assert left.of_a_turn() == time_left.LEAST_TURN


def test_a_slow_data_set_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "slow_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(duel, "TURN_SECONDS", 0.1)
    monkeypatch.setattr(diagnosis, "FEWEST_ROUNDS", 3)
    monkeypatch.setattr(diagnosis, "MOST_ROUNDS", 3)
    monkeypatch.setattr(diagnosis, "steps_for", lambda take, seconds: max(1, take(2).steps))
    began = time.monotonic()
    assert main(["diagnose", "--trace", *WORDS_OF_SLOW, "--budget", "300"]) == 0
    assert time.monotonic() - began < 400
    assert "mostly waits" in capsys.readouterr().out
    (folder,) = (tmp_path / "outputs").glob("*/*-diagnose-*")
    data = json.loads((folder / "diagnosis.json").read_text())
    assert data["verdict"]["first"] == "data"
    assert {"addmm", "mm"} <= {one["name"] for one in data["profile"]["operations"]}
    traced = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert any(event.get("name") == "aten::addmm" for event in traced["traceEvents"])
    assert data["loading"]["samples"] >= 0.064 > data["loading"]["rest"]
    assert {row["name"] for row in data["what_ifs"]} >= {"data", "logging", "update", "dispatch"}
    assert all((folder / name).stat().st_size > 5000 for name in ("whatif.png", "roofs.png"))
    assert {path.name for path in tmp_path.iterdir()} <= {"slow_data.py", "outputs", "__pycache__"}


def test_a_picture_of_nothing_says_so(tmp_path: Path) -> None:
    """Where there was no time for a removal, and nothing is booked, as on a GPU."""
    facts = {"what_ifs": [], "verdict": {"causes": []}, "items_per_second": 1500.0, "unit": "samples"}
    draw_what_ifs(facts, tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").stat().st_size > 1000
