"""Racers from files and words, the differences between two of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from approved import refused

from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError
from trainrun.race.race_command import choose_variations, read_goal
from trainrun.race.racers import parse_racer, read_racers, variations

FILE = """
defaults:
  - override /precision: bf16-mixed
  - /scheduler/cosine
data: {batch_size: 16}
optimizer.lr: 1e-3
run_name: null
trainer.ema.enabled: true
"""


def test_a_file_is_read_as_settings(workdir: Path):
    (workdir / "fast.yaml").write_text(FILE)
    first, second = read_racers(["fast.yaml", "lr=0.5"], ["data=digits", "lr=0.25"])
    config = compose_run(list(first.words)).config
    assert (config.precision.mode, config.data.batch_size, config.trainer.ema.enabled) == (
        "bf16-mixed", 16, True,
    )  # fmt: skip
    assert config.optimizer is not None
    assert config.optimizer["lr"] == 0.001
    assert config.scheduler is not None
    assert config.scheduler["_target_"].endswith("cosine")
    other = compose_run(list(second.words)).config
    assert other.optimizer is not None
    assert other.optimizer["lr"] == 0.5


def test_a_group_of_a_racer_leaves_the_settings_of_all():
    """Another optimizer of one racer still has the rate that all have."""
    first, second = read_racers(["optimizer=sgd", "optimizer=adam lr=0.5"], ["lr=0.25", "optimizer=adamw"])
    rates = []
    for racer in (first, second):
        node = compose_run(list(racer.words)).config.optimizer
        assert node is not None
        rates.append((node["_target_"].rpartition(".")[2], node["lr"]))
    assert rates == [("SGD", 0.25), ("Adam", 0.5)]


def test_quoted_words_are_split_as_a_shell_does():
    assert parse_racer("model=mlp run_name='two words'") == ["model=mlp", "run_name=two words"]


def test_differences_between_presets():
    """Sections that only make sense together are one difference; the rest of the config is equal both ways."""
    second = "data.batch_size=256 precision=auto monitor=fast scheduler.lr_scaling=sqrt scheduler.base_batch_size=32"
    racers = read_racers(["preset=none", second], [])
    changes = variations(*racers)
    about = [change.about for change in changes]
    assert "data.batch_size=256" in about
    assert "monitor=fast" in about
    assert "scheduler.lr_scaling=sqrt scheduler.base_batch_size=32" in about
    for change in changes:
        assert change.alone is not None
        assert change.left_out is not None
        alone = compose_run(list(change.alone.words)).config
        without = compose_run(list(change.left_out.words)).config
        if change.about == "data.batch_size=256":
            assert (alone.data.batch_size, without.data.batch_size) == (256, 32)
            assert alone.precision.mode == "32-true"
            assert without.precision.mode == "auto"


def test_an_option_is_named_with_what_differs_from_it():
    changes = variations(*read_racers(["model=mlp", "model=cnn optimizer=sgd optimizer.momentum=0.8"], []))
    assert [change.about for change in changes] == ["model=cnn", "optimizer=sgd optimizer.momentum=0.8"]


def test_a_difference_that_is_refused_alone():
    """A warm-up is refused without a schedule that ends behind it."""
    first = "trainer.max_steps=10"
    second = "trainer.max_steps=100 scheduler=warmup_cosine scheduler.warmup_steps=50"
    changes = {change.about: change for change in variations(*read_racers([first, second], []))}
    refused_alone = [about for about, change in changes.items() if change.alone is None]
    assert len(refused_alone) == 1
    assert "warmup_steps" in refused_alone[0]


@pytest.mark.parametrize(
    "words",
    [
        ["lr=0.1"],
        ["missing.yaml", "lr=0.1"],
        ["list.yaml", "lr=0.1"],
        ["lr=0.1", "modle=cnn"],
        ["lr=0.1", "seed=3"],
        ["lr=0.1", "output_dir=here"],
        ["lr=0.1", "loop=my.Loop"],
        ["lr=0.1", "run_name='open"],
        ["lr=0.1", "lr=-1"],
        ["lr=0.1", "lr=0.2", "--seeds", "0"],
        ["lr=0.1", "lr=0.2", "--every", "0"],
        ["lr=0.1", "lr=0.2", "--margin", "nan"],
        ["lr=0.1", "lr=0.2", "--until", "acc=0.9"],
        ["lr=0.1", "lr=0.2", "--until", "test/acc=0.9"],
        ["lr=0.1", "lr=0.2", "--until", "val/acc=high"],
        ["lr=0.1", "lr=0.2", "--until", "val/acc=nan"],
        ["lr=0.1", "lr=0.2", "--until", "val/mine=1"],
        ["lr=0.1", "lr=0.1", "--table"],
        ["lr=0.1", "lr=0.2", "lr=0.3", "--table"],
        ["lr=0.1", "data=synthetic data.val=null"],
        ["lr=0.1", "data.train.val_fraction=0.3"],
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    workdir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
):
    (workdir / "list.yaml").write_text("- lr: 0.1\n")
    assert main(["race", *words, "--out", "here"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("trainrun: ")
    assert not (workdir / "here").exists()


def test_texts_of_mistakes():
    with refused(ConfigError, "seed"):
        read_racers(["lr=0.1", "seed=3"], [])
    with refused(ConfigError, "--until"):
        read_goal("acc=0.9", None)
    with refused(ConfigError, "--table"):
        choose_variations(read_racers(["lr=0.1", "lr=0.1"], []))


@pytest.mark.parametrize(
    ("text", "mode", "direction", "value"),
    [
        ("val/acc=0.91", None, "max", 0.91),
        ("val/loss = 1e-1", None, "min", 0.1),
        ("val/loss", None, "min", None),
        ("val/mine>=2", None, "max", 2.0),
        ("val/day/mine<=2", None, "min", 2.0),
        ("val/mine=2", "min", "min", 2.0),
    ],
)
def test_a_target(text: str, mode: str | None, direction: str, value: float | None):
    goal = read_goal(text, mode)
    assert (goal.mode, goal.value) == (direction, value)
