"""`--json` on every command: one schema, the result on standard output, the lines for people on standard error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quiet_runs import QUIET

import trainrun.errors
from trainrun.cli.main import COMMANDS, MODULES, main
from trainrun.cli.manual_pages import FOLDER as MANUAL
from trainrun.cli.manual_pages import split_sections

PACKAGE = Path(trainrun.errors.__file__).parent
KEYS = ["schema", "command", "exit_code", "error", "result"]
QUICK = ["data=digits", "model=mlp", "trainer.max_steps=2", "seed=1", *QUIET]

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)

    def run_command(*words: str) -> dict[str, Any]:
        code = main([*words, "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert list(answer) == KEYS
        assert answer["exit_code"] == code
        assert answer["schema"] == 1
        return answer

    return run_command


def test_commands_about_a_run_answer_in_one_schema(run: Run, tmp_path: Path):
    trained = run(*QUICK, "output_dir=runs/a")
    assert trained["command"] == "train"
    result = trained["result"]
    assert (result["state"], result["step"], result["folder"]) == ("done", 2, str(tmp_path / "runs/a"))
    assert set(result["metrics"]) >= {"val/loss", "val/acc"}

    evaluated = run("evaluate", "runs/a")["result"]
    assert evaluated["metrics"]["val/loss"] == pytest.approx(result["metrics"]["val/loss"])
    assert run("predict", "runs/a")["result"]["num_predictions"] == evaluated["num_samples"]
    assert run("ls", "runs")["result"]["runs"][0]["value"] == result["value"]
    assert run("watch", "runs/a")["result"] == {"ended": "done"}
    assert run("report", "runs/a")["result"]["reports"] == [str(tmp_path / "runs/a/report.html")]
    assert run("resume", "runs/a")["result"]["state"] == "done"


def test_other_commands_answer_in_the_same_schema(run: Run, tmp_path: Path):
    assert str(tmp_path / "mine/README.md") in [
        str(tmp_path / file) for file in run("init", "mine")["result"]["files"]
    ]
    assert run("cache")["result"].keys() == {"caches", "bytes"}
    assert run("help", "agents")["result"]["text"].startswith("# ")
    assert run("--version")["command"] == "train"
    assert run("--cfg", "job", "model.width=9", "model=cnn")["result"]["config"]["model"]["width"] == 9


def test_a_help_text_is_text(capsys: pytest.CaptureFixture[str]):
    assert main(["--help", "trainer.max_steps", "--json"]) == 0
    assert capsys.readouterr().out.startswith("trainer.max_steps")


def test_a_mistake_is_an_error_with_its_class_and_the_whole_message(run: Run):
    answer = run("data.batch_size=0", "trainer.max_epochs=-2")
    assert (answer["exit_code"], answer["result"]) == (2, {})
    assert answer["error"]["kind"] == "ConfigError"
    assert {"data.batch_size", "trainer.max_epochs"} <= set(re.findall(r"[\w.]+", answer["error"]["message"]))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reports_a_result_which_the_manual_lists(command: str):
    module = MODULES.get(command, f"cli.{command}_command").partition(":")[0].replace(".", "/")
    room = (PACKAGE / module).parent
    texts = [path.read_text() for path in room.rglob("*.py")]
    if command == "embed":  # writes by the machinery of convert
        texts += [(PACKAGE / "convert/conversion.py").read_text()]
    assert any("report_result(" in text for text in texts)
    page = split_sections((MANUAL / "agents.md").read_text())["the-result-of-a-command"]
    assert f"`{command}`" in page


@pytest.mark.parametrize("page", ["agents", "checkpoints"])
def test_the_manual_lists_the_exit_codes_of_the_code(page: str):
    codes = {value for name, value in vars(trainrun.errors).items() if name.startswith("EXIT_")}
    text = (MANUAL / f"{page}.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+)[^|]*\|", text.partition("xit codes\n")[2], re.M)}
    assert listed == codes | {143}
