"""Names that other trainers use for settings, options and values, and the settings that they stand for.

An alias of a single setting is written beside its field in `config/schema.py`. This module has the other aliases.
For a name that no single setting replaces, `other_trainers.yaml` has a hint what to write instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

from trainrun.config.schema import PRECISION_WORDS, RunConfig, TrackerName, settings
from trainrun.limits import fits_kind
from trainrun.output import say

KEYS = {  # of groups, of arguments in open nodes, of the runner itself, and what only other trainers say
    **dict.fromkeys(("lr", "learning_rate", "optimizer.learning_rate"), "optimizer.lr"),
    **dict.fromkeys(("weight_decay", "wd"), "optimizer.weight_decay"),
    "layer_decay": "optimizer.layer_decay",
    **dict.fromkeys(("adam_epsilon", "opt_eps"), "optimizer.eps"),
    "opt_betas": "optimizer.betas",
    "momentum": "optimizer.momentum",
    **dict.fromkeys(("strategy", "trainer.strategy"), "parallel"),
    **dict.fromkeys(("trainer.precision", "mixed_precision"), "precision"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "sched"), "scheduler"),
    **dict.fromkeys(("optim", "opt"), "optimizer"),
    "output_dir": "hydra.run.dir",
    **dict.fromkeys(("trainer.compile.enabled", "compile.enabled"), "trainer.compile"),
    **{f"warmup_{unit}": f"scheduler.warmup_{unit}" for unit in ("steps", "ratio", "epochs")},
    **dict.fromkeys(("num_epochs", "n_epochs", "nb_epochs"), "trainer.max_epochs"),
    "max_iters": "trainer.max_steps",
    "grad_clip": "trainer.gradient_clip_val",
    "warmup_iters": "scheduler.warmup_steps",
    "eval_iters": "trainer.limit_val_batches",
    "steps_per_epoch": "trainer.limit_train_batches",
    "validation_steps": "trainer.limit_val_batches",
    "validation_freq": "trainer.check_val_every_n_epoch",
    "global_clipnorm": "trainer.gradient_clip_val",  # `clipnorm` is of each tensor: not the same
    "clip_mode": "trainer.gradient_clip_algorithm",
    "grad_checkpointing": "trainer.gradient_checkpointing",
    **dict.fromkeys(("use_ema", "model_ema"), "trainer.ema"),
    **dict.fromkeys(("ema_decay", "ema_momentum", "model_ema_decay"), "trainer.ema.decay"),
    "class_weight": "task.class_weights",
    "patience": "trainer.early_stopping.patience",
    **dict.fromkeys(("validation_batch_size", "test_batch_size"), "data.val_batch_size"),
    "train_batch_size": "data.batch_size",
    "workers": "data.num_workers",
    "dataset": "data",
    **dict.fromkeys(("data_dir", "data_path"), "data.path"),
    "dataloader_drop_last": "data.drop_last",
    "shuffle": "data.shuffle",
    "pin_mem": "data.pin_memory",
    "num_classes": "data.num_classes",
    "data.tokenizer": "data.train.tokenizer",
    "eval_metric": "checkpoint.monitor",
    "checkpoint_hist": "checkpoint.save_top_k",  # the best ones, by timm
    "recovery_interval": "checkpoint.every_n_train_steps",
    "initial_checkpoint": "init_from",
    "log_interval": "monitor.log_every_n_steps",
    **dict.fromkeys(("gpus", "num_gpus", "nproc"), "parallel.devices"),
    "sync_bn": "parallel.sync_batchnorm",
    **dict.fromkeys(("smoothing", "label_smoothing", "label_smoothing_factor"), "task.label_smoothing"),
    **dict.fromkeys(("dropout", "drop"), "model.dropout"),
    **dict.fromkeys(("random_seed", "random_state"), "seed"),
}
ONE_BATCH = (  # of all that a run does, so that a mistake late in it is seen at once
    "trainer.max_epochs=1", "trainer.limit_train_batches={0}", "trainer.limit_val_batches={0}",
    "checkpoint.enabled=false", "monitor.log_every_n_steps=1",
    "monitor.plots=false",
)  # fmt: skip
NUMBER = "NUMBER"  # any other value that is one; `{0}` stands for it
Cases = dict[str, tuple[str, ...]]
BY_NAMES: tuple[tuple[str, Cases], ...] = (
    ("fp16 amp", {"true": ("precision=16-mixed",)}),
    ("bf16", {"true": ("precision=bf16-mixed",)}),
    ("amp_dtype", {"float16": ("precision=16-mixed",), "bfloat16": ("precision=bf16-mixed",)}),
    ("tf32", {"true": ("precision.matmul=high",), "false": ("precision.matmul=highest",)}),
    ("use_cpu no_cuda", {"true": ("parallel.accelerator=cpu",)}),
    ("fast_dev_run dry_run", {"true": tuple(word.format(1) for word in ONE_BATCH), NUMBER: ONE_BATCH}),
    ("overfit_batches", {NUMBER: ("trainer.limit_train_batches={0}", "data.shuffle=false")}),
    ("jit_compile torchcompile", {"true": ("trainer.compile.scope=model",)}),
    ("strategy", {"ddp_find_unused_parameters_true": ("parallel=ddp", "parallel.find_unused_parameters=true")}),
    ("run_eagerly", {"true": ("trainer.compile.scope=off",)}),
    ("clipvalue", {NUMBER: ("trainer.gradient_clip_val={0}", "trainer.gradient_clip_algorithm=value")}),
    ("disable_tqdm", {"true": ("monitor.progress_bar=false",), "false": ("monitor.progress_bar=true",)}),
    ("verbose", {"0": ("monitor.progress_bar=false", "monitor.verbose=false"), "1": ("monitor.progress_bar=true",),
                 "2": ("monitor.progress_bar=false",)}),
    ("greater_is_better", {"true": ("checkpoint.mode=max",), "false": ("checkpoint.mode=min",)}),
    ("group_by_length", {"true": ("data.padding=bucket",)}),
    ("auto_find_batch_size", {"true": ("trainer.out_of_memory=split",)}),
    ("eval_strategy evaluation_strategy", {"epoch": ("trainer.val_check_interval=1.0",), "no": ("data.val=null",)}),
    ("transform", {"lora": ("transform.lora._target_=trainrun.transform.lora.lora",)}),
    ("save_strategy", {"no": ("checkpoint.enabled=false",)}),
    ("build_report logger", {
        "none": ("monitor.tracker=null",), **{name: (f"monitor.tracker={name}",) for name in get_args(TrackerName)},
    }),
)  # fmt: skip
CASES = {name: cases for names, cases in BY_NAMES for name in names.split()}  # -> value -> what it is read as
OPTIONS = {
    "precision": PRECISION_WORDS,
    "parallel": {"none": "single", "null": "single", "ddp_spawn": "ddp"},
    "scheduler": {
        **dict.fromkeys(("none", "null", "off", "constant_with_warmup"), "constant"),
        **dict.fromkeys(("cosine_with_restarts", "cosineannealingwarmrestarts"), "cosine_restarts"),
        **dict.fromkeys(("reduce_lr_on_plateau", "reducelronplateau"), "plateau"),
        **dict.fromkeys(("poly", "polynomial_decay"), "polynomial"),
        **{"cosineannealinglr": "cosine", "onecyclelr": "onecycle", "warmup_stable_decay": "wsd"},
    },
    "optimizer": dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    "preset": {"null": "none"},
    "monitor": {"null": "none"},
}  # fmt: skip


@cache
def collect_aliases(schema: type = RunConfig) -> dict[str, str]:
    """Return the key of the setting or section that each alias stands for, by alias."""
    return KEYS | {name: key for key, setting in settings(schema).items() for name in setting.aliases}


def resolve_alias(key: str, is_group: Callable[[str], bool], schema: type = RunConfig) -> str:
    """Return the key of the setting for which `key` is an alias; `key` itself if it is no alias.

    An alias of a section also works in the keys of the section's settings.
    """
    if key in settings(schema):
        return key
    names, key = collect_aliases(schema), strip_trainer_prefix(key)
    if key in names:
        return names[key]
    head, dot, tail = key.partition(".")
    return names[head] + dot + tail if head in names and dot and not is_group(head) else key


def strip_trainer_prefix(key: str) -> str:
    """Return a name of another trainer without its prefix `trainer.`; any other key unchanged."""
    if key in settings():
        return key
    name = key.removeprefix("trainer.")
    return name if name in (CASES.keys() | KEYS.keys()) else key


def translate_setting(word: str) -> list[str]:
    """Return the settings that replace another trainer's `key=value`; `[word]` if `CASES` has no translation."""
    key, equals, value = word.partition("=")
    if not equals or (key in settings() and key != "transform"):
        return [word]
    cases = CASES.get(strip_trainer_prefix(key), {})
    is_number = re.fullmatch(r"\d*\.?\d+(e-?\d+)?", value) is not None and float(value) > 0
    template = cases.get(value.lower()) or (cases.get(NUMBER) if is_number else None)
    return [part.format(value) for part in template] if template else [word]


def resolve_value_alias(key: str, value: str, schema: type = RunConfig) -> str:
    """Return the value for which `value` is an alias; `value` itself if it is no alias.

    A whole number typed as `3.0` becomes `3`.
    """
    setting = settings(schema).get(key)
    with_unit = re.fullmatch(r"(\d+(?:e\d+)?)\s*(step|epoch)s?", value)
    if (
        setting is not None
        and with_unit
        and with_unit[2] in key
        and fits_kind(int(float(with_unit[1])), setting.kind)
    ):
        return str(int(float(with_unit[1])))  # `trainer.max_steps=500step`
    if setting is not None and re.fullmatch(r"\d+\.0+", value) and not fits_kind(float(value), setting.kind):
        integer_part = value.partition(".")[0]
        return integer_part if fits_kind(int(integer_part), setting.kind) else value
    return setting.words.get(value.lower(), value) if setting is not None else value


@cache
def print_note_once(text: str) -> None:
    """Print a note to standard error, once per process."""
    say(f"note: {text}", file=sys.stderr)


OF_RATE = "{of optimizer.lr}"


@cache
def load_replacement_hints() -> dict[str, str]:
    """Return the hints what to write instead, by the name that another trainer uses.

    In a hint, `{0.1}` is replaced by the typed value; without one, 0.1 remains. `{of optimizer.lr}` is replaced by
    the typed value divided by optimizer.lr.
    """
    import yaml  # --help needs none

    texts = yaml.safe_load(Path(__file__).with_name("other_trainers.yaml").read_text(encoding="utf-8"))
    return {name: answer for names, answer in texts.items() for name in names.split()}


NUMBER_TEXT = re.compile(r"[\d.]+(e-?\d+)?")


def format_replacement_hint(name: str, value: str = "", learning_rate: Any = None) -> str:
    """Return the hint for `name=value`. The typed value replaces the example if both are numbers or neither is."""
    is_number = NUMBER_TEXT.fullmatch(value) is not None
    if OF_RATE in load_replacement_hints()[name]:
        part = "..."
        if is_number and isinstance(learning_rate, int | float) and learning_rate > 0:
            part = f"{float(value) / learning_rate:.4g}"
        return load_replacement_hints()[name].replace(OF_RATE, part)

    def fill_example(example: re.Match[str]) -> str:
        is_like_example = is_number == (NUMBER_TEXT.fullmatch(example[1]) is not None)
        return value if value and is_like_example else example[1]

    return re.sub(r"\{(.+?)\}", fill_example, load_replacement_hints()[name])
