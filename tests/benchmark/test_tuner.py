"""The search in worlds whose costs are known: it finds the remedy of what is planted, and nothing where nothing is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from approved import refused
from benchmark_worlds import OFTEN, SETTINGS, Costs, World

from trainrun.benchmark.budget import Budget
from trainrun.benchmark.remedies import EXACT, NUMERIC, TRAINING, Remedy
from trainrun.benchmark.run_overrides import compose_config, replace_overrides
from trainrun.benchmark.tune.autotune_session import convert_to_json_values, table_lines, tuning_lines
from trainrun.benchmark.tune.techniques import Row, Technique, measure_table
from trainrun.benchmark.tune.tuner import NO_TIME, NO_TIME_TO_CONFIRM, Trial, Tuner, Tuning
from trainrun.benchmark.worker_process import WorkerFailed
from trainrun.comparison.paired import Ratio

FAST = Costs(fp32=0.5)  # bfloat16, which SETTINGS have, is twice as fast as 32 bits
SLOW_READING = replace(FAST, read=2.7e-3)  # 12 times the rest of a step


def new_tuner(world: World, *words: str, allowed: str = EXACT, budget: float = 120.0) -> Tuner:
    overrides = replace_overrides(SETTINGS, words)
    return Tuner(world, overrides, Budget(budget, world.clock), lambda about, left: None, allowed)


def tuned(world: World, *words: str, allowed: str = EXACT, budget: float = 120.0) -> Tuning:
    tuning = new_tuner(world, *words, allowed=allowed, budget=budget).run()
    assert world.alive == 0
    return tuning


def trial_of(tuning: Tuning, setting: str) -> Trial:
    return next(trial for trial in tuning.trials if str(trial.remedy) == setting)


def true_gain(world: World, tuning: Tuning, *words: str) -> float:
    """How much faster an item is with what was found."""
    seconds = []
    for overrides in (
        replace_overrides(SETTINGS, words),
        replace_overrides([*SETTINGS, *words], tuning.best_settings),
    ):
        run = World(world.costs).start(compose_config(overrides))
        phases = run.seconds_of_step(["validating", "saving"])
        stall = world.costs.stall / 64 if phases["data"] else 0.0
        seconds.append(sum(phases.values()) / run.batch + stall)
    return seconds[0] / seconds[1]


FUSED = "optimizer.fused=null optimizer.foreach=null"
SLOW_DISK = replace(FAST, fixed=0.03, item=1e-4, stall=0.1)  # 1.3 stalls in a turn of the usual length
PLANTED = {
    "slow items": (SLOW_READING, (), "data.cache=memory", EXACT),
    "slow disk": (SLOW_DISK, ("data.batch_size=16",), "data.cache=memory", EXACT),
    "one thread": (replace(FAST, threads=0.6), (), "trainer.num_threads=2", EXACT),
    "checkpoints": (replace(FAST, save=0.05), OFTEN, "checkpoint.async_save=true", EXACT),
    "slow update": (replace(FAST, update=0.01), ("optimizer.fused=false",), FUSED, EXACT),
    "padding": (replace(FAST, bucket=0.4), (), "data.padding=bucket", TRAINING),
    "slow logger": (replace(FAST, log=0.01), (), "monitor.log_every_n_steps=500", TRAINING),
    "tiny batch": (FAST, ("data.batch_size=1",), "data.batch_size=8", TRAINING),
    "tiny batch, slow machine": (
        replace(FAST, fixed=0.05),
        ("data.batch_size=1",),
        "data.batch_size=8",
        TRAINING,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_ends_with_its_remedy_and_the_gain_it_has(name: str) -> None:
    costs, words, setting, effect = PLANTED[name]
    world = World(costs, noise=0.03, twist=0.01, drift=0.2)
    tuning = tuned(world, *words, allowed=effect)
    assert trial_of(tuning, setting).is_used
    assert tuning.claim is not None
    assert tuning.claim.low <= true_gain(world, tuning, *words) <= tuning.claim.high
    assert world.now <= 1.1 * 120


def test_slow_items_are_thirteen_times_faster_from_memory() -> None:
    tuning = tuned(World(SLOW_READING, noise=0.02))
    assert tuning.best_settings == ("data.cache=memory",)
    assert tuning.claim is not None
    assert tuning.claim.value == pytest.approx(12.2, rel=0.05)
    assert "the speed of your settings" in tuning_lines(tuning)[-1]


@pytest.mark.parametrize("seed", range(4))
def test_rare_stalls_of_reading_are_found_whichever_turns_they_fall_into(seed: int) -> None:
    world = World(SLOW_DISK, 0.03, seed, 0.01, 0.2)
    tuning = tuned(world, "data.batch_size=16", budget=240.0)
    assert tuning.best_settings == ("data.cache=memory",)
    assert tuning.claim is not None
    assert tuning.claim.low <= true_gain(world, tuning, "data.batch_size=16") <= tuning.claim.high


def test_several_faults_are_mended_one_after_the_other() -> None:
    costs = replace(FAST, read=5e-4, threads=0.6, save=0.05)
    tuning = tuned(World(costs, noise=0.01), *OFTEN, budget=300.0)
    assert set(tuning.best_settings) == {
        "data.cache=memory",
        "trainer.num_threads=2",
        "checkpoint.async_save=true",
    }
    assert len(tuning.diagnoses) == 4
    assert tuning.last_diagnosis.startswith("healthy")


@pytest.mark.parametrize("name", ["padding", "slow logger", "tiny batch"])
def test_remedy_that_changes_the_training_is_measured_but_used_only_if_allowed(name: str) -> None:
    costs, words, setting, _ = PLANTED[name]
    tuning = tuned(World(costs, noise=0.02), *words)
    assert tuning.best_settings == ()
    trial = trial_of(tuning, setting)
    assert trial.is_faster
    assert trial.reason == "--allow training"
    (line,) = [
        line for line in tuning_lines(tuning) if line.startswith("your decision: ") and setting in line
    ]
    assert ", but changes " in line


def test_number_types_are_tried_only_if_rounding_is_allowed() -> None:
    world = World(Costs(fp32=0.5), noise=0.02)
    assert tuned(world, "precision=32-true").best_settings == ()
    assert {config.precision.mode for config in world.started} == {"32-true"}
    assert tuned(World(FAST), "precision=32-true", allowed=NUMERIC).best_settings == (
        "precision.mode=bf16-mixed",
    )
    emulated = World(Costs(fp32=2.0))
    assert tuned(emulated, "precision=bf16-mixed", allowed=NUMERIC).best_settings == (
        "precision.mode=32-true",
    )


def test_nothing_is_claimed_where_nothing_is_to_be_found() -> None:
    """Noise of 2 to 10 % in every turn, processes that differ by up to five per cent, a machine that drifts."""
    claims = [
        tuned(
            World(FAST, 0.02 + 0.04 * (seed % 3), seed, 0.05 if seed % 2 else 0.01, 0.3), allowed=TRAINING
        ).best_settings
        for seed in range(20)
    ]
    assert claims == [()] * 20


@pytest.mark.parametrize("spread", [0.01, 0.02, 0.05])
def test_claim_holds_the_truth_however_much_processes_differ(spread: float) -> None:
    """99 % is claimed; of 60 claims at most 3 may miss (the chance of more is 0.3 %, if one in a hundred does)."""
    missed = 0
    for seed in range(60):
        world = World(replace(FAST, threads=0.6), 0.02, seed, spread, 0.2)
        tuner = new_tuner(world, budget=60.0)
        tuner.start_base()
        claim = tuner.confirm(["trainer.num_threads=2"])
        assert claim is not None
        truth = true_gain(world, Tuning((), "", 0.0, (), (), None, "", 0.0), "trainer.num_threads=1")
        assert truth == 1.0
        computing, rest = 0.0148, 0.0005 + 64 * 2e-6 + 1e-5 + 0.01 / 450
        truth = (computing + rest) / (0.6 * computing + rest)
        missed += not claim.low <= truth <= claim.high
    assert missed <= 3


@pytest.mark.parametrize(
    ("fill", "total_steps", "found"),
    [(20.0, 10**6, True), (20.0, 100, False), (200.0, 10**6, False)],
)
def test_cache_must_be_filled_in_time_and_pay_for_itself(fill: float, total_steps: int, found: bool) -> None:
    tuning = tuned(World(replace(SLOW_READING, fill=fill), total_steps=total_steps), budget=240.0)
    assert ("data.cache=memory" in tuning.best_settings) is found
    assert trial_of(tuning, "data.cache=memory").is_used is found
    assert trial_of(tuning, "data.engine=workers data.num_workers=auto").ratio is not None


def test_remedy_that_cannot_start_is_named_and_the_search_goes_on() -> None:
    costs = replace(FAST, read=5e-4, threads=0.6)
    tuning = tuned(World(costs, noise=0.01, fails="cache='memory'"))
    assert trial_of(tuning, "data.cache=memory").reason == "it fell over"
    assert tuning.best_settings == ("trainer.num_threads=2",)


def test_remedy_that_does_not_start_leaves_time_for_other_causes() -> None:
    tuning = tuned(World(replace(FAST, read=5e-4, threads=0.6, fill=1000.0), noise=0.01))
    assert trial_of(tuning, "data.cache=memory").ratio is None
    assert tuning.best_settings == ("trainer.num_threads=2",)


def test_settings_that_cannot_start_are_refused() -> None:
    with refused(WorkerFailed):
        tuned(World(FAST, fails="num_threads=1"))


@pytest.mark.parametrize(
    ("budget", "remedy"), [(100.0, "data.engine=workers data.num_workers=4"), (300.0, "data.cache=memory")]
)
def test_remedy_that_starts_too_slowly_to_be_confirmed_gives_way_to_another(
    budget: float, remedy: str
) -> None:
    tuning = tuned(World(replace(SLOW_DISK, fill=20.0), 0.02), "data.batch_size=16", budget=budget)
    assert " ".join(tuning.best_settings) == remedy
    cache = trial_of(tuning, "data.cache=memory")
    assert cache.ratio is not None
    assert (cache.reason == NO_TIME_TO_CONFIRM) is (budget == 100.0)


def test_diagnosis_of_earlier_settings_is_not_shown_for_the_best_ones() -> None:
    """The second change ends the search, because there is no time for a third diagnosis."""
    world = World(replace(FAST, read=5e-4, threads=0.6, fill=5.0), noise=0.02)
    tuning = tuned(world, budget=70.0)
    assert sum(trial.is_used for trial in tuning.trials) == len(tuning.diagnoses) == 2
    assert tuning.last_diagnosis == ""
    assert "of the settings that are used" not in "\n".join(tuning_lines(tuning))


def test_remedy_that_is_faster_but_not_the_fastest_is_not_called_unclear() -> None:
    """Of the three turns before it is dropped, the interval contains 1."""
    tuner = new_tuner(World(FAST))
    slower, best = (
        Trial("", 2.0, Remedy((f"seed={n}",)), Ratio(v, low, 3.0, 3))
        for n, v, low in ((1, 1.8, 0.98), (2, 2.1, 1.9))
    )
    assert tuner._reason_against(replace(slower, reason=""), best) == "slower than seed=2"
    assert tuner._reason_against(replace(slower, reason=""), None) == "no clear gain"


def test_nothing_is_claimed_without_time_for_fresh_processes() -> None:
    class SlowToConfirm(World):
        def start(self, config, limit=1e9):
            self.now += 20.0 if len(self.started) > 3 else 0.0
            return super().start(config, limit)

    tuning = tuned(SlowToConfirm(replace(FAST, threads=0.6), noise=0.01))
    assert tuning.claim is None
    assert trial_of(tuning, "trainer.num_threads=2").is_used
    assert tuning.best_settings == ()
    assert tuning.problem


@pytest.mark.parametrize("fill", [10.0, 14.0])
def test_claim_that_was_begun_is_finished_a_little_after_the_budget(fill: float) -> None:
    world = World(replace(SLOW_READING, fill=fill), noise=0.02)
    tuning = tuned(world, budget=80.0)
    assert tuning.best_settings == ("data.cache=memory",)
    assert world.now <= 1.2 * 80


@pytest.mark.parametrize("budget", [6.0, 16.0, 30.0])
def test_time_that_is_short_is_kept(budget: float) -> None:
    """Remedies that there is no time for are named, and so is a gain that could not be confirmed."""
    world = World(replace(SLOW_READING, threads=0.6, fill=3.0), noise=0.02)
    tuning = tuned(world, budget=budget)
    assert world.now <= 1.3 * budget
    late = [trial for trial in tuning.trials if trial.reason == NO_TIME]
    assert tuning.best_settings or tuning.problem or late or tuning.diagnoses[0].startswith("unclear")


TECHNIQUES = (
    Technique("two threads", lambda config: ("trainer.num_threads=2",)),
    Technique("one thread", lambda config: ("trainer.num_threads=1",)),
    Technique("bf16", lambda config: ("precision.mode=bf16-mixed",), ("precision.mode=32-true",), NUMERIC),
    Technique("cache", lambda config: ("data.cache=memory",)),
    Technique("large", lambda config: ("data.batch_size=256",), (), TRAINING, "the batch of a step"),
    Technique("gpu", lambda config: (), skip=lambda config, info: "needs a GPU"),
)


def test_shorter_samples_are_compared_by_steps() -> None:
    """Half as many positions in half of the time."""
    half = Technique("half the length", lambda config: ("data.max_sequence_length=8",))
    (row,) = measure_table(new_tuner(World(Costs(read=0.0, update=0.0, log=0.0, validate=0.0))), [half]).rows
    assert row.speedup_alone is not None
    assert row.speedup_alone.value == pytest.approx(2.0, rel=0.05)


def test_techniques_alone_and_together() -> None:
    costs = replace(Costs(fixed=0.05, read=2e-4, validate=0.0, log=0.0, fp32=0.5), threads=0.6)
    world = World(costs, noise=0.01)
    table = measure_table(new_tuner(world, budget=300.0), TECHNIQUES)
    rows: dict[str, Row] = {row.trial.cause: row for row in table.rows}
    assert world.alive == 0
    computing, rest = 0.0628, 0.0005 + 64 * 2e-4
    alone = {title: row.speedup_alone.value for title, row in rows.items() if row.speedup_alone is not None}
    assert alone["two threads"] == pytest.approx((computing + rest) / (0.6 * computing + rest), rel=0.03)
    assert alone["cache"] == pytest.approx((computing + rest) / (computing + 0.0005), rel=0.03)
    assert rows["bf16"].is_on  # it was measured by taking it away
    assert alone["bf16"] == pytest.approx((2 * computing + rest) / (computing + rest), rel=0.03)
    assert rows["one thread"].trial.reason == "on already"
    assert rows["gpu"].trial.reason == "needs a GPU"
    assert alone["large"] > 1.3
    assert set(table.found) == {
        "trainer.num_threads=2",
        "data.cache=memory",
    }  # large is another training
    assert table.claim is not None
    together = (computing + rest) / (0.6 * computing + 0.0005)
    assert table.claim.low <= together <= table.claim.high
    assert "needs a GPU" in "\n".join(table_lines(table))
    assert convert_to_json_values(table)["claim"]["low"] == table.claim.low
