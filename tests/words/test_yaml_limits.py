from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.errors import ConfigError
from trainrun.words.yaml_limits import MAX_DEPTH, check_yaml, read_yaml_text

BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(9))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "aliases counted as what they stand for"),
        ("a: &a [*a]", r"\*a stands for itself"),
        ("a: [" * 0 + "[" * (MAX_DEPTH + 1), f"deeper than {MAX_DEPTH}"),
        ("[" + "1," * 50_001 + "]", "more than 50,000 values"),
        ("[" * 100_000, "deeper"),
    ],
    ids=["bomb", "itself", "deep", "many", "very-deep"],
)
def test_what_is_too_much(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_yaml(text)


def test_aliases_of_an_ordinary_size_are_fine() -> None:
    check_yaml("a: &a {x: [1, 2]}\nb: *a\nc: &c [*a, *a]\nd: {<<: *a, e: *c}\nf: &a 3\ng: *a\n")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a: 1\nb: \xff\n", "line 2: not UTF-8 text"),
        (b"a: 1\n\tb: 2\n", "line 2"),
        (b"a: b\x00\n", "not YAML"),
        (b"x" * 300_000, "longer than 262,144 bytes"),
    ],
)
def test_where_a_file_is_wrong(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "a.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_yaml_text(tmp_path / "a.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read|not a plain file"):
        read_yaml_text(tmp_path)
