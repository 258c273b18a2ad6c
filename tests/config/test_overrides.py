"""All faults at once, from one composition; and what Hydra itself says, in our words."""

from __future__ import annotations

from pathlib import Path

import pytest
from approved import approve, refused
from things import faults_of

from trainrun.config import overrides
from trainrun.config.compose import compose_run, format_config
from trainrun.config.saved_config import load_config
from trainrun.errors import ConfigError


def test_one_composition_finds_faults_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compose = overrides._compose_with_hydra
    monkeypatch.setattr(overrides, "_compose_with_hydra", lambda *given: calls.append(1) or compose(*given))
    faults = faults_of(
        "run_name=a(b", "trainer.channels_last=maybe", "seed=1,2", "model=cnnn", "optimizer.lrr=1",
        "trainer.max_epochs=abc", "~trainer.max_steps", "data.batch_size=0",
    )  # fmt: skip
    assert [fault.partition(":")[0] for fault in faults] == [
        "trainer.channels_last=maybe", "run_name=a(b", "seed=1,2", "model=cnnn", "optimizer.lrr=1",
        "trainer.max_epochs=abc", "~trainer.max_steps", "data.batch_size=0",
    ]  # fmt: skip
    assert len(calls) == 1


def test_a_plus_in_front_of_what_is_there_already_changes_nothing() -> None:
    config = compose_run(
        ["+model=cnn", "++optimizer.lr=0.5", "+trainer.max_epochs=3", "~model.dropout"]
    ).config
    assert (config.optimizer["lr"], config.trainer.max_epochs) == (0.5, 3)
    assert config.model["_target_"] == "trainrun.model.cnn.Cnn"
    assert "dropout" not in config.model


@pytest.mark.parametrize(
    "text",
    [
        "# @package _global_\ntrainr:\n  max_epochs: 1\n",
        "# @package _global_\ntrainer:\n  max_epoch: 1\n",
        "# @package _global_\ntrainer:\n  max_epochs: x\n",
        "trainer:\n  max_epochs: 1\n",
        "# @package _global_\ntrainer: {ema: true}\n",
        "# @package _global_\ngradient_accumulation_steps: 3\n",
    ],
)
def test_a_fault_in_a_recipe_names_its_file_and_hides_no_other(text: str, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_run(["experiment=mine", "optimizer.lrr=1"], tmp_path)
    approve(caught.value.faults[0])
    assert caught.value.faults[1:] == ("optimizer.lrr=1: no such setting. Did you mean optimizer.lr?",)


def test_a_time_that_yaml_reads_as_another_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    recipe = tmp_path / "conf" / "experiment" / "mine.yaml"
    recipe.write_text("# @package _global_\ntrainer:\n  max_time: 1:12:00:00\n")
    with refused(ConfigError):
        compose_run(["experiment=mine"], tmp_path)
    for text in ("'1:12:00:00'", "00:12:00:00"):  # the second is text by itself
        recipe.write_text(f"# @package _global_\ntrainer:\n  max_time: {text}\n")
        assert compose_run(["experiment=mine"], tmp_path).config.trainer.max_time == text.strip("'")


def test_the_lock_of_an_editor_is_no_file_of_configs(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    for name in ("experiment/.#mine.yaml", "experiment/old.yaml", ".#mine.yaml"):
        (tmp_path / "conf" / name).symlink_to("nothing")
    assert compose_run([], tmp_path).notes == []


def test_an_object_takes_the_place_of_a_name() -> None:
    loss = {"_target_": "torch.nn.SmoothL1Loss", "beta": 2}
    words = [f"task.loss.{name}={value}" for name, value in loss.items()]
    assert compose_run(["task=regression", *words]).config.task["loss"] == loss
    with refused(ConfigError, "task.loss"):
        compose_run(["task=regression", words[1]])


def test_a_group_of_ones_own_is_added_with_a_plus(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "luck").mkdir()
    (tmp_path / "conf" / "luck" / "seven.yaml").write_text("# @package _global_\nseed: 7\n")
    assert compose_run(["+luck=seven"], tmp_path).config.seed == 7
    with refused(ConfigError):
        compose_run(["luck=seven"], tmp_path)
    with refused(ConfigError):
        compose_run(["+luck=eight"], tmp_path)


def test_a_saved_run_reads_values_as_a_new_one_does_and_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(format_config(compose_run([]).config))
    assert load_config(path, ["lr=1e-2"]).optimizer["lr"] == 0.01
    assert load_config(path, ["++optimizer.new.part=3"]).optimizer["new"] == {"part": 3}
    said = {
        "trainer.max_epochs": "cannot be read as key=value",
        "trainer.max_epochs = 3": "leave out the spaces around =",
        "trainer.max_steps=[1": "a bracket or quote may be open",
        "~trainer.max_epochs": "as trainer.max_epochs=null",
        "++optimizer.lr.x=3": "optimizer.lr is a single value",
        "seed=1,2": "a saved run has one",
        "hydra.run.dir=x": "stays in its folder",
        "hydra.verbose=true": "has no effect",
    }
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(said))
    assert len(caught.value.faults) == len(said)
    for word, told in said.items():
        assert any(fault.startswith(word.lstrip("+")) and told in fault for fault in caught.value.faults), (
            word
        )
