"""The search in worlds whose best setting is known: found where there is one, and not where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from lab_worlds import World

from trainrun.config import RunConfig
from trainrun.errors import ConfigError
from trainrun.lab.confirm import verdict_of
from trainrun.lab.evidence import NEEDLESS, NOISE, REJECTED, UNPAID, UNTRIED, Outcome, Trial
from trainrun.lab.journal import NAME, Journal, read_rows, unfinished
from trainrun.lab.knobs import KNOBS, Knob, Wish
from trainrun.lab.look import measure_for, refuse_too_short, seconds_to_compare
from trainrun.lab.statistics import Ratio
from trainrun.lab.tuner import Tuner

WORDS = ["seed=1", "trainer.num_threads=2"]


def flat(config: RunConfig) -> float:
    return 1000.0


def known(config: RunConfig) -> float:
    """bf16 pays with channels-last only; one thread is better than two."""
    speed = 1000.0
    bf16, last = config.precision.mode == "bf16-mixed", config.trainer.channels_last
    speed *= {(True, True): 2.0, (True, False): 0.8, (False, True): 1.05, (False, False): 1.0}[bf16, last]
    return speed * (1.3 if config.trainer.num_threads == 1 else 1.0)


FEW = tuple(knob for knob in KNOBS if knob.name in ("threads", "numbers"))
COMPILE_ONLY = tuple(knob for knob in KNOBS if knob.name == "compile")


def tuned(world: World, allow: str = "numeric", budget: float = 120.0, journal: Journal | None = None,
          knobs: Sequence[Knob] = FEW) -> Outcome:  # fmt: skip
    wish = Wish(allow, budget, 2, knobs)
    return Tuner(WORDS, world, wish, journal or Journal(None), lambda about, left: None).run()


def state_of(outcome: Outcome, word: str) -> str:
    return next(trial.state for trial in outcome.trials if word in trial.words)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_best_is_found_and_claimed_at_its_size(tmp_path: Path, noise: float) -> None:
    world = World(tmp_path, known, noise=noise, drift=0.2)
    outcome = tuned(world)
    expected = {"precision=bf16-mixed", "trainer.channels_last=true", "trainer.num_threads=1"}
    assert expected <= set(outcome.words)
    assert outcome.claim is not None
    assert outcome.claim.low * (1 - 1e-9) <= 2.0 * 1.3 <= outcome.claim.high * (1 + 1e-9)
    assert world.now <= 1.1 * 120


def test_an_exact_setting_on_top_of_one_that_rounds_more(tmp_path: Path) -> None:
    outcome = tuned(World(tmp_path, known), knobs=FEW[::-1])
    assert {"precision=bf16-mixed", "trainer.num_threads=1"} <= set(outcome.words)


def test_only_what_is_allowed_is_tried(tmp_path: Path) -> None:
    world = World(tmp_path, known)
    outcome = tuned(world, allow="exact")
    assert {config.precision.mode for config in world.started} == {"32-true"}
    assert "trainer.num_threads=1" in outcome.words
    assert state_of(outcome, "precision=bf16-mixed") == REJECTED
    with pytest.raises(ConfigError, match="--allow all: must be one of exact, numeric"):
        tuned(world, allow="all")


def test_another_training_is_not_let_in_however_fast(tmp_path: Path) -> None:
    world = World(tmp_path, known, wrong=lambda config: config.trainer.num_threads == 1)
    outcome = tuned(world)
    assert "trainer.num_threads=1" not in outcome.words
    trial = next(trial for trial in outcome.trials if trial.words == ("trainer.num_threads=1",))
    assert (trial.state, trial.cosine) == (REJECTED, -1.0)


def test_what_cannot_start_is_told_and_the_search_goes_on(tmp_path: Path) -> None:
    outcome = tuned(World(tmp_path, lambda config: known(config) if config.trainer.num_threads == 2 else 0.0))
    trial = next(trial for trial in outcome.trials if trial.words == ("trainer.num_threads=1",))
    assert (trial.state, trial.reason) == (REJECTED, "it fell over")
    assert "precision=bf16-mixed" in outcome.words


def test_no_gain_is_claimed_where_there_is_none(tmp_path: Path) -> None:
    """Noise of 10 to 30 % in every turn, processes that differ by up to two percent, and a machine that drifts."""
    claims = 0
    for seed in range(40):
        noise, twist = 0.1 + 0.2 * (seed % 3) / 2, 0.005 if seed % 2 else 0.02
        world = World(tmp_path, flat, noise=noise, twist=twist, drift=0.3, seed=seed)
        outcome = tuned(world, budget=60.0)
        assert world.now <= 1.1 * 60
        claims += outcome.claimed
    assert claims <= 2


def test_never_slower_than_the_users_own_words(tmp_path: Path) -> None:
    """Every setting but the user's is worse, by little or much."""

    def worse(config: RunConfig) -> float:
        changed = config.precision.mode != "32-true" or config.trainer.channels_last
        return 1000.0 * (0.97 if changed else 1.0) * (0.6 if config.trainer.num_threads == 1 else 1.0)

    claimed = [tuned(World(tmp_path, worse, noise=0.2, seed=seed), budget=60.0).claimed for seed in range(10)]
    assert not any(claimed)


def test_what_is_not_missed_is_left_out(tmp_path: Path) -> None:
    """Fewer threads help in 32 bits, and not with bfloat16 any more: found first, they go at the end."""

    def speed(config: RunConfig) -> float:
        if config.precision.mode == "bf16-mixed":
            return 3000.0
        return 1300.0 if config.trainer.num_threads == 1 else 1000.0

    outcome = tuned(World(tmp_path, speed), knobs=FEW[::-1])
    assert outcome.words == ("precision=bf16-mixed",)
    assert state_of(outcome, "trainer.num_threads=1") == NOISE


def test_compiling_must_pay_for_itself(tmp_path: Path) -> None:
    def speed(config: RunConfig) -> float:
        return 1000.0 * (1.5 if config.trainer.compile.scope != "off" else 1.0)

    long_run = tuned(World(tmp_path, speed, total_steps=10**6), knobs=COMPILE_ONLY)
    assert any(word.startswith("trainer.compile.scope=") for word in long_run.words)
    short_run = tuned(World(tmp_path, speed, total_steps=100), knobs=COMPILE_ONLY)
    assert {trial.state for trial in short_run.trials if trial.knob == "compile"} == {NEEDLESS}

    class Slow(World):
        def start(self, config: RunConfig, limit: float):
            self.now += 15.0 if config.trainer.compile.scope != "off" else 0.0
            return super().start(config, limit)

    slow = Slow(tmp_path, speed, total_steps=1000)  # 30 s of training, of which 10 s would be saved
    outcome = tuned(slow, budget=300.0, knobs=COMPILE_ONLY)
    assert UNPAID in {trial.state for trial in outcome.trials if trial.knob == "compile"}
    assert not outcome.claimed


def test_time_that_is_short_is_kept(tmp_path: Path) -> None:
    world = World(tmp_path, known, start_seconds=4.0)
    outcome = tuned(world, budget=30.0)
    assert world.now <= 1.1 * 30
    assert "no time left for it" in {trial.reason for trial in outcome.trials}


def test_a_budget_in_which_nothing_can_be_compared_is_refused() -> None:
    needed = seconds_to_compare(1.0, 1.5, 1, measure_for(30.0))
    assert 50 < needed < seconds_to_compare(1.0, 1.5, 3, measure_for(30.0)) < 110
    with pytest.raises(
        ConfigError, match=r"--budget 30: a step of this run takes 1.5 s, .* --budget \d+0 at least"
    ):
        refuse_too_short(30.0, needed, 1.5)
    refuse_too_short(1.7 * needed, needed, 1.5)
    refuse_too_short(30.0, needed, 0.1)  # a hundred steps a turn: some will fit in


def test_the_best_is_told_only_of_what_was_tried(tmp_path: Path) -> None:
    calm = tuned(World(tmp_path, flat))
    assert calm.verdict.startswith("your configuration is the best that was found: of ")
    assert "not tried" not in calm.verdict
    hasty = tuned(World(tmp_path, flat, start_seconds=4.0), budget=40.0)
    untried = sum(trial.state == UNTRIED for trial in hasty.trials)
    assert untried >= sum(trial.ratio is not None for trial in hasty.trials)
    assert "is the best" not in hasty.verdict
    assert hasty.verdict.endswith(f"; not tried, for want of time: {untried} settings (--budget)")


def test_a_killed_search_goes_on_where_it_was(tmp_path: Path) -> None:
    class Dies(World):
        def start(self, config: RunConfig, limit: float):
            if len(self.started) > 8:
                raise KeyboardInterrupt
            return super().start(config, limit)

    path = tmp_path / "one" / NAME
    asked = {"words": WORDS}
    journal = Journal(path, asked=asked)
    with pytest.raises(KeyboardInterrupt):
        tuned(Dies(tmp_path, known), journal=journal)
    assert unfinished([tmp_path / "one"], asked) == path
    assert unfinished([tmp_path / "one"], {"words": []}) is None
    rows = read_rows(path)
    before = [row["knob"] for row in rows if row["kind"] == "stage"]
    assert "threads" in before
    world = World(tmp_path, known)
    outcome = tuned(world, journal=Journal(path, rows))
    assert "trainer.num_threads=1" in outcome.words
    threads = [row for row in read_rows(path) if row["kind"] == "stage" and row["knob"] == "threads"]
    assert len([row for row in threads if row["visit"] == 0]) == 1
    assert unfinished([tmp_path / "one"], asked) is None


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / NAME
    assert read_rows(path) == []
    Journal(path, asked={}).write("look")
    with path.open("a") as file:
        file.write('{"kind": "sta')
    assert [row["kind"] for row in read_rows(path)] == ["begin", "look"]
    Journal(path, read_rows(path)).write("stage")  # of the next life
    assert [row["kind"] for row in read_rows(path)] == ["begin", "look", "stage"]


def test_processes_do_not_pile_up(tmp_path: Path) -> None:
    world = World(tmp_path, known)
    tuned(world)
    assert world.most_alive <= 12
    assert world.alive <= 1  # the bench closes the last one


def test_every_kept_knob_has_its_evidence(tmp_path: Path) -> None:
    outcome = tuned(World(tmp_path, known, total_steps=100))
    threads = next(rung for rung in outcome.rungs if rung.words == ("trainer.num_threads=1",))
    last = next(rung for rung in outcome.rungs if rung.words == ("trainer.channels_last=true",))
    assert threads.first_in is not None
    assert threads.first_in.value == pytest.approx(1.3)
    assert last.first_in is not None
    assert last.first_in.value == pytest.approx(1.05)
    assert last.last_out is not None
    assert last.last_out.value == pytest.approx(2.5)


@pytest.mark.parametrize(("claim", "said"), [
    (Ratio(1.5, 1.4, 1.6, 24), "1.50x the speed of your own words"),
    (Ratio(1.01, 1.005, 1.02, 24), "as good as the best"),
    (Ratio(1.02, 0.99, 1.04, 24), "which holds 1.00"),
    (Ratio(0.97, 0.94, 0.99, 24), "what seemed faster is slower in fresh processes, 0.97x"),
    (None, "nothing is claimed"),
])  # fmt: skip
def test_what_is_said_of_a_champion(claim: Ratio | None, said: str) -> None:
    champion = Trial("champion", ("optimizer.fused=true",), ratio=Ratio(1.1, 1.0, 1.2, 9))
    assert said in verdict_of(claim, champion, [champion], 0.02)
