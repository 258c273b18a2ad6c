"""YAML is looked at before it is parsed."""

from __future__ import annotations

from pathlib import Path

import pytest
from approved import refused

from trainrun.config.saved_values import MAX_DEPTH, check_yaml, read_yaml_text
from trainrun.errors import ConfigError


@pytest.mark.parametrize(
    "data",
    [
        b"a: &a [x]\nb: [*a, *a]\n",
        b"[" * (MAX_DEPTH + 1),
        b"[" * 100_000,
        b"a: 1\nb: \xff\n",
        b"a: 1\n\tb: 2\n",
        b"a: b\x00\n",
        b"x" * 300_000,
    ],
    ids=["alias", "deep", "very-deep", "bytes", "tab", "nul", "long"],
)
def test_where_a_file_is_wrong(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(data)
    with refused(ConfigError):
        read_yaml_text(tmp_path / "a.yaml")


def test_a_file_of_the_users_own_may_repeat_itself(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: [1, 2]}\nb: *a\nc: &c [*a, *a]\n")
    assert read_yaml_text(tmp_path / "a.yaml", aliases=True)
    with refused(ConfigError):
        read_yaml_text(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: &a [*a]", r"\*a refers to itself"),
        ("[" + "1," * 60_000 + "1]", "more than 50,000 values"),
        (
            "a0: &a0 [x]\n"
            + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12)),
            "values",
        ),
    ],
    ids=["itself", "many", "bomb"],
)
def test_aliases_are_counted_as_what_they_stand_for(text: str, told: str):
    with pytest.raises(ValueError, match=told):
        check_yaml(text, aliases=True)
