"""From words to a checked config: what is chosen, what wins, and what every mistake says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from approved import approve, approve_error, refused
from things import faults_of
from yaml import safe_load

from trainrun.cli.main import main
from trainrun.config.argv import find_conf_dir, list_options
from trainrun.config.compose import compose_run, format_config, prepare_command_line
from trainrun.config.saved_config import apply_overrides, load_config, load_saved_values
from trainrun.config.schema import DataConfig, RunConfig, replace_values
from trainrun.errors import ConfigError


@pytest.mark.parametrize("preset", list_options("preset", [find_conf_dir()]))
@pytest.mark.parametrize("order", [0, 1])
def test_the_user_beats_a_preset_in_any_order(preset: str, order: int) -> None:
    words = [f"preset={preset}", "precision=64", "data.batch_size=7", "monitor=none", "trainer.max_epochs=5"]
    config = compose_run(words if order else words[::-1]).config
    assert config.precision.mode == "64-true"
    assert config.data.batch_size == 7
    assert config.trainer.max_epochs == 5
    assert not config.monitor.progress_bar


def test_presets_do_what_their_names_say() -> None:
    fast = compose_run(["preset=fast"]).config
    lean = compose_run(["preset=memory-limited"]).config
    debug = compose_run(["preset=debug"]).config
    most = compose_run(["preset=max-perf"]).config
    assert (fast.precision.mode, fast.trainer.channels_last) == ("auto", True)
    assert (fast.data.batch_size, fast.scheduler) == (
        32,
        compose_run([]).config.scheduler,
    )  # the same training
    assert lean.data.batch_size * lean.trainer.accumulate_grad_batches == 32
    assert lean.precision.mode == "auto"  # no type that the machine emulates
    assert (lean.data.num_workers, lean.data.max_sequence_length, lean.checkpoint.keep_last) == (0, None, 1)
    assert (debug.trainer.deterministic, debug.monitor.log_every_n_steps, debug.trainer.limit_train_batches) == (
        True, 1, 10,
    )  # fmt: skip
    assert (most.trainer.compile.scope, most.precision.matmul) == ("auto", "high")


@pytest.mark.parametrize(
    ("typed", "mode"),
    [("32", "32-true"), ("16", "16-mixed"), ("64", "64-true"), ("bf16", "bf16-mixed"), ("fp16", "16-mixed")],
)
def test_precision_by_the_names_people_type(typed: str, mode: str) -> None:
    assert compose_run([f"precision={typed}"]).config.precision.mode == mode


def test_other_trainers_names_are_translated_and_said() -> None:
    composition = compose_run(
        ["strategy=none", "gradient_accumulation_steps=4", "lr=0.5", "ema.decay=0.9", "ema=true"]
    )
    config = composition.config
    assert config.parallel.mode == "single"
    assert config.trainer.accumulate_grad_batches == 4
    assert config.optimizer["lr"] == 0.5
    assert (config.trainer.ema.enabled, config.trainer.ema.decay) == (True, 0.9)
    assert "lr=0.5 is read as optimizer.lr=0.5" in composition.notes


def test_an_entry_by_name_is_taken_away_by_null() -> None:
    words = ["monitor.mine._target_=a.B", "hook.h._target_=a.B", "transform.t._target_=a.B"]
    config = compose_run([*words, "monitor.mine=null", "hook.h=null", "transform.t=null"]).config
    assert (config.monitor.listeners, config.hook, config.transform) == ({}, {}, {})


def test_no_tracker_means_that_of_an_option_too() -> None:
    words = ["monitor=tensorboard", "monitor.mine=a.B"]
    assert list(compose_run([*words, "monitor.tracker=null"]).config.monitor.listeners) == ["mine"]
    assert list(compose_run([*words, "monitor.tracker=csv"]).config.monitor.listeners) == [
        "tensorboard",
        "csv",
        "mine",
    ]


def test_trackers_are_keys_of_monitor_in_saved_configs_too(tmp_path: Path) -> None:
    words = ["monitor=tensorboard", "monitor.mine=a.B", "monitor.mine.at=3", "hook.h=a.B"]
    saved, path = format_config(compose_run(words).config), tmp_path / "config.yaml"
    assert "listeners" not in saved
    path.write_text(saved)
    assert load_config(path, []) == compose_run(words).config
    later = load_config(path, ["monitor.mine=null", "hook.h=null", "monitor.tensorboard.log_dir=x"])
    assert list(later.monitor.listeners) == ["tensorboard"]
    assert later.monitor.listeners["tensorboard"]["log_dir"] == "x"
    assert later.hook == {}
    with refused(ConfigError, "monitor.plot=null", "monitor.plots"):
        load_config(path, ["monitor.plot=null"])


def test_a_misspelt_setting_of_monitor_in_a_file_is_no_tracker(tmp_path: Path) -> None:
    (tmp_path / "conf" / "monitor").mkdir(parents=True)
    (tmp_path / "conf" / "monitor" / "own.yaml").write_text("# own\nlog_every_n_step: 3\n")
    with refused(ConfigError, "monitor.log_every_n_steps"):
        compose_run(["monitor=own"], tmp_path)


@pytest.mark.parametrize("word", ["optimizer.lr=0.1", "scheduler.warmup_steps=5", "optimizer.b.lr=0.1"])
def test_what_stands_beside_optimizers_by_name_and_is_for_none_of_them_is_refused(word: str) -> None:
    named = ["optimizer.a._target_=torch.optim.SGD", "optimizer.a.params=*", "step._target_=my.step"]
    schedule = ["scheduler=custom", "scheduler.a._target_=torch.optim.lr_scheduler.StepLR"]
    with refused(ConfigError):
        compose_run(["optimizer=custom", *named, *schedule, word])
    compose_run(["optimizer=custom", *named, *schedule])


@pytest.mark.parametrize(
    ("words", "epochs"),
    [
        ("seed=1", 20),
        ("trainer.max_steps=5000", None),
        ("trainer.max_duration=1e6sample", None),
        ("trainer.max_duration=2h", 20),  # or cosine would have no length
        ("trainer.max_time=10min", 20),
        ("trainer.max_steps=5000 trainer.max_epochs=20", 20),
        ("trainer.max_steps=5000 experiment=own", 20),
        ("trainer.max_steps=5000 preset=debug", 2),
        ("trainer.max_steps=null", 20),
    ],
)
def test_a_length_that_is_named_lifts_the_epochs_that_nobody_set(
    words: str, epochs: int | None, tmp_path: Path
) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(
        "# @package _global_\ntrainer: {max_epochs: 20}\n"
    )
    config = compose_run(words.split(), tmp_path).config
    assert config.trainer.max_epochs == epochs


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_set_of_the_data_may_be_named_by_its_dotted_path_alone(split: str) -> None:
    words = [f"data.{split}.count=3", f"data.{split}=my_data.points", f"data.{split}.seed=5"]
    found = getattr(compose_run(words).config.data, split)
    assert found == {"_target_": "my_data.points", "count": 3, "seed": 5}


def test_a_setting_of_what_is_switched_off_by_its_own_word_is_fine() -> None:
    config = compose_run(["trainer.ema=false", "trainer.ema.decay=0.9"]).config
    assert (config.trainer.ema.enabled, config.trainer.ema.decay) == (False, 0.9)


def test_what_another_setting_needs_may_stand_beside_it_in_a_sweep() -> None:
    config = compose_run(["scheduler.lr_scaling=none", "scheduler.base_batch_size=512"]).config
    assert config.scheduler["base_batch_size"] == 512


def test_a_recipe_may_switch_off_what_its_base_switches_on(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    base = "trainer: {early_stopping: {enabled: true, patience: 7}, ema: {enabled: true, decay: 0.99}}"
    off = "defaults: [base]\ntrainer: {early_stopping: {enabled: false}, ema: {enabled: false}}"
    for name, text in (("base", base), ("ablate", off)):
        (tmp_path / "conf" / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    trainer = compose_run(["experiment=ablate"], tmp_path).config.trainer
    assert (trainer.early_stopping.enabled, trainer.early_stopping.patience) == (False, 7)


@pytest.mark.parametrize("path", ["shard-{000..009}.tar", '"shard-{000..009}.tar"'])
def test_a_path_with_a_range_of_shards_needs_no_quotes_of_its_own(path: str) -> None:
    assert compose_run(["data=webdataset", f"data.path={path}"]).config.data.path == "shard-{000..009}.tar"


def test_a_folder_conf_beside_the_user_adds_and_shadows(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("# mine\n_target_: my_net.Net\nwidth: 3\n")
    (tmp_path / "conf" / "model" / "cnn.yaml").write_text("# my own\n_target_: my_net.Cnn\n")
    assert compose_run(["model=mine", "model.depth=2"], tmp_path).config.model == {
        "_target_": "my_net.Net", "width": 3, "depth": 2,
    }  # fmt: skip
    assert compose_run(["model=cnn"], tmp_path).config.model == {"_target_": "my_net.Cnn"}


def test_all_faults_are_listed_at_once() -> None:
    faults = faults_of(
        "model=cnnn",
        "precison=16-mixed",
        "data.batchsize=4",
        "data.batch_size=abc",
        "trainer.gradient_clip_val=-1",
    )
    assert len(faults) == 5
    assert faults[0].startswith("model=cnnn: there is no such model. Did you mean cnn?")
    assert faults[1] == "precison=16-mixed: no such group or setting. Did you mean precision?"
    assert faults[2] == "data.batchsize=4: no such setting. Did you mean data.batch_size?"
    assert faults[3] == "data.batch_size=abc: must be a whole number, 1 or more"
    assert faults[4] == "trainer.gradient_clip_val=-1: must be a number, 0 or more, or null"


@pytest.mark.parametrize(
    "word",
    [
        "model.hiden=3",
        "model.freze='a.*'",
        "trainer.max_epoch=3",
        "trainer.val_check_interval=1.5",
        "trainer.max_time=soon",
        "trainer.limit_train_batches=0",
        "trainer.nan_policy=stopp",
        "trainer.ema.decay=1",
        "scheduler.warmup_steps=0.1",
        "optimizer.lr=1,2",
        "data.num_workers=-1",
        "optimizer.lr=fast",
        "scheduler.lr_scaling=linea",
        "data=custom",
        "model=mlp,",
        "data.batch_size",
        "=3",
        "optimizer.lr = 3",
        "run_name=a(b",
        "+trainer.max_epoch=3",
        "+nothing=3",
        "parallel.stop_grace_seconds=5",
        "trainer=fast",
        "trainer={max_epoch:3}",
        "trainer.max_epochs.x=3",
        "model=CNN",
        "model=[1]",
        "+model/foo=bar",
        "+foo/bar=baz",
        "monitor.tracker=true",
        "data.val=none",
        "data.train=points",
        "data.trian._target_=my.load",
        "data.transform._targt_=my.flip",
        "data.augment=flip",
        "data.augment.flip=1",
        "data.shape=3",
        "data.shape=[a]",
        "data.batch_size=${nope}",
        "data.batch_size=${model.hidden}",
        "data.path=${oc.env:NO_SUCH_NAME}",
        "optimizer/lr=3",
        "model.hidden[0]=3",
        "checkpoint.monitor=",
        "trainer.fast_dev_run=2.5",
        "output_dir=",
        "output_dir=runs/${seed}",
        "hydra.launcher=joblib",
        "~model.hiden",
        "~model.hidden=3",
        "~model=cnn",
        "",
        "=",
        "~trainer.max_epochs",
        "--foo",
        "--multirn",
        "-lr=3",
        "--cfg=jobs",
        "--config-dir",
        "trainer.compile=maybe",
    ],
)
def test_a_mistake_names_the_key_and_the_way_out(word: str) -> None:
    faults = faults_of(word)
    assert len(faults) == 1
    approve(faults[0])
    assert "\n" not in faults[0]
    assert "+" not in faults[0].replace("--", "")


def test_a_preset_without_what_it_sets_something_of_names_the_way() -> None:
    (fault,) = faults_of("preset=memory-limited", "data.global_batch_size=64")
    assert fault.endswith("sets the accumulation itself; use trainer.accumulate_grad_batches=1")


def test_going_back_to_a_checkpoint_needs_one() -> None:
    for name in ("enabled", "save_last"):
        (fault,) = faults_of("trainer.nan_policy=rollback", f"checkpoint.{name}=false")
        assert fault.startswith(f"checkpoint.{name}=false: trainer.nan_policy=rollback needs checkpoints")


def test_a_config_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    config = compose_run(
        ["preset=max-perf", "run_name=012", "data=csv", "data.path=no", "trainer.max_time=01:00:00:00"]
    ).config
    path = tmp_path / "config.yaml"
    path.write_text(format_config(config))
    assert load_config(path, []) == config


TEXTS = ("1e6", "1_000", "012", "1:20", "yes", "off", "y", "N", "null", "", ".nan", "inf", "2026-01-01", "a: b", "a #b",
         "- x", "&a", "a\nb", " a ", "ünï", "😀", "\x85", "'", '"', "x" * 300, "${nothing", "${seed}", "\\${seed}",
         "$5", "{}")  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_from_a_saved_config_as_it_was_written(text: str, tmp_path: Path) -> None:
    shared = [text, 1.5, None]
    config = replace_values(compose_run([]).config, {"user": {"text": text, "more": shared, "again": shared}})
    saved = format_config(config)
    assert "*" not in saved  # no alias, which reading refuses
    if "${" not in text:
        assert safe_load(saved)["user"]["text"] == text
    (tmp_path / "config.yaml").write_text(saved, encoding="utf-8")
    assert load_config(tmp_path / "config.yaml", []).user == config.user


def test_a_path_that_is_not_utf_8_is_written() -> None:
    config = replace_values(compose_run([]).config, {"user": {"path": "a\udcff"}})
    assert '  path: "a\\uDCFF"\n' in format_config(config)


def test_single_values_of_a_saved_run_can_change_groups_cannot(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(format_config(compose_run([]).config))
    assert load_config(path, ["trainer.max_epochs=40", "lr=0.1"]).trainer.max_epochs == 40
    assert load_config(path, ["model.hidden=[3]"]).model["hidden"] == [3]
    with refused(ConfigError):
        load_config(path, ["model=cnn"])
    assert load_config(path, ["precision=bf16"]).precision.mode == "bf16-mixed"
    with refused(ConfigError, "trainer.max_epochs"):
        load_config(path, ["trainer.max_epoch=1"])
    path.write_text("- a list\n")
    with refused(ConfigError):
        load_config(path, [])


def test_a_path_that_nothing_reads_is_refused_and_a_saved_run_follows_a_new_one(tmp_path: Path) -> None:
    with refused(ConfigError, "data.path"):
        compose_run(["data.path=mine.xyz"])
    own = ["data.train._target_=my.load", "data.train.place=${data.path}", "data.path=mine.csv"]
    assert compose_run(own).config.data.train["place"] == "mine.csv"
    path = tmp_path / "config.yaml"
    path.write_text(format_config(compose_run(["data=csv", "data.path=old.csv"]).config))
    data = load_config(path, ["data.path=new.csv"]).data
    assert (data.path, data.train["path"], data.val["path"]) == ("new.csv", "new.csv", "new.csv")
    assert data.train["val_path"] is None
    with refused(ConfigError, "data.train.val_path=new.csv"):
        load_config(path, ["data.path=new.csv", "data.train.path=x"])
    path.write_text(format_config(compose_run(["data=text"]).config))
    data = load_config(path, ["data.path=book.txt"]).data
    assert (data.train["path"], data.train["val_path"], data.val["path"]) == ("book.txt", None, "book.txt")


def test_validation_of_a_saved_run_follows_what_it_refers_to_unless_it_was_told_otherwise(
    tmp_path: Path,
) -> None:
    path, words = tmp_path / "config.yaml", ["data=text", "data.val.max_bytes=9"]
    path.write_text(format_config(compose_run(words).config))
    new = [
        "data.train.val_path=v.txt",
        "data.train.max_bytes=7",
        "data.train.val_fraction=0.2",
        "data.train.path=p",
    ]
    composed, loaded = compose_run([*words, *new]).config.data, load_config(path, new).data
    assert (composed.train, composed.val) == (loaded.train, loaded.val)
    assert (loaded.val["val_path"], loaded.val["max_bytes"], loaded.val["val_fraction"]) == ("v.txt", 9, 0.2)
    assert loaded.val["path"] is None
    assert load_config(path, [*new, "data.val.val_fraction=0.3"]).data.val["val_fraction"] == 0.3


OWN = ["data.train._target_=my.load", "data.val._target_=my.load"]


@pytest.mark.parametrize(
    ("words", "val"), [(["data=csv", "data.name=houses"], "z"), ([*OWN, "data.val.target=y"], "y")]
)
def test_a_saved_set_follows_a_new_value_only_where_it_refers_to_it(
    words: list[str], val: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(format_config(compose_run([*words, "data.path=t.csv", "data.train.target=y",
                                             "+data.train.file=${data.path}"]).config))  # fmt: skip
    data = load_config(path, ["data.train.target=z"]).data
    assert (data.train["target"], data.val["target"]) == ("z", val)
    data = load_config(path, ["data.train.target=z", "data.val.target=y"]).data
    assert (data.train["target"], data.val["target"]) == ("z", "y")


def test_a_saved_config_keeps_references_until_their_value_changes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    words = ["data=csv", "data.path=t.csv", "scheduler=onecycle", "user.size=${data.batch_size}"]
    config = compose_run(
        [*words, "+user.list=[${seed}]", "+user.text=a-${seed}", "+user.all=${data.train}"]
    ).config

    def saved(config: RunConfig) -> Any:
        path.write_text(format_config(config))
        return safe_load(path.read_text())

    values = saved(config)
    assert values["data"]["val"]["path"] == "${data.path}"
    assert values["scheduler"]["max_lr"] == "${optimizer.lr}"
    assert (values["user"]["list"], values["user"]["text"], values["user"]["all"]) == (
        [42], "a-42", config.data.train
    )  # fmt: skip
    assert load_config(path, []) == config
    later = load_config(path, ["lr=0.5", "data.batch_size=7"])
    assert (later.scheduler["max_lr"], later.user["size"]) == (0.5, 7)
    values = saved(replace_values(later, {"data.batch_size": 9}))
    assert (values["user"]["size"], values["scheduler"]["max_lr"]) == (7, "${optimizer.lr}")
    own = load_config(path, ["data.train=my_data.Mine"]).data
    assert own.train == {"_target_": "my_data.Mine"}
    assert own.val["val_fraction"] == config.data.train["val_fraction"]


@pytest.mark.parametrize(
    "text",
    ["x: ${user.y}", "x: ${user.x}", "x: ${user}", "x: a${seed}", "x: ['${seed}']", "x: ${oc.decode:1}",
     "x: ${oc.env:HOME}${seed}", "a: {b: 1}\n  x: ${user.a}"],
)  # fmt: skip
def test_a_saved_config_with_a_reference_that_no_run_saves_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{_target_: a.B}}\nseed: 1\nuser:\n  {text}\n")
    with refused(ConfigError, "user.x"):
        load_saved_values(path)


@pytest.mark.parametrize("folder", ["train", "y"])
def test_a_new_path_is_put_in_where_the_old_one_was_a_path(folder: str, tmp_path: Path) -> None:
    words = ["data=csv", f"data.path={folder}", "data.train.target=y", "+data.train.file=${data.path}"]
    path = tmp_path / "config.yaml"
    path.write_text(format_config(compose_run(words).config))
    data = load_config(path, ["data.path=val"]).data
    assert [data.train[name] for name in ("path", "file", "target")] == ["val", "val", "y"]
    assert [data.val[name] for name in ("path", "target")] == ["val", "y"]


def test_a_new_path_replaces_that_of_a_variable_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    monkeypatch.setenv("OWN_TABLE", "old.csv")
    words = ["data=csv", "data.path=${oc.env:OWN_TABLE}", "data.train.target=y"]
    path.write_text(format_config(compose_run(words).config))
    assert load_config(path, []).data.path == "old.csv"
    monkeypatch.delenv("OWN_TABLE")
    assert load_config(path, ["data.path=new.csv"]).data.path == "new.csv"


def test_training_tells_of_a_validation_that_a_new_path_does_not_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"

    def load(*words: str) -> DataConfig:
        return apply_overrides(load_saved_values(path), path, ["data.path=new", *words], "val").data

    path.write_text(format_config(compose_run(["data=csv", "data.path=a", "data.train.val_path=b"]).config))
    assert load("data.train.val_path=c").val["val_path"] == "c"
    assert capsys.readouterr().err == ""  # a command that measures says itself what it reads
    assert load_config(path, ["data.path=new"]).data.val["val_path"] == "b"
    approve_error(capsys.readouterr().err, "data.path")
    path.write_text(format_config(compose_run([*OWN, "data.train.file=${data.path}", "data.path=a"]).config))
    with refused(ConfigError, "data.val"):
        load()


def test_a_warmup_beyond_the_named_length_is_refused_with_the_other_mistakes() -> None:
    assert faults_of("trainer.max_steps=50", "scheduler.warmup_steps=100", "optimizer.lr=-1") == (
        "scheduler.warmup_steps=100: is longer than the run (trainer.max_steps=50); use fewer steps",
        "optimizer.lr=-1: must be a number, 0 or more",
    )
    assert compose_run(["trainer.max_steps=50", "scheduler.warmup_steps=50"]).config.trainer.max_steps == 50


def test_a_warmup_that_is_named_replaces_the_one_of_the_option(tmp_path: Path) -> None:
    scheduler = compose_run(
        ["scheduler=warmup_cosine", "scheduler.warmup_steps=7"], tmp_path
    ).config.scheduler
    assert (scheduler["warmup_steps"], scheduler["warmup_ratio"]) == (7, None)
    kept = compose_run(["scheduler=warmup_cosine"], tmp_path).config.scheduler
    assert (kept["warmup_steps"], kept["warmup_ratio"]) == (0, 0.05)
    both = compose_run(["scheduler.warmup_steps=7", "scheduler.warmup_ratio=0.1"], tmp_path).config.scheduler
    assert (both["warmup_steps"], both["warmup_ratio"]) == (7, 0.1)  # refused where it is built


def test_help_shows_the_options_of_every_folder_that_a_run_would_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in (("conf/model", "beside"), ("mine/model", "elsewhere"), ("mine/recipe", "long")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.yaml").write_text(f"# Of {folder}.\n_target_: own.Net\n")
    (tmp_path / "mine/model/mlp.yaml").write_text("# Another mlp.\n")
    assert main(["--help", "model", "--config-dir", "mine"]) == 0
    said = capsys.readouterr().out
    for line in (
        "beside           Of conf/model.",
        "elsewhere        Of mine/model.",
        "mlp              Another",
    ):
        assert line in said
    assert main(["--help", "--config-dir=mine"]) == 0
    assert "recipe       long" in capsys.readouterr().out
    assert main(["--help", "recipe", "--config-dir=mine"]) == 0
    assert "long             Of mine/recipe." in capsys.readouterr().out
    assert main(["--help", "recipe"]) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.lr=1", "optimizer.lr=2"],
        ["epochs=3", "trainer.max_epochs=4"],
        ["ema=true", "trainer.ema.enabled=false"],
        ["model=mlp", "model=cnn"],
        ["model=a.Net", "model._target_=a.Other"],
        ["hydra.run.dir=a", "hydra.run.dir=b"],
        ["hydra.run.dir=a", "output_dir=b"],
    ],
)
def test_two_values_for_one_key_are_refused_by_name(
    workdir: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 2
    approve_error(capsys.readouterr().err)


def test_the_same_value_twice_is_no_fault_and_a_program_may_add_to_its_words() -> None:
    assert compose_run(["epochs=3", "trainer.max_epochs=4"]).config.trainer.max_epochs == 4
    assert (
        prepare_command_line(["epochs=3", "trainer.max_epochs=3", "hydra.run.dir=a", "output_dir=a"], Path())[
            0
        ].twice
        == []
    )
    assert compose_run(["epochs=3", "trainer.max_epochs=3", "hydra.run.dir=a", "output_dir=a"]).own == {
        "hydra.run.dir": "a"
    }


def test_a_wrong_value_has_one_line() -> None:
    (fault,) = faults_of("parallel.devices=0")
    assert fault.startswith("parallel.devices=0: must be a whole number, 1 or more")


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_names_that_our_networks_do_not_know_are_found_before_anything_starts(model: str) -> None:
    faults = sorted(faults_of(f"model={model}", "model.norm=bacth", "model.init=zero", "model.dropout=1"))[
        ::-1
    ]
    assert faults[0].startswith("model.norm=bacth: must be one of none, batch, layer. Did you mean batch?")
    assert faults[1].startswith("model.init=zero: must be one of default, he, xavier")
    assert faults[2] == "model.dropout=1: must be a number, 0 or more and below 1"
    assert compose_run(["model=own.Net", "+model.norm=rms"]).config.model["norm"] == "rms"


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("trainer.compile=foo", "trainer.compile=foo: must be one of off, model"),
        ("epochs=abc", "epochs=abc: must be a whole number"),
        ("trainer.channels_last=maybe", "trainer.channels_last=maybe: must be true or false"),
        ("trainer.benchmark=2", "trainer.benchmark=2: must be true or false"),
        ("checkpoint=2", "checkpoint=2: must be true or false"),
        ("ema=maybe", "ema=maybe: must be true or false"),
        ("trainer.num_threads=100000", "trainer.num_threads=100000: this machine has"),
        ("model.hidden=abc", "model.hidden=abc: must be a list of whole numbers"),
    ],
)
def test_a_wrong_value_is_told_in_the_word_that_was_typed(word: str, fault: str) -> None:
    (found,) = faults_of(word)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("word", "value"), [("on", True), ("No", False), ("1", True), ("0", False), ("TRUE", True)]
)
def test_every_word_for_true_and_false(word: str, value: bool) -> None:
    assert compose_run([f"trainer.channels_last={word}"]).config.trainer.channels_last is value


def test_a_wrong_word_for_a_saved_run_is_told_as_typed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(format_config(compose_run([]).config))
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["compile=foo", "trainer.channels_last=2", "lr=-1"])
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        "trainer.channels_last=2",
        "compile=foo",
        "lr=-1",
    ]


def test_help_of_a_section_an_option_and_everything(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main(["--help", *words]) == 0
        return capsys.readouterr().out

    assert "trainer.nan_policy=stop " in said("trainer")
    assert "(off, model, regional, step, auto)" in said("trainer.compile")
    assert "data.batch_size=32 " in said("data")
    assert "  model.size=0.8M\n" in said("model=gpt")
    everything = said("all")
    assert "  task.loss_chunks=auto " in everything
    assert "checkpoint.async_save=true" in everything
    assert "  data.train.block_size=256\n" in everything
    (line,) = said("trainer.max_time").splitlines()
    assert line.startswith("trainer.max_time=null ")
    for typed, meant in (("model=gtp", "model=gpt"), ("trainer.max_tme", "trainer.max_time")):
        assert main(["--help", typed]) == 2
        assert f"Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("option", list_options("data", [find_conf_dir()]))
def test_a_data_option_changes_no_setting_of_the_training(option: str) -> None:
    words = [f"data={option}", *(["data.train._target_=my_data.Train"] if option == "custom" else [])]
    found, default = (dataclasses.asdict(compose_run(given).config) for given in (words, []))
    named = {"optimizer", "scheduler", "precision", "parallel", "trainer", "checkpoint", "monitor"}
    assert {name: found[name] for name in named} == {name: default[name] for name in named}


@pytest.mark.parametrize(
    ("written", "scope"), [("false", "off"), ("true", "model"), ("off", "off"), ("auto", "auto")]
)
def test_a_recipe_may_write_a_switch_for_a_choice(written: str, scope: str, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    recipe = f"# @package _global_\ntrainer:\n  compile:\n    scope: {written}\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(recipe)
    assert compose_run(["experiment=mine"], tmp_path).config.trainer.compile.scope == scope


@pytest.mark.parametrize(
    "word",
    ["load_best_model_at_end=true", "num_nodes=2"],
)
def test_a_known_name_of_another_framework_gets_its_answer(word: str) -> None:
    (fault,) = faults_of(word)
    assert fault.startswith(f"{word}: no such")
    approve(fault)


def test_foreign_names_of_settings_are_read_with_a_note() -> None:
    found = compose_run(["eval_steps=7", "accelerator=gpu"])
    config = found.config
    assert (config.trainer.val_check_interval, config.parallel.accelerator) == (7, "cuda")
    assert len(found.notes) == 2


@pytest.mark.parametrize("text", ["seed: 3\n", "defaults: [_self_]\nseed: 3\n"])
def test_a_root_config_without_the_groups_is_one_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "trainrun.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_run([f"--config-dir={tmp_path}", "data=digits"])
    (fault,) = caught.value.faults
    assert fault.startswith(f"{tmp_path}/trainrun.yaml")
