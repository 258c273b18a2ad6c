from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from approved import refused

from trainrun.errors import ConfigError
from trainrun.sweep.jobs import format_file_name, open_sweep
from trainrun.sweep.space import expand_grid


def test_the_first_word_varies_slowest():
    assert expand_grid(["b=1,2", "fixed=0", "a=x,y"]) == [
        ("b=1", "fixed=0", "a=x"),
        ("b=1", "fixed=0", "a=y"),
        ("b=2", "fixed=0", "a=x"),
        ("b=2", "fixed=0", "a=y"),
    ]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ('precision="32","16"', ['precision="32"', 'precision="16"']),  # Hydra needs the quotes again
        ("lr=range(1,4)", ["lr=1", "lr=2", "lr=3"]),
        ("lr=choice(0.1,0.2)", ["lr=0.1", "lr=0.2"]),
        ("clip=0.5,null", ["clip=0.5", "clip=null"]),
        ("data.shape=[1,2],[3]", ["data.shape=[1,2]", "data.shape=[3]"]),
        ("data.shape=[1,2]", ["data.shape=[1,2]"]),
        ("+model.depth=1,2", ["+model.depth=1", "+model.depth=2"]),
        ("run_name='a, b'", ["run_name='a, b'"]),
        ("~data.test", ["~data.test"]),
        ("model=glob([m*p,c*])", ["model=cnn", "model=mlp"]),
        ("--config-dir=/x,y", ["--config-dir=/x,y"]),
        ("path=${oc.env:X},b.csv", ["path=${oc.env:X}", "path=b.csv"]),
        ("path=${oc.env:X,'/a'}/b,c", ["path=${oc.env:X,'/a'}/b", "path=c"]),
        ("paths=[${oc.env:X},b],[c]", ["paths=[${oc.env:X},b]", "paths=[c]"]),
    ],
)
def test_words_of_one_kind_each(word: str, values: list[str]):
    assert expand_grid([word]) == [(value,) for value in values]


@pytest.mark.parametrize(
    "word",
    [
        "lr=interval(0,1)",
        "model=glob(zz*)",
        "lr=glob(*)",
        "lr=interval(1)",
        "lr=interval(a,b)",
        "lr=choice()",
        "lr=tag(lin, interval(1,2))",
        "lr=range(3,3)",
        "lr=[1,2",
        "model.api_key=***",
    ],
)
def test_what_cannot_be_swept_is_refused(word: str):
    with refused(ConfigError) as caught:
        expand_grid([word.replace("***", "one,two")])
    assert str(caught.value).startswith(word)
    assert "\n" not in str(caught.value)


def test_folder_names_tell_what_varies_and_fit_a_file_system(tmp_path: Path):
    sweep = open_sweep([["data.path=/a/b", "lr=1,2", "model='x y',z"]], tmp_path / "s")
    assert [job.folder for job in sweep.jobs.values()] == [
        "0-lr=1-model=x_y",
        "1-lr=1-model=z",
        "2-lr=2-model=x_y",
        "3-lr=2-model=z",
    ]
    alone = open_sweep([["--config-dir=/x", "data=digits", "model=mlp"]], tmp_path / "alone")
    assert alone.jobs[0].folder == "0-data=digits"
    long, other = format_file_name(["key=" + "a" * 300]), format_file_name(["key=" + "a" * 299 + "b"])
    assert len(long) < 80
    assert long != other
    assert re.fullmatch(r"[A-Za-z0-9_.=+-]+", long)


def test_a_new_sweep_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    first, second = open_sweep([["lr=1,2"]], None), open_sweep([["lr=1,2"]], None)
    assert first.folder != second.folder
    assert re.fullmatch(
        r"sweeps/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-lr-[0-9a-f]{8}", str(first.folder.relative_to(tmp_path))
    )


def test_the_same_value_twice_is_one_job(tmp_path: Path):
    assert open_sweep([["lr=1,1,2"]], tmp_path).wanted == [0, 1]


def test_other_words_add_jobs_and_keep_the_numbers(tmp_path: Path):
    open_sweep([["lr=1,2", "seed=5"]], tmp_path)
    again = open_sweep([["seed=5", "lr=2,3"]], tmp_path)  # lr=2 seed=5 is known in another order
    assert again.wanted == [1, 2]
    assert [job.words for job in again.jobs.values()] == [
        ("lr=1", "seed=5"),
        ("lr=2", "seed=5"),
        ("seed=5", "lr=3"),
    ]
    assert again.swept_keys() == ["lr"]
    assert json.loads((tmp_path / "sweep.json").read_text())["calls"] == [
        ["lr=1,2", "seed=5"],
        ["seed=5", "lr=2,3"],
    ]


def test_secrets_are_in_no_file_and_in_the_words_of_the_jobs_all_the_same(tmp_path: Path):
    words = ["lr=1,2", "model.api_key=typed-1", "model.auth={token: typed-2, user: x}"]
    for _ in range(2):  # the second goes on with what is saved
        sweep = open_sweep([words], tmp_path)
        assert [job.words for job in sweep.jobs.values()] == expand_grid(words)
        assert sweep.wanted == [0, 1]
        text = (tmp_path / "sweep.json").read_text()
        assert "typed-" not in text
        assert "user: x" in text
    single = open_sweep([words[1:]], tmp_path / "single").jobs[0]
    assert "typed-" not in single.folder + single.label([])


def test_a_place_that_cannot_be_used_is_one_message(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with refused(ConfigError):
        open_sweep([["lr=1,2"]], tmp_path / "file" / "sweep")
    (tmp_path / "sweep.json").write_text("{")
    with refused(ConfigError):
        open_sweep([["lr=1,2"]], tmp_path)
