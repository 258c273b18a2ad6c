"""The kinds of values that rows of `metrics.jsonl` hold; readers of a row may rely on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGEST = 2**53
NUMBER, COUNT, TEXT, TEXTS, TABLE, NUMBERS, MATRIX = (
    "number",
    "count",
    "text",
    "texts",
    "table",
    "numbers",
    "matrix",
)
EVERYWHERE = {
    "kind": TEXT, "step": COUNT, "epoch": NUMBER, "time": NUMBER, "text": TEXT, "split": TEXT, "facts": TABLE,
    "summary": TABLE, "class_names": TEXTS, "matrix": MATRIX,
}  # fmt: skip
OF_NUMBERS = ("train", "eval", "test", "hardware")  # rows whose other values are all numbers
OF_LEDGER = {"seconds": NUMBERS, "vitals": NUMBERS, "device": NUMBERS}
OF_FACTS = {"name": TEXT, "choices": TEXTS, "steps_per_epoch": NUMBER}
OF_SUMMARY = {
    "monitor": TEXT, "value": NUMBER, "best_step": NUMBER, "step": COUNT, "epoch": NUMBER, "seconds": NUMBER,
    "samples_per_second": NUMBER, "tokens_per_second": NUMBER, "skipped_steps": COUNT, "metrics": NUMBERS,
}  # fmt: skip
NEEDED = {
    "train": ("step",), "eval": ("step",), "test": ("step",), "hardware": ("step",), "start": ("step",),
    "ledger": ("step", "seconds"), "confusion": ("step", "matrix"),
}  # fmt: skip


def wrong_field(row: Mapping[str, Any]) -> str:
    """The name of the first value that no run writes, or that is missing; empty for a sound row."""
    kind = row.get("kind", "")
    if not isinstance(kind, str):
        return "kind"
    if lacking := next((name for name in NEEDED.get(kind, ()) if name not in row), ""):
        return lacking
    if wrong := _wrong(row, EVERYWHERE):
        return wrong
    if kind in OF_NUMBERS and (wrong := _wrong(row, dict.fromkeys(row, NUMBER) | EVERYWHERE)):
        return wrong
    if kind == "ledger" and (wrong := _wrong(row, OF_LEDGER)):
        return wrong
    return _wrong(row.get("facts", {}), OF_FACTS, null=True) or _wrong(
        row.get("summary", {}), OF_SUMMARY, null=True
    )


def _wrong(values: Mapping[str, Any], kinds: Mapping[str, str], null: bool = False) -> str:
    """null: whether None stands for a value that is not known."""
    for name, kind in kinds.items():
        if name in values and not (null and values[name] is None) and not _fits(values[name], kind):
            return name
    return ""


def _fits(value: Any, kind: str) -> bool:
    if kind == NUMBER:
        return type(value) is float or (type(value) is int and abs(value) < LARGEST)
    if kind == COUNT:
        return type(value) is int and -1 <= value < LARGEST
    if kind == TEXT:
        return isinstance(value, str)
    if kind == TEXTS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind == MATRIX:
        return _is_square(value)
    is_table = isinstance(value, dict)
    return is_table and (kind == TABLE or all(_fits(item, NUMBER) for item in value.values()))


def _is_square(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(row, list) and len(row) == len(value) and all(_fits(item, COUNT) for item in row)
        for row in value
    )
