"""A wrong argument of a part that `conf/` names is told with the other faults, before torch is there."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from trainrun.config import conf_dir
from trainrun.words.checks import check
from trainrun.words.compose import compose_run

GROUPS = ("optimizer", "scheduler", "task", "model")
OPTIONS = [
    (group, file.stem)
    for group in GROUPS
    for file in sorted((conf_dir() / group).glob("*.yaml"))
    if file.stem != "custom"
]
NEEDED = {"gpt": ["data=text", "task=language_modeling"], "lstm": ["data=text", "task=language_modeling"]}


def composed(group: str, option: str) -> Any:
    words = ["task=vae", "model=vae"] if option == "vae" else [f"{group}={option}", *NEEDED.get(option, [])]
    return compose_run(words).config


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda name: name)
def test_every_number_flag_and_list_of_an_option_is_looked_at(group: str, option: str) -> None:
    config = composed(group, option)
    node = getattr(config, group)
    assert check(config) == []
    for name, usual in node.items():
        if not isinstance(usual, bool | int | float | list):
            continue
        for wrong in ("abc", {}, [[]], float("nan")):
            changed = copy.deepcopy(config)
            getattr(changed, group)[name] = wrong
            assert [fault for fault in check(changed) if fault.startswith(f"{group}.{name}=")], (name, wrong)


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("optimizer.betas=0.9", "must be 2 numbers, 0 or more and below 1, as [0.9,0.999]"),
        ("optimizer.betas=[0.9]", "must be 2 numbers"),
        ("optimizer.betas=[0.9,1.5]", "must be 2 numbers"),
        ("optimizer.amsgrad=1", "must be true or false"),
        ("optimizer.lr=null", "must be a number, 0 or more"),
        ("optimizer.eps=null", "must be a number, 0 or more"),
        ("model.hidden=[8,0]", "must be a list of whole numbers, 1 or more, as [256,128], or null"),
        ("model.num_classes=true", "must be a whole number, 1 or more, or null"),
        ("task.label_smoothing=1.5", "must be a number, 0 or more and at most 1"),
    ],
)
def test_the_rule_is_told(word: str, fault: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(Exception, match="must be") as raised:
        compose_run([word])
    (line,) = str(raised.value).splitlines()
    assert line.replace("'", "").startswith(f"{key}=")
    assert fault in line


def test_a_switch_that_is_no_switch_is_not_read_as_one() -> None:
    """Any text is true in Python."""
    with pytest.raises(Exception, match=r"model.residual=off: must be true or false"):
        compose_run(["model=cnn", "model.residual=off"])


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer=custom", "optimizer._target_=torch.optim.Adafactor", "optimizer.eps=[null,0.001]"],
        ["optimizer=custom", "optimizer._target_=my.Sgd", "optimizer.momentum=fast"],
        ["model=custom", "model._target_=my.Net", "model.width=wide"],
        ["scheduler=custom", "scheduler._target_=my.steps", "scheduler.gamma=[1,2]"],
        ["model.hidden=[]", "model.dropout=0", "optimizer.eps=0", "optimizer.betas=[0,0.5]"],
    ],
)
def test_others_say_themselves_what_they_take(words: list[str]) -> None:
    assert compose_run(words).config
