"""What a training waits for: named from the measurements alone, and found in a real run with a planted fault."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainrun.benchmark import budget
from trainrun.benchmark.diagnose import diagnosis
from trainrun.benchmark.diagnose.ablations import CACHED, useful_ablations
from trainrun.benchmark.diagnose.diagnosis import Diagnosis, Examination, WhatIf
from trainrun.benchmark.diagnose.diagnosis_report import diagnosis_lines, write_diagnosis
from trainrun.benchmark.diagnose.rounds import Rounds
from trainrun.benchmark.diagnose.verdict import CAUSES, reach_verdict
from trainrun.benchmark.remedies import EFFECTS, REMEDIES, Remedy, find_remedies
from trainrun.benchmark.run_overrides import compose_config, replace_overrides
from trainrun.benchmark.worker_messages import RunInfo, Save, Turn
from trainrun.cli.main import main
from trainrun.comparison.paired import Ratio
from trainrun.config.schema import RunConfig, replace_values
from trainrun.timing.phases import DATA

INFO = RunInfo("samples", "resident", 0, 1, "cpu", 1, 900, 45.0)


def found(
    overrides: tuple[str, ...] = (), load_cores: float = 0.1, **gains: float | tuple[float, float]
) -> Diagnosis:
    what_ifs = []
    for name, gain in gains.items():
        value, low = gain if isinstance(gain, tuple) else (gain, 0.98 * gain)
        setting = {"dispatch": "data.batch_size=256", "padding": "data.padding=bucket"}
        measured = setting.get(name, "trainer.num_threads=1")
        what_ifs.append(WhatIf(name, Ratio(value, low, 2 * value - low, 9), "", measured))
    return Diagnosis(INFO, 1500.0, 0.02, what_ifs, 1e6, load_cores, overrides)


def test_a_training_that_waits_for_nothing_is_healthy() -> None:
    assert (
        reach_verdict(found(data=1.05, logging=1.0, threads=0.8, update=1.4, dispatch=1.2)).first == "healthy"
    )


def test_padding_that_was_not_tried_is_no_health() -> None:
    told = reach_verdict(replace(found(data=1.05), untried=("data.batch_size=32", "data.padding=bucket")))
    assert told.first == "unclear"
    assert "there is padding, which may cost something. No time was left for" in told.text


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_can_be_the_first(name: str) -> None:
    told = reach_verdict(found(("optimizer.fused=false",), **{name: 1.8}))
    assert told.first == name
    assert "80 %" in told.text


def test_at_most_two_causes_the_larger_first() -> None:
    told = reach_verdict(found(data=1.3, logging=2.0, validation=1.2))
    assert [cause.what_if.name for cause in told.causes] == ["logging", "data"]


def test_what_noise_could_be_is_not_a_cause() -> None:
    told = reach_verdict(found(data=(1.5, 0.9)))
    assert (told.first, told.causes) == ("unclear", ())
    assert "loading may cost something (-10 to +110 % faster without)" in told.text
    assert reach_verdict(found(data=(1.5, 0.9), logging=1.3)).first == "logging"


def test_one_turn_is_no_proof(tmp_path: Path) -> None:
    once = found()
    once.what_ifs.append(WhatIf("data", Ratio(1.5, 0.0, float("inf"), 1), "batches that are there already"))
    once.what_ifs.append(WhatIf("validation", Ratio(1.05, 1.05, 1.05, 1), "3 ms a step"))
    told = reach_verdict(once)
    assert (told.first, told.causes) == ("unclear", ())
    assert "loading may cost something (50 % faster without, in a single turn)" in told.text
    data, validation = diagnosis_lines(once)[-4:-2]
    assert "one turn" in data
    assert "computed" in validation
    write_diagnosis(once, [], tmp_path)
    rows = json.loads((tmp_path / "diagnosis.json").read_text())["what_ifs"]
    assert [row["low"] for row in rows] == [None, 1.05]


def test_what_there_was_no_time_for_is_said() -> None:
    short = replace(found(), untried=("data.batch_size=64",))
    assert "No time was left for: data.batch_size=64" in reach_verdict(short).text
    assert "time was left" not in reach_verdict(found()).text
    single = [WhatIf("data", Ratio(1.0, 1.0, 1.0, 1), "")]
    assert reach_verdict(replace(found(), what_ifs=single)).first == "healthy"
    told = reach_verdict(replace(found(), what_ifs=single, untried=("no optimizer",)))
    assert told.first == "unclear"
    assert "no optimizer" in told.text


def test_a_large_batch_explains_what_nothing_else_does() -> None:
    assert reach_verdict(found(dispatch=1.9)).first == "dispatch"
    assert reach_verdict(found(dispatch=1.3, logging=1.4)).first == "logging"
    assert reach_verdict(found(dispatch=1.9, data=1.4)).first == "dispatch"
    assert reach_verdict(found(dispatch=1.9, threads=1.4)).first == "threads"
    assert reach_verdict(found(dispatch=4.7, threads=1.3, data=2.0)).first == "dispatch"
    assert reach_verdict(found(dispatch=1.2)).first == "healthy"


@pytest.mark.parametrize(
    ("dispatch", "update", "first"),
    [(1.31, 1.25, "healthy"), (1.31, 1.02, "dispatch"), (1.45, 1.25, "dispatch"), (1.6, 2.0, "dispatch")],
)
def test_a_batch_twice_as_large_that_only_saves_a_few_updates_is_not_named(
    dispatch: float, update: float, first: str
) -> None:
    diagnosis = found(("data.batch_size=128",), dispatch=dispatch, update=update)
    assert reach_verdict(diagnosis).first == first


def remedies_of(diagnosis: Diagnosis) -> list[str]:
    return [str(remedy) for remedy in reach_verdict(diagnosis).causes[0].remedies]


GRAPHS, COMPILED, LARGER = "trainer.cuda_graphs=true", "trainer.compile.scope=step", "data.batch_size=256"


@pytest.mark.parametrize(
    ("words", "device", "one_graph", "remedies"),
    [
        ([], "cuda:0", True, [GRAPHS, COMPILED, LARGER]),
        ([], "cpu", True, [COMPILED, LARGER]),
        ([], "cuda:0", False, [COMPILED, LARGER]),
        (["trainer.cuda_graphs=true"], "cuda:0", True, [COMPILED, LARGER]),
        (["precision=16-mixed"], "cuda:0", True, [LARGER]),
        (["trainer.gradient_checkpointing=full"], "cuda:0", True, [LARGER]),
        (["trainer.compile.scope=step", "data.batch_size=256"], "cpu", True, []),
    ],
)
def test_remedies_are_those_that_the_run_accepts_and_does_not_have(
    words: list[str], device: str, one_graph: bool, remedies: list[str]
) -> None:
    info = replace(INFO, device=device, one_graph=one_graph)
    assert remedies_of(replace(found(tuple(words), dispatch=1.9), info=info)) == remedies


@pytest.mark.parametrize("most", [1, 3, 8])
@pytest.mark.parametrize("load_cores", [0.1, 1.0])
def test_a_source_without_numbers_is_neither_cached_nor_read_by_threads(most: int, load_cores: float) -> None:
    info = replace(INFO, engine="workers", most_readers=most, thread_safe=True)
    diagnosis = replace(found(data=2.0, load_cores=load_cores), info=info)
    assert remedies_of(diagnosis) == [f"data.engine=workers data.num_workers={min(4, most)}"]


def test_remedies_that_change_less_come_first() -> None:
    diagnosis = found(("optimizer.fused=false", "checkpoint.async_save=false"))
    for name in CAUSES:
        what_if = WhatIf(name, Ratio(2.0, 1.9, 2.1, 9), "", "trainer.num_threads=1")
        effects = [EFFECTS.index(remedy.effect) for remedy in find_remedies(what_if, diagnosis)]
        assert effects == sorted(effects), name


def test_what_a_remedy_changes_is_printed() -> None:
    lines = diagnosis_lines(found(dispatch=1.9))
    assert "try: data.batch_size=256 (changes the batch of a step)" in lines


def test_loading_that_waits_and_loading_that_computes_get_other_remedies() -> None:
    read = replace(INFO, engine="workers")
    waits, computes = (
        reach_verdict(replace(found(data=3.0, load_cores=cores), info=read)) for cores in (0.1, 1.0)
    )
    assert "mostly waits" in waits.text
    assert "mostly computes" in computes.text
    assert "workers" in str(waits.causes[0].remedies[0])
    safe = replace(found(data=3.0), info=replace(read, thread_safe=True))
    assert "threads" in str(reach_verdict(safe).causes[0].remedies[0])
    in_memory = reach_verdict(found(data=3.0, load_cores=1.0))  # a cache and workers are of no use there
    assert in_memory.causes[0].remedies == ()


@pytest.mark.parametrize("remedy", [remedy for several in REMEDIES.values() for remedy in several], ids=str)
def test_every_remedy_is_one_that_a_run_takes(remedy: Remedy) -> None:
    compose_config(replace_overrides(["trainer.compile.scope=model"], remedy.overrides))


def test_only_useful_ablations_are_asked() -> None:
    config = RunConfig()
    assert "one_type" not in useful_ablations(config, INFO, 10)
    config = replace_values(config, {"precision.mode": "bf16-mixed", "checkpoint.every_n_train_steps": 5})
    ranks = useful_ablations(config, replace(INFO, world_size=2), 10)
    assert {"one_type", "saving", "no_gradient_sync"} <= set(ranks)
    assert not [name for name in ranks if name.startswith("threads=")]


def examination(deadline: float, clock: list[float]) -> Examination:
    examined = Examination.__new__(Examination)
    examined._budget, examined._reserved = budget.Budget(deadline, lambda: clock[0]), 0.0
    examined._compiling, examined._untried, examined._say = 0.0, [], lambda about, left: None
    examined._known, examined._base = {CACHED: DATA}, cast(Any, SimpleNamespace(info=INFO))
    return examined


@pytest.mark.parametrize(
    ("words", "every"),
    [
        (["checkpoint.train_time_interval=60"], 60 / 0.02),
        (["checkpoint.every_n_train_steps=500", "checkpoint.train_time_interval=null"], 500),
        (
            ["checkpoint.every_n_train_steps=1000", "checkpoint.train_time_interval=10"],
            1 / (1 / 1000 + 0.02 / 10),
        ),
        (["checkpoint.enabled=false"], math.inf),
    ],
)
def test_cost_of_checkpoints_is_that_of_one_over_the_steps_between_two(
    words: list[str], every: float
) -> None:
    """A save of 3 s, steps of 20 ms."""
    examined, saves = examination(100.0, [0.0]), iter([9.0, 3.0, 2.0])  # the middle one counts
    examined._config, examined._warm = compose_config(words), 1

    def ask(message: object) -> Turn:
        assert isinstance(message, Save)
        return Turn(next(saves), 0, 0.0)

    examined._base = cast(Any, SimpleNamespace(info=replace(INFO, val_every=None), request=ask))
    costs = examined._measure_rare_costs(0.02, None)
    assert costs.get("checkpoint", 0.0) == pytest.approx(3.0 / every)


@pytest.mark.parametrize(("seconds", "rounds"), [(1.5, 1), (8.0, 1), (30.0, 6), (300.0, 12)])
def test_rounds_end_with_the_budget_and_the_last_ones_are_for_what_gains(seconds: float, rounds: int) -> None:
    clock, names = [0.0], []

    def side(name: str, items: float):
        def turn() -> Turn:
            clock[0] += 1.0
            names.append(name)
            return Turn(1.0, 1, items)

        return turn

    gains = {"cached": 3.0, "no_logging": 1.0, "threads=2": 0.5}
    taken = Rounds(
        side("", 1.0), {name: side(name, gain) for name, gain in gains.items()}, seconds, lambda: clock[0]
    )
    examined = examination(seconds, clock)
    examined._measure(taken, list(gains), Turn(11.0, 1, 4.0))
    assert clock[0] <= seconds + 3.0  # a group that was begun in the first round
    assert len(taken.pairs["cached"]) >= rounds
    assert len(taken.pairs["threads=2"]) <= 3  # what is slower is not asked again
    assert bool(examined._untried) == (seconds < 2)


def test_the_base_goes_on_alone_until_a_rare_stall_of_the_data_is_clear() -> None:
    clock, number = [0.0], count()

    def turn() -> Turn:
        clock[0] += 1.0
        stall = 0.9 * (next(number) % 6 == 5)
        return Turn(1.0 + stall, 1, 10.0, phases={"data": stall})

    def slower() -> Turn:
        clock[0] += 1.0
        return Turn(2.0, 1, 10.0, phases={"data": 0.0})

    taken = Rounds(turn, {"threads=2": slower}, 200.0, lambda: clock[0])
    examined = examination(200.0, clock)
    examined._measure(taken, ["threads=2"], Turn(11.0, 1, 4.0))
    found = examined._estimate_gains(taken)[CACHED]
    assert found.value >= 1.1
    assert found.low > 1.0
    assert len(taken.pairs["threads=2"]) == 3
    assert clock[0] < 100.0  # it is clear long before the time is over


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
def test_a_word_that_it_does_not_know(words: list[str], said: str, refuses: Callable[..., None]) -> None:
    refuses(["diagnose", *words], said)


OWN = """
import time, torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((16,), index / 2000), index % 3
"""
SLOW = ["data=custom", "data.train._target_=slow_data.Slow", "data.num_classes=3", "data.engine=workers",
        "data.num_workers=0", "data.batch_size=16"]  # fmt: skip


@pytest.mark.process
def test_a_slow_data_set_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "slow_data.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(diagnosis, "MOST_ROUNDS", 3)
    assert main(["diagnose", "--trace", *SLOW, "--budget", "300"]) == 0
    printed = capsys.readouterr().out
    assert "loading, which mostly " in printed  # it waits; beside other programs, for a core too
    assert "aten::addmm" in printed
    (folder,) = (tmp_path / "outputs").glob("*/*-diagnose-*")
    data = json.loads((folder / "diagnosis.json").read_text())
    assert data["verdict"]["first"] == "data"
    traced = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert any(event.get("name") == "aten::addmm" for event in traced["traceEvents"])
    assert {row["name"] for row in data["what_ifs"]} >= {"data", "logging", "update", "dispatch"}
    assert {path.name for path in tmp_path.iterdir()} <= {"slow_data.py", "outputs", "__pycache__"}
