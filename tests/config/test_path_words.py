"""A path in a word is taken as it is typed, whatever characters it holds."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from approved import refused

from trainrun.cli.main import main
from trainrun.config.argv import as_path, is_path
from trainrun.config.compose import compose_run, format_config, prepare_command_line
from trainrun.config.saved_config import load_config
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, named_folder
from trainrun.runs.run import new_run
from trainrun.sweep.jobs import expand

NAMES = [
    "a=b.csv", "a,b.csv", "it's.csv", 'say "hi".csv', "two words.csv", "cost$5.csv", "$HOME.csv", "a(1)[2]{3}.csv",
    "a:b;c.csv", "back\\slash.csv", 'end\\"', "ends\\", "007", "1e5", "true", "ünï.csv", "#1%.csv", "a=", "'quoted'",
    "[1,2]", " lead.csv", "x,y,z", "~t.csv", "@a", "1_000",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def data_path(*words: str) -> object:
    return compose_run(["data=csv", *words]).config.data.path


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_file_that_is_there(name: str) -> None:
    for place in (name, f"./{name}"):
        Path(place).write_text("a,y\n")
        config = compose_run(["data=csv", f"data.path={place}", f"data.train.val_path={place}"]).config
        assert (config.data.path, config.data.train["path"], config.data.train["val_path"]) == (place,) * 3
        words, _ = prepare_command_line(["--multirun", "data=csv", f"data.path={place}"], Path.cwd())
        (job,) = expand(words.overrides)  # no sweep
        assert data_path(*job[1:]) == place


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("'quoted'", "[1,2]")])
def test_one_that_is_not_there_is_named_as_typed(name: str) -> None:
    assert data_path(f"data.path={name}") == name


def test_a_saved_run_takes_another_path(tmp_path: Path) -> None:
    Path("run.yaml").write_text(format_config(compose_run(["data=csv", "data.path=a=1,b.csv"]).config))
    for name in NAMES:
        Path(name).write_text("")
        config = load_config(Path("run.yaml"), [f"data.path={name}"])
        assert (config.data.path, config.data.train["path"]) == (name, name)


def test_relative_paths_lead_from_where_a_run_began_and_from_a_copy_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x", "y"):
        Path(name).mkdir()
        Path(name, "table.csv").write_text("a,y\n")
    monkeypatch.chdir("x")
    composition = compose_run(["data=csv", "data.path=table.csv", "seed=1"])
    for place in ("../y/run", "run"):
        new_run(composition, [], RunDir(named_folder(place)))
    shutil.copytree(tmp_path / "x", tmp_path / "z")
    for folder, began in (("y", "x"), ("z", "z")):
        monkeypatch.chdir(tmp_path / folder)
        assert load_config(Path("run/config.yaml").absolute(), []).data.path == str(
            tmp_path / began / "table.csv"
        )


def test_a_comma_is_a_sweep_only_where_it_clearly_is_one() -> None:
    def jobs(word: str) -> list[str]:
        words, _ = prepare_command_line(["--multirun", "data=csv", word], Path.cwd())
        return [str(data_path(*job[1:])) for job in expand(words.overrides)]

    assert jobs("data.path=a b.csv,c=d.csv") == ["a b.csv", "c=d.csv"]
    assert jobs("data.path=part-{1,2}.csv") == ["part-{1,2}.csv"]
    Path("a b.csv,c=d.csv").write_text("")
    assert jobs("data.path=a b.csv,c=d.csv") == ["a b.csv,c=d.csv"]
    for name in ("one.csv", "two.csv"):
        Path(name).write_text("")
    with refused(ConfigError):
        data_path("data.path=one.csv,two.csv")
    assert data_path("data.path=one.csv,three.csv") == "one.csv,three.csv"


def test_what_stays_of_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_DATA", "here")
    assert data_path("data.path=${oc.env:MY_DATA}/x.csv") == "here/x.csv"
    assert data_path("data.path='a,b.csv'") == "a,b.csv"
    assert data_path('data.path="a,b.csv"') == "a,b.csv"
    assert compose_run(["data=text", "data.path=null"]).config.data.path is None
    assert as_path("parts/a-1.csv", False) == "parts/a-1.csv"
    assert [key for key in ("data.path", "data.train.cache_dir", "init_from", "model.path", "lr") if is_path(key)] == [
        "data.path", "data.train.cache_dir", "init_from",
    ]  # fmt: skip


def test_the_same_path_twice_and_two_paths() -> None:
    assert data_path("data.path=a=1", "data.path=a=1") == "a=1"
    assert prepare_command_line(["data.path=a=1", "data.path=b,2"], Path.cwd())[0].twice == [
        "data.path=a=1 and data.path=b,2: two values for data.path; leave one of them out"
    ]


@pytest.mark.train
def test_a_run_of_such_names_is_resumed_and_evaluated(capfd: pytest.CaptureFixture[str]) -> None:
    name, folder = 'it\'s "a=b", $5.csv', "out = 'x', $y"
    Path(name).write_text("a,b,y\n" + "".join(f"{i},{-i},{i % 2}\n" for i in range(40)))
    words = [
        "data=csv",
        f"data.path={name}",
        "model.hidden=[4]",
        "trainer.max_steps=2",
        f"output_dir={folder}",
    ]
    assert main(words) == 0
    capfd.readouterr()
    assert main(words) == 0
    said = "".join(capfd.readouterr())
    command = said[said.index("trainrun resume") :].partition(" trainer.max_steps=...;")[0]
    assert shlex.split(command) == ["trainrun", "resume", str(Path(folder).absolute())]
    assert main(["resume", folder, "trainer.max_steps=4", f"data.path={name}"]) == 0
    assert main(["evaluate", folder]) == 0
