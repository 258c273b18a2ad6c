"""What a resume says: where it goes on, what is done again, and what is another than it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from trainrun.assemble.resumption import (
    describe_environment_changes,
    find_checkpoint,
    note_resume,
    read_last_logged_step,
)
from trainrun.assemble.run_plan import describe_data_files
from trainrun.cli.main import main
from trainrun.config.schema import RunConfig, replace_values
from trainrun.folder.run_folder import RunDir

pytestmark = pytest.mark.process

WORDS = [
    "model=mlp", "trainer.max_epochs=null", "trainer.val_check_interval=100", "monitor.log_every_n_steps=1",
    "monitor.hardware=false", "monitor.plots=false", "monitor.progress_bar=false", "checkpoint.every_n_train_steps=4",
    "trainer.num_threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at step 6 whose newest checkpoint is that of step 4, as `kill -9` leaves it."""
    run = tmp_path_factory.mktemp("resumption") / "run"
    assert main([*WORDS, "trainer.max_steps=6", f"output_dir={run}"]) == 0
    (newest,) = (run / "checkpoints").glob("step-00000006")
    newest.rename(newest.with_name(".tmp-step-00000006-kill"))
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "running"}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    return run


def test_a_resume_elsewhere(killed: Path, trainrun: Any) -> None:
    """In processes of their own: a fork of one that computed with two threads would wait for its second one."""
    resumed = trainrun("resume", str(killed), "trainer.num_threads=2", "trainer.max_steps=8")
    assert resumed.returncode == 0, resumed.stderr
    lines = resumed.stdout.splitlines()
    assert "continues from step 4 (step-00000004); at least 2 steps after it are done again" in lines
    (line,) = [line for line in lines if "saved with another" in line]
    assert line.startswith(
        "the checkpoint was saved with another num_threads (1, now 2): results may differ in their last"
    )
    rows = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 9))


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ({"num_threads": 9}, "(9, now 1): results may differ in their last bits from"),
        ({"precision": "bf16-mixed"}, "(bf16-mixed, now 32-true): results may differ from"),
        ({"world_size": 2}, "(2, now 1): random states (as of dropout) start again, and results may"),
        ({"world_size": 1}, ""),
    ],
)
def test_what_another_place_changes(then: dict[str, Any], told: str) -> None:
    now = {"num_threads": 1, "precision": "32-true", "world_size": 1}
    notes: list[str] = []
    run: Any = SimpleNamespace(
        checkpoints=SimpleNamespace(fingerprint=now), monitors=SimpleNamespace(note=notes.append),
        config=replace_values(RunConfig(), {"trainer.max_steps": None}),
    )  # fmt: skip
    loaded: Any = SimpleNamespace(manifest=SimpleNamespace(step=4, fingerprint=then), folder=Path("step-4"))
    note_resume(run, RunDir(Path("none")), loaded)
    assert [told in note for note in notes[1:]] == ([True] if told else [])


def test_a_new_run_from_one_that_stopped_early_trains_and_has_a_best_of_its_own(tmp_path: Path) -> None:
    words = [*(word for word in WORDS if "val_check" not in word), "trainer.val_check_interval=2", "seed=1",
             "trainer.early_stopping={enabled: true, patience: 1, min_delta: 9}"]  # fmt: skip
    assert main([*words, "trainer.max_steps=20", f"output_dir={tmp_path}/a"]) == 0
    first = json.loads((tmp_path / "a" / "status.json").read_text())
    assert (first["step"], first["reason"][:14]) == (4, "early stopping")
    more = [f"ckpt_path={tmp_path}/a", "optimizer.lr=9", f"output_dir={tmp_path}/b"]
    for begun in ([*words, "trainer.max_steps=5", *more], ["resume", f"{tmp_path}/b"]):
        assert main(begun) == 0
        status = json.loads((tmp_path / "b" / "status.json").read_text())
        best = json.loads((tmp_path / "b" / "checkpoints" / "best.json").read_text())["entries"]
        assert (status["step"], status["best_step"]) == (5, 5)
        assert [one["step"] for one in best] == [5]
        assert find_checkpoint(f"{tmp_path}/b") == find_checkpoint(f"{tmp_path}/b/checkpoints")
        (tmp_path / "b" / "status.json").write_text(json.dumps(status | {"state": "running"}))
        shutil.rmtree(tmp_path / "b" / "checkpoints")  # as after a kill before the first save
    assert main([*words, "trainer.max_steps=4", more[0], f"output_dir={tmp_path}/c"]) == 0
    ended = json.loads(
        (tmp_path / "c" / "status.json").read_text()
    )  # where it began, and measured all the same
    assert (ended["step"], ended["best_step"], ended["value"]) == (4, 4, first["metrics"][first["monitor"]])


def test_without_validation_data_the_best_stays_and_none_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        *(word for word in WORDS if "val_check" not in word),
        "checkpoint.keep_last=1",
        f"output_dir={run}",
    ]
    assert main([*words, "trainer.max_steps=4", "trainer.val_check_interval=4"]) == 0
    assert main(["resume", str(run), "trainer.max_steps=6", "data.val=null"]) == 0
    status = json.loads((run / "status.json").read_text())
    assert (status["monitor"], status["value"], status["best_step"]) == (None, None, None)
    assert sorted(path.name for path in run.glob("checkpoints/step-*")) == ["step-00000004", "step-00000006"]


def test_data_that_changed_between_two_lives(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a file that was cut behind a whole record; a copy elsewhere is no other data."""
    rows = [f"{i / 40},{i % 2}" for i in range(40)]
    for folder, text in (("a", rows), ("b", rows), ("c", [*rows[:-1], "0.5,1"])):
        Path(folder).mkdir()
        (Path(folder) / "x.csv").write_text("\n".join(["x,y", *text, ""]))
    words = [
        "data=csv",
        "data.train.target=y",
        "data.val=null",
        "task=classification",
        *WORDS,
        "trainer.max_steps=2",
    ]
    assert main([*words, "data.path=a/x.csv", "output_dir=run"]) == 0
    capsys.readouterr()
    assert main(["resume", "run", "data.train.path=b/x.csv", "trainer.max_steps=3"]) == 0
    assert "another" not in capsys.readouterr().out
    assert main(["resume", "run", "data.train.path=c/x.csv", "trainer.max_steps=4"]) == 2
    assert "ckpt_path=" in capsys.readouterr().err
    new = [*words[:-1], "trainer.max_steps=4", "data.path=c/x.csv", "ckpt_path=run", "output_dir=new"]
    assert main(new) == 0
    assert json.loads(Path("new/status.json").read_text())["step"] == 4


@pytest.mark.parametrize("where", ["a.csv", "folder"])
def test_changed_training_data_is_refused_and_files_beside_it_are_not(workdir: Path, where: str) -> None:
    table = Path(where) if where.endswith(".csv") else Path(where) / "part.csv"
    table.parent.mkdir(exist_ok=True)
    rows = "".join(f"{i / 40},{i % 2}\n" for i in range(40))
    table.write_text(f"x,y\n{rows}")
    words = ["data=csv", "data.train.target=y", f"data.path={where}", *WORDS, "output_dir=run"]
    assert main([*words, "trainer.max_steps=2"]) == 0
    (table.parent / "notes.txt").write_text("more")
    table.touch()
    assert main(["resume", "run", "trainer.max_steps=3"]) == 0
    table.write_text(f"x,y\n{rows}0.5,1\n")
    assert main(["resume", "run", "trainer.max_steps=4"]) == 2
    assert json.loads((Path("run") / "status.json").read_text())["step"] == 3
    table.write_text(f"x,y\n{rows}")
    assert main(["resume", "run", "trainer.max_steps=4"]) == 0


def pictures(folder: Path, count: int = 6) -> None:
    for label in "ab":
        (folder / label).mkdir(parents=True)
        for number in range(count):
            color = (40 * number, 200 * (label == "a"), 7)
            Image.new("RGB", (8, 8), color).save(folder / label / f"{number}.png")


def test_changed_pictures_are_refused_and_files_beside_them_are_not(workdir: Path) -> None:
    pictures(Path("photos"))
    size = [
        "data=image_folder",
        "data.path=photos",
        "data.shape=[3,8,8]",
        "data.batch_size=4",
        "model.hidden=[4]",
    ]
    words = [*size, "monitor.plots=false", "output_dir=run"]
    assert main([*words, "trainer.max_steps=2"]) == 0
    Path("photos/README.md").write_text("more")
    assert main(["resume", "run", "trainer.max_steps=3"]) == 0
    Path("photos/a/5.png").rename("photos/a/00.png")  # other samples at the same positions
    assert main(["resume", "run", "trainer.max_steps=4"]) == 2
    Path("photos/a/00.png").rename("photos/a/5.png")
    assert main(["resume", "run", "trainer.max_steps=4"]) == 0


def test_changed_data_of_a_named_set_is_refused(workdir: Path) -> None:
    words = ["data=custom", "model.hidden=[4]", "data.val=null", "monitor.plots=false", "output_dir=run"]
    for name in "ab":
        Path(f"{name}.csv").write_text("x,y\n" + "".join(f"{i / 40},{i % 2}\n" for i in range(40)))
        target = "trainrun.data.readers.tables.csv_files.load"
        words += [f"data.train.{name}._target_={target}", f"data.train.{name}.path={name}.csv"]
        words += [f"data.train.{name}.target=y", f"data.train.{name}.val_fraction=0"]
    assert main([*words, "trainer.max_steps=2"]) == 0
    with Path("b.csv").open("a") as file:
        file.write("0.5,1\n")
    assert main(["resume", "run", "trainer.max_steps=3"]) == 2


def test_files_of_equal_name_that_change_places_are_refused(workdir: Path) -> None:
    for folder, count in (("1", 40), ("2", 30)):
        Path("p", folder).mkdir(parents=True)
        Path("p", folder, "t.csv").write_text("x,y\n" + "".join(f"{i / 40},{i % 2}\n" for i in range(count)))
    words = ["data=csv", "data.train.target=y", "data.path='p/*/t.csv'", *WORDS, "output_dir=run"]
    assert main([*words, "trainer.max_steps=2"]) == 0
    Path("p").rename("elsewhere")
    assert main(["resume", "run", "data.path='elsewhere/*/t.csv'", "trainer.max_steps=3"]) == 0
    for old, new in (("1", "3"), ("2", "1"), ("3", "2")):
        Path("elsewhere", old).rename(Path("elsewhere", new))
    assert main(["resume", "run", "trainer.max_steps=4"]) == 2


@pytest.mark.parametrize("path", [None, "nothing", "many", "*.none", 3])
def test_data_that_is_not_looked_at(workdir: Path, path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("many").mkdir()
    for name in "abc":
        (Path("many") / name).touch()
    assert describe_data_files("many/[ab]").startswith("2 files, 0 bytes, ")
    monkeypatch.setattr("trainrun.assemble.run_plan.MOST_FILES", 2)
    assert describe_data_files(path) == ""


def test_differences() -> None:
    assert describe_environment_changes(
        {"torch": "2.12", "ranks": 1, "gone": 1}, {"torch": "2.13", "ranks": 1, "new": 1}
    ) == ("torch (2.12, now 2.13)")


@pytest.mark.parametrize(
    ("text", "step"),
    [("", -1), ('{"step": 3}\n{"step": 5}\n{"st', 5), ('{"step": 3}\nbroken\n', -1), ('{"kind": "x"}\n', -1)],
)
def test_the_last_step_of_a_file_that_was_cut(text: str, step: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_last_logged_step(path) == -1
    path.write_text(text)
    assert read_last_logged_step(path) == step
    path.write_text('{"step": 1}\n' * 9000 + text)
    assert read_last_logged_step(path) == (max(1, step) if "broken" not in text else -1)


def test_a_number_type_that_was_chosen_is_no_other_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert main(["precision=auto", "trainer.max_steps=4", f"hydra.run.dir={folder}"]) == 0
    assert main(["resume", str(folder), "trainer.max_steps=6"]) == 0
    assert "another precision" not in "".join(capsys.readouterr())
