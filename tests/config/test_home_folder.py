"""`~` begins a path in the home folder, whatever setting the path is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.config.schema import read_value


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["data=csv", "data.path=~/t.csv"], "data.path"),
        (["data=image_folder", "data.train.labels=~/labels.csv"], "data.val.labels"),
        (["data=idx", "data.train.inputs=~/x.gz"], "data.train.inputs"),
        (["data=custom", "data.train._target_=my.Set", "data.train.folder=~/set"], "data.train.folder"),
        (["monitor.tracker=csv", "monitor.csv.path=~/rows.csv"], "monitor"),
    ],
)
def test_the_home_folder_stands_for_a_tilde(home: Path, words: list[str], key: str) -> None:
    found = read_value(compose_run(words).config, key)
    texts = str(found if key != "monitor" else found.listeners["csv"]["path"])
    assert str(home) in texts
    assert "~" not in texts


@pytest.mark.parametrize("name", ["a~/b", "~", "~x", "x/~/y"])
def test_other_tildes_stay(home: Path, name: str) -> None:
    assert compose_run(["data=csv", f"data.path='{name}'"]).config.data.path == name


@pytest.mark.train
def test_settings_and_files_of_a_saved_run(home: Path, workdir: Path) -> None:
    rows = [f"{i % 7},{i % 3},{i % 2}" for i in range(40)]
    (home / "t.csv").write_text("\n".join(["a,b,label", *rows, ""]))
    words = [
        "data=csv",
        "data.path=~/t.csv",
        "model=mlp",
        "trainer.max_steps=2",
        "monitor.plots=false",
        "output_dir=run",
    ]
    assert main([*words, "monitor.tracker=csv", "monitor.csv.path=~/rows.csv"]) == 0
    assert (home / "rows.csv").is_file()
    assert (
        "~/t.csv" in (workdir / "run" / "config.yaml").read_text()
    )  # a machine with another home reads its own
    assert main(["predict", "run", "data.train.val_path=~/t.csv", "--out", "~/out.csv"]) == 0
    assert len((home / "out.csv").read_text().splitlines()) == 41
