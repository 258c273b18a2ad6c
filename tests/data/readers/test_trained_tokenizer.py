"""A tokenizer trained on the training part of a text: it has seen nothing else, and the samples are divided there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainrun.data.readers.text.text import find_tokenizer, load
from trainrun.data.readers.text.tokenizer import open_tokenizer

SPEC = "bpe:300"


def text_of(samples) -> list[int]:
    return [int(i) for n in range(len(samples)) for i in samples[n][0]]


@pytest.mark.parametrize("kind", ["blocks", "lines", "documents"])
@pytest.mark.parametrize("newline", ["\n", " "])
def test_validation_text_is_not_seen_and_none_is_in_both_parts(
    tmp_path: Path, kind: str, newline: str
) -> None:
    for number in range(4):
        word = "zebu" if number == 3 else "öha"
        (tmp_path / f"{number}.txt").write_text(
            f"{word} {word}{newline}" * (150 if number < 3 else 100), "utf-8"
        )
    node = {
        "path": str(tmp_path),
        "kind": kind,
        "tokenizer": SPEC,
        "val_fraction": 0.25,
        "cache_dir": str(tmp_path / "c"),
    }
    file = find_tokenizer(node)
    vocabulary = json.loads(Path(file).read_text("utf-8"))["model"]["vocab"]
    assert any("ha" in token for token in vocabulary)
    assert not any("zeb" in token for token in vocabulary)
    if kind == "lines" and newline == " ":
        return  # four lines, of which the last is validation
    extra = {"block_size": 4} if kind == "blocks" else {}
    tokens = open_tokenizer(file)[0]
    train, val = (load(**node, **extra)[split] for split in ("train", "val"))
    assert "zebu" not in tokens.decode(text_of(train))
    assert "zebu" in tokens.decode(text_of(val))
    assert train.num_classes == val.num_classes == tokens.vocabulary


def test_the_same_text_gives_the_same_tokenizer_from_whatever_place(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text("one two three\n" * 50 + "four five\n" * 20, "utf-8")
        files.append(
            find_tokenizer(
                {"path": str(tmp_path / name), "tokenizer": SPEC, "cache_dir": str(tmp_path / name)}
            )
        )
    assert files[0] != files[1]
    assert Path(files[0]).read_bytes() == Path(files[1]).read_bytes()
    own = load(str(tmp_path / "a"), tokenizer=SPEC, block_size=4, val_path=str(tmp_path / "b"),
               cache_dir=str(tmp_path / "c"))["val"]  # fmt: skip
    assert own.num_tokens > 100  # a text of its own is not divided
