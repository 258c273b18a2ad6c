"""The search in worlds whose best setting is known: found if there is one, and not if there is none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from benchmark_worlds import Runner, World

from trainrun.benchmark.budget import Budget
from trainrun.benchmark.diagnose.verdict import CAUSES
from trainrun.benchmark.remedies import REMEDIES
from trainrun.benchmark.run_overrides import config_of, replaced
from trainrun.benchmark.search.acceptance import SHOWN
from trainrun.benchmark.search.autotune_report import as_plain, search_lines, table_lines
from trainrun.benchmark.search.candidates import KEPT, NEEDLESS, REJECTED, UNPAID, UNTRIED, Trial
from trainrun.benchmark.search.options import (
    DATA,
    EXACT,
    NUMERIC,
    OPTIONS,
    OTHER,
    SearchFacts,
    SearchOption,
    Technique,
    TriedSetting,
    skip_graphs,
)
from trainrun.benchmark.search.search import Results, Search
from trainrun.benchmark.search.technique_table import Row, measure_table
from trainrun.benchmark.worker_process import WorkerFailed
from trainrun.config.schema import RunConfig, with_values
from trainrun.errors import ConfigError, TrainingError

SETTINGS = ["seed=1", "trainer.num_threads=2"]
FEW = tuple(option for option in OPTIONS if option.name in ("threads", "numbers"))
COMPILE_ONLY = tuple(option for option in OPTIONS if option.name == "compile")
GRAPHS_FIRST = tuple(option for option in OPTIONS if option.name in ("CUDA graphs", "compile"))
GRAPHS = "trainer.cuda_graphs=true"


def flat(config: RunConfig) -> float:
    return 1000.0


def known(config: RunConfig) -> float:
    """bf16 pays with channels-last only; one thread is better than two."""
    speed = 1000.0
    bf16, last = config.precision.mode == "bf16-mixed", config.trainer.channels_last
    speed *= {(True, True): 2.0, (True, False): 0.8, (False, True): 1.05, (False, False): 1.0}[bf16, last]
    return speed * (1.3 if config.trainer.num_threads == 1 else 1.0)


def new_search(world: World, gate: str, budget: float) -> Search:
    return Search(world.start, SETTINGS, Budget(budget, world.clock), 2, lambda about, left: None, gate)


def searched(
    world: World, gate: str = NUMERIC, budget: float = 120.0, options: Sequence[SearchOption] = FEW
) -> Results:
    return new_search(world, gate, budget).run(options)


def trial_of(results: Results, *overrides: str) -> Trial:
    return next(trial for trial in results.trials if trial.overrides == overrides)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_best_is_found_and_claimed_at_its_size(tmp_path: Path, noise: float) -> None:
    world = World(tmp_path, known, noise=noise, drift=0.2)
    results = searched(world)
    expected = {"precision=bf16-mixed", "trainer.channels_last=true", "trainer.num_threads=1"}
    assert expected <= set(results.found)
    assert results.claim is not None
    assert results.claim.low * (1 - 1e-9) <= 2.0 * 1.3 <= results.claim.high * (1 + 1e-9)
    assert world.now <= 1.1 * 120
    assert world.most_alive <= 12
    assert world.alive <= 1  # the pool closes the last one
    assert "the speed of your own settings" in "\n".join(search_lines(results, explain=True))
    assert as_plain(results)["claim"]["low"] == results.claim.low


def test_the_claims_intervals_hold_the_truth(tmp_path: Path) -> None:
    """Of 20 searches with a known gain, each with noise, processes that differ, and drift; 99 % is promised."""
    held = claims = 0
    for seed in range(20):
        world = World(tmp_path, known, noise=0.1, twist=0.01, drift=0.2, seed=seed)
        results = searched(world, budget=90.0, gate=EXACT)
        if results.claim is not None:
            claims += 1
            truth = known(world.started[-1]) / 1000.0
            truth = max(truth, known(world.started[-2]) / 1000.0)
            held += results.claim.low <= truth <= results.claim.high
    assert claims >= 18
    assert held >= claims - 1


@pytest.mark.parametrize("spread", [0.01, 0.02, 0.05])
def test_claim_of_a_search_holds_the_truth_however_much_processes_differ(
    tmp_path: Path, spread: float
) -> None:
    """99 % is claimed; of 60 claims at most 3 may miss (the chance of more is 0.3 %, if one in a hundred does)."""

    def speed(config: RunConfig) -> float:
        return 1000.0 * (1.3 if config.trainer.num_threads == 1 else 1.0)

    threads = SearchOption("threads", lambda facts: [TriedSetting(("trainer.num_threads=1",))])
    claims = missed = 0
    for seed in range(60):
        world = World(tmp_path, speed, noise=0.02, twist=spread, drift=0.2, seed=seed)
        search = Search(
            world.start, ["seed=1", "trainer.num_threads=2"], Budget(60.0, world.clock), 2, lambda *_: None
        )
        results = search.run([threads])
        if results.claim is not None:
            claims += 1
            missed += not results.claim.low <= 1.3 <= results.claim.high
    assert claims >= 54
    assert missed <= 3


def test_only_what_is_allowed_is_tried(tmp_path: Path) -> None:
    world = World(tmp_path, known)
    results = searched(world, gate=EXACT)
    assert {config.precision.mode for config in world.started} == {"32-true"}
    assert "trainer.num_threads=1" in results.found
    assert trial_of(results, "precision=bf16-mixed").state == REJECTED
    with pytest.raises(ConfigError, match="--allow all: must be one of exact, numeric"):
        searched(world, gate="all")


def test_another_training_is_not_accepted_however_fast(tmp_path: Path) -> None:
    world = World(tmp_path, known, wrong=lambda config: config.trainer.num_threads == 1)
    results = searched(world)
    assert "trainer.num_threads=1" not in results.found
    trial = trial_of(results, "trainer.num_threads=1")
    assert (trial.state, trial.cosine) == (REJECTED, -1.0)


def test_a_run_that_is_not_repeatable_is_refused(tmp_path: Path) -> None:
    calls: list[int] = []
    world = World(tmp_path, flat, wrong=lambda config: bool(calls.append(1)) or len(calls) == 2)
    with pytest.raises(TrainingError, match="two runs of these settings differ by more than rounding"):
        searched(world)


def test_what_cannot_start_is_told_and_the_search_goes_on(tmp_path: Path) -> None:
    results = searched(
        World(tmp_path, lambda config: known(config) if config.trainer.num_threads == 2 else 0.0)
    )
    trial = trial_of(results, "trainer.num_threads=1")
    assert (trial.state, trial.reason) == (REJECTED, "it fell over")
    assert "precision=bf16-mixed" in results.found


def test_no_gain_is_claimed_if_there_is_none(tmp_path: Path) -> None:
    """Noise of 10 to 30 % in every turn, processes that differ by up to two percent, and a machine that drifts."""
    claims = 0
    for seed in range(40):
        noise, twist = 0.1 + 0.2 * (seed % 3) / 2, 0.005 if seed % 2 else 0.02
        world = World(tmp_path, flat, noise=noise, twist=twist, drift=0.3, seed=seed)
        results = searched(world, budget=60.0)
        assert world.now <= 1.1 * 60
        claims += results.claimed
    assert claims <= 1


def test_compiling_must_pay_for_itself(tmp_path: Path) -> None:
    def speed(config: RunConfig) -> float:
        return 1000.0 * (1.5 if config.trainer.compile.scope != "off" else 1.0)

    long_run = searched(World(tmp_path, speed, total_steps=10**6), options=COMPILE_ONLY)
    assert any(one.startswith("trainer.compile.scope=") for one in long_run.found)
    short_run = searched(World(tmp_path, speed, total_steps=100), options=COMPILE_ONLY)
    assert {trial.state for trial in short_run.trials if trial.option == "compile"} == {NEEDLESS}

    class Slow(World):
        def start(self, config: RunConfig, limit: float):
            self.now += 15.0 if config.trainer.compile.scope != "off" else 0.0
            return super().start(config, limit)

    slow = Slow(tmp_path, speed, total_steps=3000)  # 30 s of training, of which 10 s would be saved
    results = searched(slow, budget=300.0, options=COMPILE_ONLY)
    assert UNPAID in {trial.state for trial in results.trials if trial.option == "compile"}
    assert not results.claimed


def loading_limits(config: RunConfig) -> float:
    """Loading takes 13 of 14 parts of a step; from memory none."""
    return 1300.0 if config.data.cache == "memory" else 100.0


def test_search_finds_that_samples_in_memory_are_faster(tmp_path: Path) -> None:
    """The largest gain that there is for a run that is limited by loading: `diagnose` proposes it."""
    few = [option for option in OPTIONS if option.name in (DATA, "threads", "loader")]
    results = searched(
        World(tmp_path, loading_limits, noise=0.02, twist=0.02, load_seconds=0.09), gate=EXACT, options=few
    )
    assert "data.cache=memory" in results.found
    assert results.claim is not None
    assert results.claim.low <= 13.0 <= results.claim.high


class FillsSlowly(World):
    """A cache is filled before the first step. fill: its seconds."""

    fill = 0.0

    def start(self, config: RunConfig, limit: float) -> Runner:
        seconds = self.fill if config.data.cache == "memory" else 0.0
        if seconds > limit:
            self.now += limit
            raise WorkerFailed(f"it did not come to its first step in {limit:.0f} s")
        self.now += seconds
        return super().start(config, limit)


@pytest.mark.parametrize(
    ("fill", "total_steps", "state"),
    [
        (20.0, 10**6, KEPT),
        (20.0, 100, UNPAID),  # 10 s of training
        (200.0, 10**6, UNTRIED),  # longer than the search may take
    ],
)
def test_cache_must_be_filled_in_time_and_pay_for_itself(
    tmp_path: Path, fill: float, total_steps: int, state: str
) -> None:
    world = FillsSlowly(tmp_path, loading_limits, total_steps=total_steps, load_seconds=0.09)
    world.fill = fill
    data_only = [option for option in OPTIONS if option.name == DATA]
    results = searched(world, gate=EXACT, budget=150.0, options=data_only)
    assert trial_of(results, "data.cache=memory").state == state
    assert ("data.cache=memory is not tried" in results.verdict) == (state == UNTRIED)
    assert results.claimed == (state == KEPT and results.claim is not None)


def test_search_tries_all_that_diagnose_proposes_and_leaves_the_training_the_same(tmp_path: Path) -> None:
    typed = ["trainer.compile.scope=model", "trainer.num_threads=1", "optimizer.fused=false"]
    config = with_values(config_of(typed), {"parallel.mode": "ddp"})
    facts = SearchFacts(config, World(tmp_path, flat).start(config, 0.0).info, 2, 0.01, 0.009, 1e9)
    offered = []
    for option in OPTIONS:
        for setting in () if option.skip(facts) else option.settings(facts):
            with suppress(ConfigError):  # the search says why
                offered.append(config_of(replaced(typed, setting.overrides)))
    for cause in CAUSES:
        for remedy in REMEDIES.get(cause, ()):
            if not remedy.changes:
                assert config_of(replaced(typed, remedy.overrides)) in offered, f"{cause}: {remedy}"


def test_recorded_steps_are_tried_on_a_gpu_and_give_way_to_a_faster_compiled_model(tmp_path: Path) -> None:
    def speed(config: RunConfig) -> float:
        if config.trainer.cuda_graphs:
            return 2000.0
        return 4000.0 if config.trainer.compile.scope == "model" else 1000.0

    graphs, compiled = GRAPHS_FIRST[:1], GRAPHS_FIRST
    assert searched(World(tmp_path, speed, device="cuda:0"), options=graphs).found == (GRAPHS,)
    both = searched(World(tmp_path, speed, device="cuda:0"), options=compiled)
    assert trial_of(both, GRAPHS).state == KEPT
    assert both.found == ("trainer.compile.scope=model", "trainer.cuda_graphs=false")
    fails = World(tmp_path, lambda config: 0.0 if config.trainer.cuda_graphs else 1000.0, device="cuda:0")
    assert trial_of(searched(fails, options=graphs), GRAPHS).state == REJECTED
    on_cpu = searched(World(tmp_path, speed), options=graphs)
    assert "CUDA graphs: CUDA graphs: does not apply, only a CUDA device has them" in search_lines(
        on_cpu, True
    )


@pytest.mark.parametrize(
    "word",
    [
        "precision=16-mixed",
        "parallel=ddp",
        "trainer.compile.scope=model",
    ],
)
def test_recorded_steps_are_not_tried_where_they_are_refused(word: str, tmp_path: Path) -> None:
    info = World(tmp_path, flat, device="cuda:0").start(config_of([]), 0.0).info
    facts = SearchFacts(config_of([word]), info, 2, 0.01, 0.001, 100.0)
    assert skip_graphs(facts) == f"does not go with {word}"


def test_time_that_is_short_is_kept(tmp_path: Path) -> None:
    world = World(tmp_path, known, start_seconds=4.0)
    results = searched(world, budget=30.0)
    assert world.now <= 1.1 * 30
    assert "no time left for it" in {trial.reason for trial in results.trials}


TECHNIQUES = (
    Technique("one thread", lambda facts: ("trainer.num_threads=1",)),
    Technique("two threads", lambda facts: ("trainer.num_threads=2",)),
    Technique("fp32", lambda facts: ("precision=32-true",), ("precision=bf16-mixed",), NUMERIC),
    Technique("last", lambda facts: ("trainer.channels_last=true",)),
    Technique("large", lambda facts: ("data.batch_size=128",), gate=OTHER),
    Technique("gpu", lambda facts: (), skip=lambda facts: "needs a GPU"),
)


def test_techniques_alone_and_together(tmp_path: Path) -> None:
    def speed(config: RunConfig) -> float:
        large = 2.0 if config.data.batch_size == 128 else 1.0
        return known(config) * large

    world = World(tmp_path, speed, noise=0.01)
    table = measure_table(new_search(world, SHOWN, 300.0), TECHNIQUES)
    rows: dict[str, Row] = {row.title: row for row in table.rows}
    assert rows["one thread"].alone.value == pytest.approx(1.3, rel=0.05)
    assert rows["one thread"].kept
    assert rows["two threads"].reason == "on already"
    assert rows["fp32"].on
    assert rows["fp32"].alone.value == pytest.approx(1 / 0.8, rel=0.05)  # measured by taking it away
    assert rows["large"].alone.value == pytest.approx(2.0, rel=0.05)
    assert not rows["large"].kept  # another training
    assert rows["gpu"].reason == "needs a GPU"
    assert rows["last"].together.value == pytest.approx(1.05, rel=0.05)
    assert table.results.claim.low <= 1.3 * 1.05 <= table.results.claim.high
    assert world.now <= 1.1 * 300
    text = "\n".join(table_lines(table))
    assert "needs a GPU" in text
    assert "total of all that leaves the training the same and helped: " in text
