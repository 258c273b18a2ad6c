"""Words of Lightning, the Hugging Face Trainer, Keras and timm: read as ours, or answered with what to write."""

from __future__ import annotations

import re

import pytest
from approved import approve, refused

from trainrun.config.aliases import BY_NAMES, CASES, KEYS, collect_aliases, load_replacement_hints
from trainrun.config.argv import find_conf_dir, list_groups
from trainrun.config.compose import compose_run
from trainrun.config.schema import read_value, settings
from trainrun.errors import ConfigError

READ = {  # words -> what they set
    "--lr 0.1 --epochs 3 --batch-size 64": {
        "optimizer.lr": 0.1, "trainer.max_epochs": 3, "data.batch_size": 64,
    },
    "-b 8 -j 2": {"data.batch_size": 8, "data.num_workers": 2},
    "--num_train_epochs 3.0 --patience=2.00 early_stopping=true trainer.limit_train_batches=1.0": {
        "trainer.max_epochs": 3, "trainer.early_stopping.patience": 2, "trainer.limit_train_batches": 1.0,
    },
    "--devices 2": {"parallel.devices": 2, "parallel.mode": "ddp"},
    "parallel.devices=2": {"parallel.devices": 2, "parallel.mode": "ddp"},
    "parallel.devices=[0,1]": {"parallel.devices": [0, 1], "parallel.mode": "ddp"},
    "trainer.devices=1": {"parallel.devices": 1, "parallel.mode": "single"},
    "trainer.devices=-1": {"parallel.devices": "auto", "parallel.mode": "single"},
    "trainer.max_epochs=-1 max_steps=7": {"trainer.max_epochs": None, "trainer.max_steps": 7},
    "trainer.fast_dev_run=true": {
        "trainer.max_epochs": 1, "trainer.limit_train_batches": 1, "trainer.limit_val_batches": 1,
        "checkpoint.enabled": False,
    },
    "--fast-dev-run --epochs 20 log_every_n_steps=5": {"trainer.max_epochs": 1, "monitor.log_every_n_steps": 1},
    "fast_dev_run=3": {"trainer.limit_train_batches": 3, "trainer.limit_val_batches": 3},
    "trainer.overfit_batches=4": {"trainer.limit_train_batches": 4, "data.shuffle": False},
    "trainer.overfit_batches=0.1": {"trainer.limit_train_batches": 0.1, "data.shuffle": False},
    "--fp16": {"precision.mode": "16-mixed"},
    "--bf16 True": {"precision.mode": "bf16-mixed"},
    "--amp-dtype bfloat16": {"precision.mode": "bf16-mixed"},
    "mixed_precision=fp16": {"precision.mode": "16-mixed"},
    "trainer.precision=16": {"precision.mode": "16-mixed"},
    "--tf32 true": {"precision.matmul": "high"},
    "--no-cuda": {"parallel.accelerator": "cpu"},
    "--no-shuffle": {"data.shuffle": False},
    "jit_compile=true": {"trainer.compile.scope": "model"},
    "--torchcompile": {"trainer.compile.scope": "model"},
    "global_clipnorm=1 --checkpoint-hist 4": {"trainer.gradient_clip_val": 1.0, "checkpoint.save_top_k": 4},
    "clipvalue=0.5": {"trainer.gradient_clip_val": 0.5, "trainer.gradient_clip_algorithm": "value"},
    "--clip-grad 1 --clip-mode value": {
        "trainer.gradient_clip_val": 1.0, "trainer.gradient_clip_algorithm": "value",
    },
    "max_grad_norm=1": {"trainer.gradient_clip_val": 1.0},
    "disable_tqdm=true": {"monitor.progress_bar": False},
    "per_device_train_batch_size=8 gradient_accumulation_steps=4": {
        "data.batch_size": 8, "trainer.accumulate_grad_batches": 4,
    },
    "per_device_eval_batch_size=9": {"data.val_batch_size": 9},
    "num_train_epochs=3 warmup_steps=5 lr_scheduler_type=cosine": {
        "trainer.max_epochs": 3, "scheduler.warmup_steps": 5,
    },
    "eval_steps=100 save_steps=50 save_total_limit=2 logging_steps=10": {
        "trainer.val_check_interval": 100, "checkpoint.every_n_train_steps": 50, "checkpoint.keep_last": 2,
        "monitor.log_every_n_steps": 10,
    },
    "eval_strategy=epoch": {"trainer.val_check_interval": 1.0},
    "save_strategy=no": {"checkpoint.enabled": False},
    "metric_for_best_model=val/loss greater_is_better=false": {
        "checkpoint.monitor": "val/loss", "checkpoint.mode": "min",
    },
    "resume_from_checkpoint=some/run": {"ckpt_path": "some/run"},
    "seed_everything=3": {"seed": 3},
    "random_state=4": {"seed": 4},
    "--model-ema --model-ema-decay 0.99": {"trainer.ema.enabled": True, "trainer.ema.decay": 0.99},
    "early_stopping=true --patience 7": {"trainer.early_stopping.patience": 7},
    "--opt sgd --momentum 0.8 --wd 0.01": {"optimizer.momentum": 0.8, "optimizer.weight_decay": 0.01},
    "--smoothing 0.1 --drop 0.2": {"task.label_smoothing": 0.1, "model.dropout": 0.2},
    "torch_compile=true": {"trainer.compile.scope": "model"},
    "auto_find_batch_size=true": {"trainer.out_of_memory": "split"},
    "steps_per_epoch=10 validation_steps=4 validation_freq=2": {
        "trainer.limit_train_batches": 10, "trainer.limit_val_batches": 4, "trainer.check_val_every_n_epoch": 2,
    },
    "--max-iters=500 grad_clip=2.0 warmup_iters=10 eval_iters=20": {
        "trainer.max_steps": 500, "trainer.gradient_clip_val": 2.0, "scheduler.warmup_steps": 10,
        "trainer.limit_val_batches": 20,
    },
    "--grad-checkpointing": {"trainer.gradient_checkpointing": "full"},
    "trainer.strategy=ddp trainer.num_epochs=2": {"parallel.mode": "ddp", "trainer.max_epochs": 2},
}  # fmt: skip
OF_OPTIONS = ("optimizer.", "scheduler.", "model.", "task.")


@pytest.mark.parametrize("typed", READ)
def test_a_word_that_means_the_same_is_read_and_said(typed: str) -> None:
    composition = compose_run(typed.split())
    found = {key: read_value(composition.config, key) for key in READ[typed]}
    assert found == READ[typed]
    own = [word for word in typed.split() if re.match(r"(parallel|trainer)\.devices=[1-9]", word)]
    assert own or any(" is read as " in note for note in composition.notes)


def test_a_word_that_has_no_setting_is_answered_with_what_to_write() -> None:
    typed = [
        f"{name}=0.1"
        if name in collect_aliases()
        else f"{'trainer.' if len(name) % 2 else ''}{name}=something"
        for name in load_replacement_hints()
    ]
    with pytest.raises(ConfigError) as error:
        compose_run(typed)
    assert len(error.value.faults) == len(typed)
    for word in typed:
        (fault,) = [fault for fault in error.value.faults if fault.startswith(f"{word}: ")]
        assert re.search(r"; (for [\w ]+ )?(write|leave it out|start it with)", fault)


def test_what_the_answers_say_to_write_is_understood() -> None:
    known = list_groups([find_conf_dir()])
    for answer in load_replacement_hints().values():
        for word in re.findall(r"(?<= )([a-z][\w.]*)=", answer):
            head = word.partition(".")[0]
            assert word in settings() or word in KEYS or word in CASES or word in known or head in (
                "model", "data", "task", "scheduler", "optimizer", "hook", "monitor"
            ), (word, answer)  # fmt: skip


def test_what_a_word_stands_for_is_there() -> None:
    words = [word for _, cases in BY_NAMES for found in cases.values() for word in found]
    keys = [*KEYS.values(), *(word.partition("=")[0] for word in words)]
    assert [
        key
        for key in keys
        if key not in settings() and not key.startswith((*OF_OPTIONS, "hydra.", "data.train.", "transform."))
    ] == []
    names = [
        *KEYS,
        *(CASES.keys() - KEYS.keys()),
        *(name for found in settings().values() for name in found.aliases),
    ]
    assert sorted(set(names)) == sorted(names)
    assert len({*names, *load_replacement_hints()}) > 120


@pytest.mark.parametrize(
    "typed",
    [
        "--mixup 0.8",
        "mixup=true",
        "min_lr=1e-4",
        "beta2=0.95",
        "lr_decay_iters=600",
        "--eval-steps 0.25",
        "bf16=false",
        "--learning_rate=-1",
        "--epochs",
        "--foo 3",
        "lr = 3",
        "parallel=single parallel.devices=2",
        "parallel=single parallel.devices=[0,1]",
        "parallel.devices=[1,1]",
        "parallel.devices=[]",
        "parallel.devices=[-1]",
        "trainer.detect_anomaly=true precision=16-mixed",
        "trainer.detect_anomaly=true trainer.compile=model",
    ],
)
def test_a_mistake_in_such_a_word_is_answered_by_its_own_name(typed: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_run(typed.split())
    approve("\n".join(error.value.faults))


def test_a_number_of_devices_chooses_ranks_only_where_nothing_else_does() -> None:
    assert any(
        note == "parallel.devices=3 is read as parallel.devices=3 parallel.mode=ddp"
        for note in compose_run(["parallel.devices=3"]).notes
    )
    assert compose_run(["parallel.mode=ddp", "parallel.devices=3"]).notes == []


def test_no_setting_is_answered_with_itself() -> None:
    for words in (["data=datasets", "data.train.target=y"], ["data.train.target=y"]):
        with refused(ConfigError, "data.train.target=y"):
            compose_run(words)
