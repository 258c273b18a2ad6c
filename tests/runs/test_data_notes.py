"""What a user should know of the data stands among the first lines on the screen, not in the log alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.cli.main import main

WORDS = ("data=csv", "data.path=t", "data.train.target=y", "data.batch_size=16", "model=mlp", "trainer.max_steps=1",
         "monitor.plots=false", "monitor.hardware=false", "output_dir=run")  # fmt: skip


def write_table(path: Path, numbers: range, *more: str) -> None:
    path.parent.mkdir(exist_ok=True)
    rows = [f"{number},{number * 7 % 31},class_{number % 2}" for number in numbers]
    path.write_text("\n".join(["a,b,y", *rows, *more, ""]))


@pytest.mark.parametrize(
    ("validation", "more", "note", "classes"),
    [
        (range(100, 140), (), "", "2: class_0 (50), class_1 (50)"),
        (range(80, 140), (), "20 of 60 rows", "2: class_0 (50), class_1 (50)"),
        (range(100, 140), ("1,2,clas_1",), "", "3: clas_1 (1), class_0 (50), class_1 (50)"),
    ],
)
def test_first_lines_tell_of_splits_shared_rows_and_classes(
    validation: range,
    more: tuple[str, ...],
    note: str,
    classes: str,
    workdir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_table(Path("t/train.csv"), range(100), *more)
    write_table(Path("t/val.csv"), validation)
    assert main([*WORDS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("  classes ")] == [classes]
    by_name, *others = [line for line in lines if line.startswith("note:")]
    assert "train 1, val 1" in by_name
    assert len(others) == bool(note), others
    assert note in "".join(others)
