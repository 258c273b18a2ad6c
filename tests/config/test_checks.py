"""Units and intervals: what is meant, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainrun.config.rules import iterate_combination_faults
from trainrun.config.schema import RunConfig, replace_values
from trainrun.config.validate import check_config
from trainrun.limits import (
    Duration,
    parse_any_duration,
    parse_interval,
    parse_saving_interval,
    parse_seconds,
    parse_untimed_interval,
)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (1, Duration(1, "step")),
        (1.0, Duration(1, "epoch")),
        (0.25, Duration(0.25, "epoch")),
        ("250step", Duration(250, "step")),
        ("250 steps", Duration(250, "step")),
        ("0.25epoch", Duration(0.25, "epoch")),
        ("2epochs", Duration(2, "epoch")),
        ("1.5e3samples", Duration(1500, "sample")),
        ("1e9token", Duration(1e9, "token")),
        ("10 min", Duration(600, "second")),
        ("2ep", Duration(2, "epoch")),
    ],
)
def test_intervals_have_a_unit(value: Any, meant: Duration) -> None:
    assert parse_interval(value) == meant


@pytest.mark.parametrize(
    "value", [0, 0.0, -1, 1.5, "1.5epoch", "0.5step", "0step", "1e-3sample", "", "often", True, None, [1]]
)
def test_intervals_that_mean_nothing_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number of steps"):
        parse_interval(value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (5, 5.0), (0.5, 0.5), ("90s", 90.0), ("10min", 600.0), ("2 hours", 7200.0), ("1d", 86400.0),
     ("01:02:03:04", 93784.0), ("02:30", 150.0)],
)  # fmt: skip
def test_durations(value: Any, seconds: float | None) -> None:
    assert parse_seconds(value) == seconds


@pytest.mark.parametrize(
    "value", [0, -1, "soon", "1:2:3:4:5", "00:00", True, float("inf"), float("nan"), "5 parsecs"]
)
def test_durations_that_mean_nothing_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="must be seconds"):
        parse_seconds(value)


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse_untimed_interval, "10min"),
        (parse_saving_interval, "10min"),
        (parse_any_duration, "3"),
        (parse_any_duration, 3),
        (parse_any_duration, "1.5step"),
        (parse_seconds, "10step"),
    ],
)
def test_a_unit_that_makes_no_sense_is_refused(parse: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse(value)
    assert parse_saving_interval(None) is parse_any_duration(None) is None


@pytest.mark.parametrize(
    "field", ["data.transform", "data.collate_fn", "model", "loop", "monitor.listeners.mine"]
)
@pytest.mark.parametrize("value", [5, "my_file.MyClass", {"width": 3}])
def test_what_cannot_be_called_is_named_before_anything_starts(field: str, value: Any) -> None:
    key = field.replace(".listeners", "")
    (fault,) = [
        fault for fault in check_config(replace_values(RunConfig(), {field: value})) if fault.startswith(key)
    ]
    assert f"{key}._target_=my_file.MyClass" in fault
    mine = replace_values(RunConfig(), {field: {"_target_": "my_file.MyClass"}})
    assert not [fault for fault in check_config(mine) if fault.startswith(key)]


READER = {
    "_target_": "trainrun.data.readers.tables.csv_files.load",
    "path": "a.csv",
    "val_fraction": 0.1,
    "seed": 0,
}


@pytest.mark.parametrize(
    ("val", "said"),
    [
        ({}, ""),
        ({"val_fraction": 0.3}, "data.val.val_fraction=0.3: both parts must be cut from the data"),
        ({"seed": 1}, "data.val.seed=1: both parts must be cut"),
        ({"path": "b.csv"}, "for separate validation data set data.train.val_path=b.csv"),
        ({"path": "b.csv", "val_path": "b.csv"}, ""),
        ({"path": "b.csv", "val_fraction": 0}, ""),
        ({"path": "b.csv", "val_fraction": 0.5}, ""),
    ],
)
def test_a_validation_part_is_cut_as_the_training_part_is(val: dict[str, Any], said: str) -> None:
    config = replace_values(RunConfig(), {"data.train": READER, "data.val": {**READER, **val}})
    faults = [str(fault) for fault in iterate_combination_faults(config) if fault.key.startswith("data.val")]
    assert len(faults) == bool(said)
    assert said in "".join(faults)
