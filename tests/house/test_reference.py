"""The reference of the manual names what exists, with the types of the code, and lists small objects completely."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import trainrun
from trainrun.cli.manual_pages import FOLDER
from trainrun.interfaces import (
    GradReport,
    MicroBatch,
    Parallel,
    Precision,
    RunFacts,
    StepAgreement,
    StepInfo,
    StepOutput,
    StepReport,
)
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.triggers import Triggers

TEXT = (FOLDER / "reference.md").read_text(encoding="utf-8")
OBJECTS: dict[str, Any] = {
    "run": Components, "state": TrainState, "batch": MicroBatch, "report": StepReport, "grad": GradReport,
    "agreed": StepAgreement, "output": StepOutput, "info": StepInfo, "facts": RunFacts,
}  # fmt: skip
PARTS: dict[tuple[str, str], Any] = {
    ("run", "parallel"): Parallel, ("run", "precision"): Precision, ("run", "triggers"): Triggers,
}  # fmt: skip
WHOLE = ("batch", "report", "grad", "agreed", "output", "info")  # every field of these is documented


def field_types(owner: Any) -> dict[str, str]:
    """Return the public fields of a class with their types as written in the code; "" where none is written."""
    if "__annotations__" not in vars(owner) and not hasattr(owner, "_fields"):
        return dict.fromkeys(getattr(owner, "__slots__", ()), "")
    types = inspect.get_annotations(owner)
    written = {name: getattr(kind, "__forward_arg__", kind) for name, kind in types.items()}
    return {name: str(kind) for name, kind in written.items() if not name.startswith("_")}


def has_attribute(owner: Any, name: str) -> bool:
    """Return whether objects of a class have an attribute: a field, a method, or one that `__init__` sets."""
    if name in field_types(owner) or hasattr(owner, name):
        return True
    return re.search(rf"self\.{name}\b[^=\n]* = ", inspect.getsource(owner)) is not None


def unknown_names(text: str) -> list[str]:
    """Return the names of the form `object.name` or `object.name.name` that no object has."""
    unknown = []
    for name, field, part in re.findall(rf"(?<![\w.])({'|'.join(OBJECTS)})\.(\w+)(?:\.(\w+))?", text):
        known = has_attribute(OBJECTS[name], field)
        if known and part and (name, field) in PARTS:
            known = has_attribute(PARTS[name, field], part)
        if not known:
            unknown.append(".".join(filter(None, (name, field, part))))
    return unknown


def wrong_types(text: str) -> list[str]:
    """Return the rows of tables whose type is not the one of the code."""
    wrong = []
    for names, shown in re.findall(r"^\| (`\w+\.\w+`(?:, `\w+\.\w+`)*) \| `([^`]+)` \|", text, re.MULTILINE):
        for name, field in re.findall(r"`(\w+)\.(\w+)`", names):
            declared = field_types(OBJECTS[name])[field].replace(" | ", " or ")
            if declared != shown:
                wrong.append(f"{name}.{field}: {declared}, not {shown}")
    return wrong


def test_every_documented_name_exists() -> None:
    assert unknown_names(TEXT) == []


def test_documented_types_are_those_of_the_code() -> None:
    assert wrong_types(TEXT) == []


@pytest.mark.parametrize("name", WHOLE)
def test_every_field_of_a_small_object_is_documented(name: str) -> None:
    documented = set(re.findall(rf"`{name}\.(\w+)`", TEXT))
    assert set(field_types(OBJECTS[name])) <= documented


def test_the_checks_see_a_name_that_does_not_exist() -> None:
    assert unknown_names("`run.modell`, `run.parallel.rang`, `state.step`") == [
        "run.modell",
        "run.parallel.rang",
    ]
    assert wrong_types("| `state.step` | `float` | steps |\n") == ["state.step: int, not float"]


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    missing = [name for name in trainrun.__all__ if not hasattr(trainrun, name)]
    assert missing == []
    assert trainrun.StepOutput is StepOutput
    assert not hasattr(trainrun, "Trainer")
