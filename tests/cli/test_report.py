"""`trainrun report`: what it draws, and what it says to mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from approved import refused

from trainrun.cli.main import main as cli
from trainrun.cli.report_command import main
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, write_text
from trainrun.monitor.bus import Bus
from trainrun.monitor.metric_rows import MetricsFile


def make(root: Path) -> RunDir:
    run = RunDir(root)
    run.create()
    file = Bus(MetricsFile(run.metrics))
    file.on_step(1, 0.1, {"train/loss": 1.0})
    file.close()
    write_text(run.config, f"run_name: {root.name}\n")
    return run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_run_is_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "outputs/a")
    assert main(["outputs/a"]) == 0
    assert run.report.is_file()
    assert [path.name for path in run.plots.iterdir()] == ["loss.png"]
    assert capsys.readouterr().out == f"{run.report}  (pictures: 1, in {run.plots})\n"
    assert not (tmp_path / "outputs/compare.html").exists()


def test_several_are_put_beside_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "outputs/a")
    make(tmp_path / "b")
    assert main(["outputs/a", "b", "b"]) == 0
    assert (tmp_path / "outputs/compare.html").is_file()
    assert (tmp_path / "b/report.html").is_file()
    out = capsys.readouterr().out
    assert "\nrun        best  step  time  speed\noutputs/a  -" in out
    assert out.endswith(f"{tmp_path}/outputs/compare.html\n")


def test_what_is_no_run_is_skipped_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    (tmp_path / "notes").mkdir()
    assert cli(["compare", "notes", "a", "nowhere", "b"]) == 0
    assert capsys.readouterr().err == "note: skipped, no run: notes, nowhere\n"
    assert cli(["compare", "notes", "a"]) == 2  # a single run is no comparison
    assert cli(["compare", "notes", "nowhere"]) == 2


def test_out_names_the_folder_of_a_comparison(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert main(["--out=there/new", "a", "b"]) == 0
    assert (tmp_path / "there/new/compare.html").is_file()
    with refused(ConfigError):
        main(["a", "--out", "there"])


def test_a_run_that_logged_nothing_says_why(tmp_path: Path) -> None:
    make(tmp_path / "a").metrics.unlink()
    with refused(ConfigError, "monitor.metrics_file"):
        main(["a"])


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "outputs/day/run")
    for folder, said in (("outputs/none", "no such folder"), ("outputs", "no run is in this folder")):
        assert cli(["report", folder]) == 2
        assert capsys.readouterr().err.startswith(f"trainrun: {folder}: {said} (no metrics.jsonl)")


@pytest.mark.parametrize("words", [[], ["a", "--ou=x"], ["--out"]])
def test_wrong_words_are_one_short_fault(words: list[str]) -> None:
    with refused(ConfigError):
        main(words)
