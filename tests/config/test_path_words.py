"""A path in a word is taken as it is typed, whatever characters it holds."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from approved import refused
from pyarrow import csv

from trainrun.cli.main import main
from trainrun.config.argv import find_conf_dir, is_path_setting, quote_path
from trainrun.config.compose import compose_run, format_config, prepare_command_line
from trainrun.config.saved_config import load_config
from trainrun.data.readers.path_contents import list_data_options
from trainrun.data.readers.tables import csv_files
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, resolve_folder
from trainrun.runs.run import create_run
from trainrun.sweep.space import expand_grid

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
        (job,) = expand_grid(words.overrides)  # no sweep
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
        create_run(composition, [], RunDir(resolve_folder(place)))
    shutil.copytree(tmp_path / "x", tmp_path / "z")
    for folder, began in (("y", "x"), ("z", "z")):
        monkeypatch.chdir(tmp_path / folder)
        assert load_config(Path("run/config.yaml").absolute(), []).data.path == str(
            tmp_path / began / "table.csv"
        )


def test_a_comma_is_a_sweep_only_where_it_clearly_is_one() -> None:
    def jobs(word: str) -> list[str]:
        words, _ = prepare_command_line(["--multirun", "data=csv", word], Path.cwd())
        return [str(data_path(*job[1:])) for job in expand_grid(words.overrides)]

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
    assert quote_path("parts/a-1.csv", False) == "parts/a-1.csv"
    keys = ("data.path", "data.train.cache_dir", "init_from", "model.path", "lr")
    assert [key for key in keys if is_path_setting(key)] == ["data.path", "data.train.cache_dir", "init_from"]


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
    command = said[said.index("trainrun resume") :].partition(" trainer.max_steps=...")[0]
    assert shlex.split(command) == ["trainrun", "resume", str(Path(folder).absolute())]
    assert main(["resume", folder, "trainer.max_steps=4", f"data.path={name}"]) == 0
    assert main(["evaluate", folder]) == 0


FILES_AND_OPTIONS = {
    "photos/cat/1.jpg photos/dog/2.JPG photos/README.txt photos/notes.csv": "image_folder",
    "sets/train/cat/1.png sets/val/cat/2.png": "image_folder",
    "flat/1.jpg": "image_folder",
    "table.csv": "csv",
    "zipped.csv.gz": "csv",
    "parts/a.parquet parts/b.parquet parts/.hidden.csv parts/about.txt": "parquet",
    "lines.jsonl": "datasets",
    "rows.json": "datasets",
    "packed/a.jsonl.gz packed/b.jsonl.gz packed/README.md": "datasets",
    "rows.json.gz": "datasets",
    "table.feather": "datasets",
    "tabs.tsv.gz": "csv",
    "shards_and_index/0.tar shards_and_index/index.json": "webdataset",
    "drawings/1.png drawings/boxes.json": "image_folder",
    "saved/state.json saved/data.arrow": "datasets",
    "book.txt": "text",
    "numbers.npz": "arrays",
    "npy/x_train.npy npy/y_train.npy": "arrays",
    "mnist/train-images-idx3-ubyte.gz": "idx",
    "base/data.mdb": "lmdb",
    "shards/0.tar": "webdataset",
}


@pytest.mark.parametrize("names", FILES_AND_OPTIONS)
def test_files_name_the_option_that_reads_them(names: str) -> None:
    for name in names.split():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    assert list_data_options(Path(names.split()[0]).parts[0]) == [FILES_AND_OPTIONS[names]]


@pytest.mark.parametrize("key", ["data.path", "data"])
def test_a_path_alone_takes_the_option_that_reads_it(key: str) -> None:
    Path("a table.csv").touch()
    composition = compose_run([f"{key}=a table.csv"])
    assert (composition.choices["data"], composition.config.data.path) == ("csv", "a table.csv")
    assert any("data=csv" in note for note in composition.notes)


def test_a_path_of_a_text_takes_a_model_and_a_task_of_texts_too() -> None:
    Path("my book.txt").touch()
    choices = compose_run(["data.path=my book.txt"]).choices
    assert (choices["data"], choices["model"], choices["task"]) == ("text", "gpt", "language_modeling")
    assert compose_run(["data.path=my book.txt", "model=lstm"]).choices["model"] == "lstm"


def test_settings_of_the_option_stand_beside_the_path_and_jobs_of_a_sweep_look_for_themselves() -> None:
    for name in ("one.csv", "two.parquet"):
        Path(name).touch()
    config = compose_run(["data.train.target=price", "data.path=one.csv"]).config
    assert config.data.train["target"] == "price"
    words, _ = prepare_command_line(["--multirun", "data.path=one.csv,two.parquet"], Path.cwd())
    jobs = [
        compose_run(list(job[1:] if job[0] == "--multirun" else job)) for job in expand_grid(words.overrides)
    ]
    assert [job.choices["data"] for job in jobs] == ["csv", "parquet"]


def test_an_option_or_experiment_that_is_chosen_stays(tmp_path: Path) -> None:
    Path("table.csv").touch()
    assert compose_run(["data=text", "data.path=table.csv"]).choices["data"] == "text"
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/mine.yaml").write_text(
        "# @package _global_\n# Mine.\ndefaults:\n  - override /data: parquet\n"
    )
    assert compose_run(["experiment=mine", "data.path=table.csv"]).choices["data"] == "parquet"


def test_several_kinds_are_proposed_word_by_word() -> None:
    Path("mixed").mkdir()
    for name in ("1.jpg", "my labels.csv"):
        Path("mixed", name).touch()
    with refused(ConfigError, "data.path") as error:
        compose_run(["data.path=mixed"])
    ways = str(error.value).partition("write ")[2].split(" or ")
    choices = [compose_run(shlex.split(way)).choices["data"] for way in ways]
    assert sorted(choices) == ["csv", "image_folder"]


def test_a_path_of_no_known_kind_is_refused() -> None:
    Path("data.xyz").touch()
    with refused(ConfigError, "data.path"):
        compose_run(["data.path=data.xyz"])


REFERENCES = [
    ["data.path=${oc.env:TABLE}"],
    ["data.path=${oc.env:NO_TABLE,table.csv}"],
    ["run_name=table.csv", "data.path=${run_name}"],
    ["user.folder=.", "data.path=${user.folder}/table.csv"],
    ["data_path=${oc.env:TABLE}"],
]


@pytest.mark.parametrize("words", REFERENCES, ids=lambda words: words[-1])
def test_a_path_that_is_a_reference_takes_the_option_that_reads_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TABLE", "table.csv")
    Path("table.csv").touch()
    composition = compose_run(words)
    path = composition.config.data.train["path"]
    assert (composition.choices["data"], Path(path)) == ("csv", Path("table.csv"))


def test_a_reference_that_leads_nowhere_is_named() -> None:
    for path in ("${oc.env:NO_TABLE}", "${nothing}", "${data.train.path}"):
        with pytest.raises(ConfigError) as error:
            compose_run([f"data.path={path}"])
        assert [fault.startswith(f"data.path={path}: ") for fault in error.value.faults] == [True]


def test_a_name_that_equals_the_path_reads_no_data() -> None:
    Path("table.csv").touch()
    with pytest.raises(ConfigError) as error:
        compose_run(["data=digits", "run_name=table.csv", "data.path=table.csv"])
    assert error.value.faults[0].startswith("data.path=table.csv: ")


def test_data_of_the_users_own_may_read_a_file_below_the_path() -> None:
    words = ["data.train._target_=my.load", "data.train.file=${data.path}/a.csv", "data.path=folder"]
    assert compose_run(words).config.data.train["file"] == "folder/a.csv"


def test_a_path_of_the_environment_leads_from_where_a_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TABLE", "table.csv")
    Path("table.csv").touch()
    create_run(compose_run(["data.path=${oc.env:TABLE}", "seed=1"]), [], RunDir(resolve_folder("run")))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    data = load_config(tmp_path / "run/config.yaml", []).data
    assert data.train["path"] == str(tmp_path / "table.csv")


FRACTIONS = [i * 1.5 for i in range(40)]


@pytest.mark.parametrize(
    ("cells", "words", "task"),
    [
        (FRACTIONS, [], "regression"),
        ([*range(9000), *FRACTIONS], [], "regression"),
        (FRACTIONS, ["model.num_classes=1"], "regression"),
        ([i * 37 for i in range(40)], [], "classification"),
        ([f"{i}.0" for i in range(40)], [], "classification"),
        ([*FRACTIONS, "many"], [], "classification"),
        ([i % 5 / 2 for i in range(40)], [], "classification"),
        (["ab"[i % 2] for i in range(40)], [], "classification"),
        (FRACTIONS, ["task=classification"], "classification"),
        (FRACTIONS, ["task.label_smoothing=0.1"], "classification"),
        (FRACTIONS, ["experiment=tabular"], "classification"),
        (FRACTIONS, ["preset=fast"], "classification"),
        (FRACTIONS, ["model.num_classes=40"], "classification"),
        (FRACTIONS, ["data.num_classes=40"], "classification"),
        (FRACTIONS, ["data.sampling=balanced"], "classification"),
        (FRACTIONS, ["data.stratified=true", "data.folds=2", "data.fold=0"], "classification"),
        (FRACTIONS, ["class_weight=balanced"], "classification"),
        (FRACTIONS, ["checkpoint.monitor=val/acc"], "classification"),
        (FRACTIONS, ["data.train.target_dtype=class"], "classification"),
    ],
)
def test_the_task_of_a_table_is_chosen_by_its_target(cells: list[object], words: list[str], task: str):
    Path("t.csv").write_text("x,price\n" + "".join(f"1,{cell}\n" for cell in cells))
    composition = compose_run(["data.path=t.csv", "data.train.target=price", "model=mlp", *words])
    assert composition.choices["task"] == task
    assert any("price holds" in note for note in composition.notes) == (task == "regression")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_the_target_of_every_table_chooses_the_task(suffix: str, dtype: str) -> None:
    numbers = np.arange(40, dtype=dtype) / (1 if dtype == "int64" else 3)
    table = pa.table({"x": np.ones(40), "price": numbers.astype(dtype)})
    csv.write_csv(table, "t.csv") if suffix == "csv" else pq.write_table(table, "t.parquet")
    composition = compose_run([f"data.path=t.{suffix}", "data.train.target=price", "model=mlp"])
    assert composition.choices["task"] == ("classification" if dtype == "int64" else "regression")


def test_the_note_says_how_much_of_a_large_table_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_files, "CELLS_FOR_TASK", 4000)
    Path("t.csv").write_text("x,price\n" + "".join(f"1,{i / 4}\n" for i in range(9000)))
    notes = compose_run(["data.path=t.csv", "data.train.target=price"]).notes
    assert any("8,192 different real numbers in its first 8,192 rows" in note for note in notes)


@pytest.mark.parametrize("file", ["trainrun.yaml", "task/classification.yaml", "data/mine.yaml"])
def test_a_task_of_the_users_own_files_stays(file: str) -> None:
    Path("t.csv").write_text("x,price\n" + "".join(f"1,{cell}\n" for cell in FRACTIONS))
    text = (
        "# @package _global_\ndefaults: [csv@data]\ntask: {label_smoothing: 0.1}\n"
        if file == "data/mine.yaml"
        else (find_conf_dir() / file).read_text()
    )
    Path("conf/model").mkdir(parents=True)
    (Path("conf") / file).parent.mkdir(exist_ok=True)
    (Path("conf") / file).write_text(text)
    words = ["data=mine" if file == "data/mine.yaml" else "data=csv", "data.path=t.csv"]
    composition = compose_run([*words, "data.train.target=price"])
    assert composition.choices["task"] == "classification"
