"""One truth a setting: what is written beside a field is all there is to write."""

# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainrun.config.aliases import collect_aliases, resolve_alias, resolve_value_alias
from trainrun.config.help_text import iterate_setting_rows
from trainrun.config.schema import RunConfig, replace_values, settings
from trainrun.config.validate import check_all_values, check_nodes
from trainrun.limits import NODES, choice, node, nodes, section, setting


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = setting(3, "how large it is", at_least=1, aliases=("magnitude", "inner.old_size"))
    kind: str = choice("round", "square", help="its shape", words={"true": "round"})


@dataclasses.dataclass(frozen=True)
class Mine:
    inner: Inner = section(Inner, "kind", ("innards",))
    model: Any = node("what trains", required=True)
    doors: dict[str, Any] = nodes("things by name")


def test_a_new_setting_is_known_to_help_checks_and_aliases_by_its_field_alone() -> None:
    assert list(iterate_setting_rows(Mine))[:2] == [
        ("inner.size", "3", "how large it is (1 or more)"),
        ("inner.kind", "round", "its shape (round, square)"),
    ]
    assert collect_aliases(Mine)["magnitude"] == collect_aliases(Mine)["inner.old_size"] == "inner.size"
    assert resolve_alias("innards.size", lambda _: False, Mine) == "inner.size"
    assert resolve_value_alias("inner.kind", "True", Mine) == "round"
    assert settings(Mine)["doors"].opens == NODES
    good = replace_values(Mine(), {"model": {"_target_": "my.Net"}, "doors.first": {"_target_": "my.Door"}})
    assert [*check_all_values(good, Mine), *check_nodes(good, Mine)] == []
    bad = replace_values(good, {"inner.size": 0, "inner.kind": "squar", "doors.first": 1, "model": None})
    assert list(check_all_values(bad, Mine).values()) == [
        "inner.size=0: must be a whole number, 1 or more",
        "inner.kind=squar: must be one of round, square. Did you mean square?",
    ]
    assert check_nodes(bad, Mine) == [
        "model._target_: is not set; name a class or function, as model._target_=my_file.MyClass",
        "doors.first=1: must name a class or function, as doors.first._target_=my_file.MyClass",
    ]


def test_every_setting_says_what_it_is_and_no_name_means_two() -> None:
    bare = [key for key, found in settings().items() if not found.help and found.section is None]
    assert bare == []
    names = [name for found in settings().values() for name in found.aliases]
    assert sorted(set(names)) == sorted(names)
    assert not set(names) & settings().keys()


def test_the_defaults_are_what_the_settings_allow() -> None:
    assert check_all_values(RunConfig()) == {}


def test_a_config_never_changes_and_gives_another_one() -> None:
    config = RunConfig()
    for whole in (config, config.trainer, config.trainer.ema):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(whole, dataclasses.fields(whole)[0].name, None)
    other = replace_values(config, {"trainer.ema.decay": 0.5, "model": {"width": 3}})
    assert (other.trainer.ema.decay, config.trainer.ema.decay) == (0.5, 0.999)
    assert replace_values(other, {"model.width": 4}).model == {"width": 4}
    assert other.model == {"width": 3}
