"""Completion of names by a shell, and the first words of other programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from trainrun.cli.commands import COMMANDS, FINE_TUNE, MEANT, command_of, read_as
from trainrun.cli.completion import SCRIPTS, all_names, completion_script
from trainrun.cli.main import main
from trainrun.config.argv import conf_dir
from trainrun.errors import ConfigError

NAMES = all_names(list(COMMANDS), [conf_dir()])
TAB = """
compopt() { :; }
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDS=($1)
case $1 in *" ") COMP_WORDS+=("") ;; esac
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_trainrun
echo "${COMPREPLY[*]}"
"""


def completed(line: str, folder: Path) -> list[str]:
    """Return what bash proposes at the end of a line."""
    script = completion_script("bash", NAMES) + TAB
    done = subprocess.run(
        ["bash", "-c", script, "bash", line],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_proposes_what_may_follow(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert {"resume", "model=", "trainer."} <= set(completed("trainrun ", tmp_path))
    assert set(completed("trainrun model=c", tmp_path)) == {"cnn", "custom"}
    assert "trainer.max_epochs=" in completed("trainrun model=cnn trainer.max_", tmp_path)
    assert "optimizer.lr=" in completed("trainrun optimizer.l", tmp_path)
    assert "runs" in completed("trainrun resume ru", tmp_path)
    assert completed("trainrun trainer.gradient_checkpointing=s", tmp_path) == ["selective"]
    assert completed("trainrun --mul", tmp_path) == ["--multirun"]
    assert completed("trainrun model=nothing_like_it", tmp_path) == []


@pytest.mark.process
@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_of_each_shell_has_all_names(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    for name in (*COMMANDS, "model=resnet", "trainer.max_epochs=", "optimizer.lr="):
        assert name in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=60)


def test_unknown_shell_is_refused() -> None:
    with pytest.raises(ConfigError, match="--completion tcsh"):
        command_of(["--completion", "tcsh"])()


@pytest.mark.parametrize("word", MEANT)
def test_first_words_of_other_programs_are_read_as_ours(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = read_as([word, "model=cnn"])
    if MEANT[word][:1] and not MEANT[word][0].startswith("-") and MEANT[word][0] not in COMMANDS:
        assert words == [word, "model=cnn"]
        return
    assert words == [*MEANT[word], "model=cnn"]
    assert f"trainrun {word} is read as" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["resume", "x"], ["model=cnn"], ["--help"], [], ["train", "=3"]])
def test_words_of_ours_stay_as_they_are(words: list[str]) -> None:
    assert read_as(words) == words


@pytest.mark.parametrize("word", FINE_TUNE)
def test_fine_tuning_is_answered_with_its_setting(word: str) -> None:
    with pytest.raises(ConfigError, match="init_from="):
        command_of([word])


def test_no_word_of_another_program_hides_a_command_or_a_group() -> None:
    groups = {item.name for item in conf_dir().iterdir() if item.is_dir()}
    assert not set(MEANT) & (set(COMMANDS) | groups)
