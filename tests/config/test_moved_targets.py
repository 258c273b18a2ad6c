"""Targets that stood elsewhere: understood wherever they are typed or saved, with one note."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.config import aliases as moved
from trainrun.config.compose import compose_run, format_config
from trainrun.config.saved_config import load_config
from trainrun.instantiate import locate

OLD, NEW = "trainrun.data.digits.load", "trainrun.data.readers.builtin.digits.load"


@pytest.fixture(autouse=True)
def forgotten() -> None:
    moved.say_once.cache_clear()


@pytest.mark.parametrize("module", moved.MOVED)
def test_every_new_place_has_the_function(module: str) -> None:
    name = "TensorBoard" if module.endswith("tensorboard") else "load"
    assert callable(locate(moved.target_of_today(f"{module}.{name}"), "data.train"))


def test_a_typed_target_is_read_as_todays(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_run([f"data.val._target_={OLD}"]).config
    assert config.data.val is not None
    assert config.data.val["_target_"] == NEW
    assert capsys.readouterr().err == f"note: _target_={OLD} is read as {NEW}\n"


def test_a_saved_config_is_read_as_todays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(format_config(compose_run([]).config).partition("# ")[0].replace(NEW, OLD))
    config = load_config(saved, [])
    assert [node["_target_"] for node in (config.data.train, config.data.val) if node] == [NEW, NEW]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("value", ["auto", "60"])
def test_the_former_default_of_the_watchdog_is_read_in_a_saved_config(value: str, tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    text = format_config(compose_run([]).config)
    assert "watchdog_seconds: 0.0" in text
    saved.write_text(text.replace("watchdog_seconds: 0.0", f"watchdog_seconds: {value}"))
    assert load_config(saved, []).trainer.watchdog_seconds == (0 if value == "auto" else 60)
    assert compose_run([f"trainer.watchdog_seconds={value}"]).config.trainer.watchdog_seconds in (0, 60)


def test_what_has_not_moved_is_as_it_was() -> None:
    node = {"_target_": "my.load", "inner": [{"_target_": OLD}], "n": 3}
    assert moved.with_targets_of_today(node) == {"_target_": "my.load", "inner": [{"_target_": NEW}], "n": 3}
    assert moved.target_of_today(None) is None
