"""What others wrote reaches the terminal, the log and the tables without its control characters."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest

import trainrun
from trainrun.cli.main import main
from trainrun.errors import TrainrunError
from trainrun.monitor.console import Console
from trainrun.output import format_table, make_printable, redraw_line, say

HOSTILE = "a\x1b]0;owned\x07b\x9b2J\r\u202eevil\tc\nd"
SHOWN = "a\\x1b]0;owned\\x07b\\x9b2J\\r\\u202eevil\tc\nd"


def test_control_characters_are_spelled_out() -> None:
    assert make_printable(HOSTILE) == SHOWN
    assert make_printable("größer 5 µs ━━ 日本") == "größer 5 µs ━━ 日本"
    assert make_printable("\udcff") == "\\udcff"
    say("größer 日本", latin := io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    latin.seek(0)
    assert latin.read() == "größer \\u65e5\\u672c\n"


def test_every_way_to_the_screen_goes_through_it(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE, end="")
    redraw_line(HOSTILE)
    assert capsys.readouterr().out == f"{SHOWN}\r\033[K{SHOWN}"
    log = io.StringIO()
    Console(False, stream=log).on_note(HOSTILE)
    assert log.getvalue() == f"{SHOWN}\n"


@pytest.mark.train
def test_a_refusal_and_a_name_of_a_strangers_run_are_plain(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "trainer.max_steps=1",
        "monitor.plots=false",
        "monitor.hardware=false",
        "trainer.limit_val_batches=1",
    ]
    run = trainrun.train(*words, "output_dir=run")
    capsys.readouterr()
    config = run.folder / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("run_name: digits-mlp", 'run_name: "x\\e]0;owned\\ay"'))
    assert main(["resume", "run", "trainer.max_steps=2", "--trust"]) == 0
    shown = capsys.readouterr()
    assert "x\\x1b]0;owned\\x07y" in shown.out
    assert "\x1b" not in shown.out + shown.err + (run.folder / "run.log").read_text()
    config.write_text(text.replace("_target_: trainrun.model.mlp.Mlp", '_target_: "os.x\\e[2Jy"'))
    assert main(["evaluate", "run", "--trust"]) == 2
    assert "os.x\\x1b[2Jy" in (error := capsys.readouterr().err)
    assert "\x1b" not in error
    with pytest.raises(TrainrunError):
        trainrun.load_model("run")


def test_nothing_of_the_package_prints_past_it() -> None:
    """A rank that was killed has the cursor put back."""
    root = Path(trainrun.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert found == {"output.py", "parallel/launch.py"}


HEAD = ["job", "state", "val/acc", "", "settings"]
ROWS = [
    ["0", "done", "0.91", "", "optimizer.lr=0.01 model.hidden=[256,128]"],
    ["1", "failed", "-", "", "optimizer.lr=0.03 model.hidden=[64]"],
    ["2", "done", "0.89", "", "optimizer.lr=0.1 model.hidden=[64]"],
]


@pytest.mark.parametrize(
    ("num_rows", "width", "text"),
    [
        (2, 80, "job  state   val/acc  settings\n"
                "0    done    0.91     optimizer.lr=0.01 model.hidden=[256,128]\n"
                "1    failed  -        optimizer.lr=0.03 model.hidden=[64]"),
        (1, 56, "job       0\nstate     done\nval/acc   0.91\nsettings  optimizer.lr=0.01 model.hidden=[256,128]"),
        (3, 44, "0\n  state: done  val/acc: 0.91\n  settings: optimizer.lr=0.01\n    model.hidden=[256,128]\n"
                "1\n  state: failed\n  settings: optimizer.lr=0.03\n    model.hidden=[64]\n"
                "2\n  state: done  val/acc: 0.89\n  settings: optimizer.lr=0.1\n    model.hidden=[64]"),
    ],
    ids=["rows", "columns", "paragraphs"],
)  # fmt: skip
def test_a_table_fits_the_window_and_loses_nothing(num_rows: int, width: int, text: str) -> None:
    assert format_table(HEAD, ROWS[:num_rows], width) == text
    assert max(map(len, text.split("\n"))) <= width


def test_a_name_longer_than_the_window_is_broken() -> None:
    name = "9-model=mlp-trainer.max_steps=40-seed=1-model.hidden=_64_"
    text = format_table(["job", "state", "settings"], [[name, "done", name], ["", "failed", ""]], 44)
    assert max(map(len, text.split("\n"))) <= 44
    assert text.replace("\n", "").replace(" ", "").count(name) == 2


def test_a_table_without_rows_is_its_head() -> None:
    assert format_table(HEAD, [], 80) == "job  state  val/acc    settings"
