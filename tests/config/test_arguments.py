"""A wrong argument of a part that `conf/` names is told with the other faults, before torch is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from approved import approve, refused
from things import faults_of

from trainrun.config.argv import find_conf_dir
from trainrun.config.compose import compose_run, format_config
from trainrun.config.saved_config import load_config
from trainrun.config.schema import replace_values
from trainrun.config.validate import check_config, check_target_arguments, parse_argument_types
from trainrun.errors import ConfigError
from trainrun.limits import fits_kind

GROUPS = ("optimizer", "scheduler", "task", "model", "data.train")
OPTIONS = [
    (group, file.stem)
    for group in GROUPS
    for file in sorted((find_conf_dir() / group.partition(".")[0]).glob("*.yaml"))
    if file.stem != "custom"
]
NEEDED = {"gpt": ["data=text", "task=language_modeling"], "lstm": ["data=text", "task=language_modeling"],
          "vae": ["task=vae", "model=vae"], "sequence_vae": ["data=text", "task=vae"],
          "text": ["model=gpt", "task=language_modeling"]}  # fmt: skip


def composed(group: str, option: str) -> Any:
    words = [f"{group.partition('.')[0]}={option}", *NEEDED.get(option, [])]
    return compose_run(words).config


def node_of(config: Any, group: str) -> Any:
    return config.data.train if group == "data.train" else getattr(config, group)


def wrong(config: Any, group: str, name: str, value: Any) -> list[str]:
    """The faults of that key when it has that value."""
    changed = replace_values(config, {f"{group}.{name}": value})
    faults = [*check_config(changed), *check_target_arguments(changed).values()]
    return [fault for fault in faults if fault.startswith(f"{group}.{name}=")]


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda name: name)
def test_every_number_flag_and_list_of_an_option_is_looked_at(group: str, option: str) -> None:
    config = composed(group, option)
    node = node_of(config, group)
    kinds = parse_argument_types(node["_target_"])
    assert check_config(config) == []
    assert check_target_arguments(config) == {}
    for name, usual in node.items():
        if isinstance(usual, bool | int | float):
            for value in ("abc", {}, [[]], 10**400, float("nan")):
                assert wrong(config, group, name, value), (name, value)
        if name in kinds:
            assert bool(wrong(config, group, name, None)) is not fits_kind(None, kinds[name])


@pytest.mark.parametrize(
    "word",
    [
        "optimizer.betas=0.9",
        "optimizer.betas=[0.9]",
        "optimizer.betas=[0.9,1.0]",
        "optimizer.betas=[-0.1,0.9]",
        "optimizer.amsgrad=1",
        "optimizer.lr=null",
        "optimizer.eps=null",
        "optimizer.eps=-1",
        "model.hidden=[8,0]",
        "model.num_classes=true",
        "model.num_classes=0",
        "model.num_classes=1.5",
        "task.label_smoothing=1.5",
        "optimizer=muon optimizer.ns_steps=100",
        "optimizer=sgd optimizer.dampening=x",
        "scheduler=plateau scheduler.factor=1",
        "scheduler=plateau scheduler.mode=up",
        "scheduler=onecycle scheduler.pct_start=2",
        "scheduler=onecycle scheduler.total_steps=1e3",
        "scheduler=onecycle scheduler.div_factor=0",
        "scheduler=multistep scheduler.milestones=[-1]",
        "data=arrays data.path=x data.train.mapped=off",
        "data=csv data.path=x.csv data.train.header=no",
        "data=hdf5 data.path=x data.train.in_memory=on",
        "data=text model=gpt task=language_modeling data.train.max_bytes=1.5",
        "data.train.val_fraction=1.0",
    ],
)
def test_the_rule_is_told(word: str) -> None:
    words = word.split(" ")
    (line,) = faults_of(*words)
    assert line.replace(", ", ",").startswith(words[-1])
    approve(line)


def test_a_wrong_value_is_told_once_under_the_key_that_has_it() -> None:
    assert faults_of("scheduler=onecycle", "optimizer.lr=-1") == (
        "optimizer.lr=-1: must be a number, 0 or more",
    )
    assert faults_of("data.num_classes=0") == (
        "data.num_classes=0: must be a whole number, 2 or more, or null",
    )
    for words in (
        ["data.shape=[0]"],
        ["data=synthetic", "data.shape=[0]"],
        ["data=csv", "data.path=x.csv", "data.shape=[0]"],
    ):
        (line,) = faults_of(*words)
        assert line.startswith("data.shape=[0]: must be a list of whole numbers")
    assert faults_of("data=synthetic", "data.num_classes=0") == (
        "data.num_classes=0: must be a whole number, 2 or more, or null",
    )
    assert faults_of("scheduler=onecycle", "optimizer.lr=null") == (
        "optimizer.lr=null: must be a number, 0 or more",
    )
    (line,) = faults_of("data.train.val_fraction=nan")
    assert line.startswith("data.train.val_fraction=nan: ")


def test_a_text_that_looks_like_a_number_or_a_switch_is_shown_as_a_text() -> None:
    assert faults_of("optimizer.eps='0.1'") == ("optimizer.eps='0.1' (a text): must be a number, 0 or more",)
    (line,) = faults_of("model=gpt", "data=text", "task=language_modeling", "model.layers=None")
    assert line.startswith("model.layers='None' (a text): must be a whole number, 1 or more, or null")


def test_a_saved_run_is_not_refused_for_what_it_has_trained_with(tmp_path: Path) -> None:
    """Only its new words are looked at."""
    config = composed("model", "cnn")
    config.model["residual"] = 1
    file = tmp_path / "config.yaml"
    file.write_text(format_config(config))
    assert load_config(file, ["trainer.max_epochs=3"]).model["residual"] == 1
    with refused(ConfigError, "model.residual"):
        load_config(file, ["model.residual=2"])


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer=custom", "optimizer._target_=torch.optim.Adafactor", "optimizer.eps=[null,0.001]"],
        ["optimizer=custom", "optimizer._target_=my.Sgd", "optimizer.momentum=fast"],
        ["model=custom", "model._target_=my.Net", "model.width=wide"],
        ["scheduler=custom", "scheduler._target_=my.steps", "scheduler.gamma=[1,2]"],
        ["task.ignore_index=null"],
        ["data=csv", "data.path=x.csv", "data.train.fill=nan"],
        ["scheduler=step", "scheduler.step_size=1e3"],
        ["scheduler=cosine", "scheduler.total_steps=1e3"],
        ["scheduler=onecycle", "scheduler.max_lr=[0.1,0.2]"],
        ["model.hidden=[]", "model.dropout=0", "optimizer.eps=0", "optimizer.betas=[0,0.5]"],
    ],
)
def test_others_say_themselves_what_they_take(words: list[str]) -> None:
    assert compose_run(words).config
