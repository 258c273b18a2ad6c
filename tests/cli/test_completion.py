"""Completion of names by a shell, and the first words of other programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from approved import refused

from trainrun.cli.completion import SCRIPTS, collect_names, format_completion_script
from trainrun.cli.main import COMMANDS, FINE_TUNE, MEANT, choose_command, main, translate_command
from trainrun.config.argv import find_conf_dir
from trainrun.errors import ConfigError

NAMES = collect_names(list(COMMANDS), [find_conf_dir()])
LINES = (
    "trainrun model=c", "trainrun model=cnn trainer.max_e", "trainrun optimizer.l", "trainrun resume ru", "trainrun ev",
    "trainrun trainer.gradient_checkpointing=s", "trainrun --mul", "trainrun model=nothing_like_it",
    "trainrun data.path=pho",
)  # fmt: skip
# What each shell does at a Tab after each of its arguments; a line of proposals for each.
TABS = {
    "bash": """
compopt() { :; }
for line; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_WORDS=($line)
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _trainrun
    [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- "${line##*[ =]}"))
    echo "${COMPREPLY[*]}"
done
""",
    "zsh": """
compset() { prefix=${words[CURRENT]#*=}; }
_files() { found+=(${prefix:-${words[CURRENT]}}*(N)); }
compadd() {
    while [ $1 != -- ]; do shift; done
    local more=(${(M)@:#${words[CURRENT]}*})
    found+=($more)
    (( $#more ))
}
for line; do
    words=(${=line}) CURRENT=${#words} found=() prefix=
    _trainrun
    echo $found
done
""",
    "fish": """
for line in $argv
    echo (complete -C $line)
end
""",
}
START = {"bash": ["bash", "-c"], "zsh": ["zsh", "-f", "-c"], "fish": ["fish", "--no-config", "-c"]}


@pytest.mark.process
@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_tab_proposes_what_may_follow(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (tmp_path / "runs").mkdir()
    (tmp_path / "photos").mkdir()
    script = format_completion_script(shell, NAMES).replace("compdef _trainrun trainrun", "") + TABS[shell]
    name = [] if shell == "fish" else [shell]
    done = subprocess.run(
        [*START[shell], script, *name, *LINES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = [
        {word.rstrip("/").rpartition("=")[2] or word for word in line.split()}
        for line in done.stdout.splitlines()
    ]
    proposed = dict(zip(LINES, found, strict=True))
    assert {"cnn", "custom"} <= proposed["trainrun model=c"]
    assert "trainer.max_epochs=" in proposed["trainrun model=cnn trainer.max_e"]
    assert "optimizer.lr=" in proposed["trainrun optimizer.l"]
    assert "runs" in proposed["trainrun resume ru"]
    assert "evaluate" in proposed["trainrun ev"]
    assert "selective" in proposed["trainrun trainer.gradient_checkpointing=s"]
    assert proposed["trainrun --mul"] == {"--multirun"}
    assert proposed["trainrun model=nothing_like_it"] == set()
    assert "photos" in proposed["trainrun data.path=pho"]


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
    with refused(ConfigError, "--completion tcsh"):
        choose_command(["--completion", "tcsh"])()


@pytest.mark.parametrize("word", MEANT)
def test_first_words_of_other_programs_are_read_as_ours(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = translate_command([word, "model=cnn"])
    if MEANT[word][:1] and not MEANT[word][0].startswith("-") and MEANT[word][0] not in COMMANDS:
        assert words == [word, "model=cnn"]
        return
    assert words == [*MEANT[word], "model=cnn"]
    assert f"trainrun {word} is read as" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["resume", "x"], ["model=cnn"], ["--help"], [], ["train", "=3"]])
def test_words_of_ours_stay_as_they_are(words: list[str]) -> None:
    assert translate_command(words) == words


@pytest.mark.parametrize("word", FINE_TUNE)
def test_fine_tuning_is_answered_with_its_setting(word: str) -> None:
    with refused(ConfigError, "init_from="):
        choose_command([word])()


def test_no_word_of_another_program_hides_a_command_or_a_group() -> None:
    groups = {item.name for item in find_conf_dir().iterdir() if item.is_dir()}
    assert not set(MEANT) & (set(COMMANDS) | groups)
