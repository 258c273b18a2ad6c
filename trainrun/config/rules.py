"""Combinations of settings that are refused: a table of rules, each with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from trainrun.config.schema import (
    DISTILLATION,
    SAME,
    RunConfig,
    iterate_config_leaves,
    settings,
    validation_nodes,
)
from trainrun.data.readers.path_contents import list_data_options
from trainrun.instantiate import TARGET, is_node, named_nodes, read_target_name
from trainrun.limits import EPOCH, NAMED, NODE, NODES, Duration, is_finite, parse_interval

READERS, ARRAYS = "trainrun.data.", "trainrun.data.readers.arrays."
GPT, LSTM = "trainrun.model.gpt.Gpt", "trainrun.model.lstm.Lstm"
CLASSIFICATION, REGRESSION = (
    "trainrun.task.classification.Classification",
    "trainrun.task.regression.Regression",
)


class Fault(NamedTuple):
    """A fault of a setting. value: the value as typed; "" if the message needs only the key."""

    key: str
    value: Any
    text: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.text}" if self.value != "" else f"{self.key}: {self.text}"


class Rule(NamedTuple):
    """A combination of settings that is refused.

    setting: as typed. A text such as `{c.trainer.max_steps}` is replaced by that value of the config.
    broken: a function that returns whether a config breaks the rule.
    instead: what to write instead.
    """

    setting: str
    broken: Callable[[RunConfig], Any]
    why: str
    instead: str

    def build_fault(self, config: RunConfig) -> Fault:
        """Return the fault of a config that breaks this rule."""
        facts: dict[str, Any] = {
            "c": config,
            "asked": format_sampling_setting(config),
            "mix": format_mix(config),
        }
        facts["sets"] = ", ".join(named_nodes(config.data.train)) or "not named"
        key, _, value = self.setting.format(**facts).partition("=")
        return Fault(key, value, f"{self.why}; {self.instead}".format(**facts))


def iterate_combination_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for every refused combination of settings. Faults that depend on the device are not among them."""
    yield from (rule.build_fault(config) for rule in RULES if rule.broken(config))
    if config.trainer.compile.scope == "step" or config.trainer.cuda_graphs:
        is_one_graph = config.trainer.compile.scope == "step"
        key, value = ("trainer.compile.scope", "step") if is_one_graph else ("trainer.cuda_graphs", "true")
        for setting, reason in iterate_step_obstacles(config):
            yield Fault(key, value, f"cannot be combined with {setting}: {reason}")
    yield from _iterate_class_dim_faults(config)
    yield from _iterate_held_out_faults(config)
    yield from _iterate_optimizer_faults(config)
    if config.parallel.accelerator != "auto":
        yield from check_gpu_settings(config, config.parallel.accelerator)


def iterate_step_obstacles(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting that prevents compiling or recording a whole step, with the reason and the way out."""
    for rule in STEP_RULES:
        if rule.broken(config):
            yield rule.setting.format(c=config), f"{rule.why}; {rule.instead}"
    for name in list(config.hook)[:1]:
        yield f"hook.{name}", "a hook may change what the graph has recorded; use trainer.compile.scope=model"


def check_gpu_settings(config: RunConfig, device_type: str) -> list[Fault]:
    """Return a fault for each setting that needs a GPU if the device is no GPU."""
    return [rule.build_fault(config)._replace(text=f"{rule.why} {device_type}; {rule.instead}") for rule in GPU_RULES
            if device_type != "cuda" and rule.broken(config)]  # fmt: skip


def format_mix(config: RunConfig) -> str:
    """Return `data.mix` as a user types it; "" if it is not set."""
    return f"data.mix={config.data.mix}".replace("'", "") if config.data.mix else ""


def format_sampling_setting(config: RunConfig) -> str:
    """Return the setting that decides how often a sample is drawn, as typed; "" without one."""
    typed = f"data.sampling={config.data.sampling}" if config.data.sampling != "none" else ""
    return format_mix(config) or typed


def _parse_validation_interval(config: RunConfig) -> Duration:
    with suppress(ValueError):  # a fault of its own
        return parse_interval(config.trainer.val_check_interval)
    return Duration(1, EPOCH)


def _has_several_devices(config: RunConfig) -> bool:
    devices = config.parallel.devices
    return len(devices) > 1 if isinstance(devices, list) else devices not in ("auto", 1)


def _has_invalid_devices(config: RunConfig) -> bool:
    devices = config.parallel.devices
    return isinstance(devices, list) and len(set(devices)) < max(1, len(devices))


def _has_no_limit(config: RunConfig) -> bool:
    trainer = config.trainer
    limits = (trainer.max_epochs, trainer.max_steps, trainer.max_time, trainer.max_duration)
    return all(limit is None for limit in limits)


def _warms_up_too_long(config: RunConfig) -> bool:
    steps, most = (config.scheduler or {}).get("warmup_steps"), config.trainer.max_steps
    return steps is not None and is_finite(steps) and most is not None and steps > most


def _uses_gradient_checkpointing(config: RunConfig) -> bool:
    return config.trainer.gradient_checkpointing not in ("none", "auto")


def _is_compiled(config: RunConfig) -> bool:
    return config.trainer.compile.scope != "off"


def _rolls_back(config: RunConfig) -> bool:
    return config.trainer.nan_policy == "rollback"


LEAVE_ONE, USE_ONE = "leave one of them out", "use one of the two"
AGAIN = "trainer.gradient_checkpointing={c.trainer.gradient_checkpointing}"
MOVED = "trainer.activation_offload=true"
NOT_COMPILED = "cannot be combined with trainer.compile.scope={c.trainer.compile.scope}"
NOT_RECORDED = "cannot be combined with trainer.cuda_graphs=true"
NO_ACTIVATIONS = "recomputes the activations of blocks, so none are left to move"
OPAQUE = f"{NOT_COMPILED}, because the compiler cannot trace the moved tensors"
TO_HOST = "moves tensors from a GPU to host memory, and this run uses the device"
ON_EVERY_DEVICE = "trainer.gradient_checkpointing=full saves memory on every device"
MODEL_SCOPE = "use trainer.compile.scope=model"
PUTS_TOGETHER = "groups samples only once, but {asked} draws other samples in every epoch"

RULES = (
    Rule("data.padding=pack",
         lambda c: c.data.padding == "pack" and read_target_name(c.task) == REGRESSION,
         "task=regression needs a row for each sample", "use data.padding=bucket"),
    Rule("trainer.max_epochs=null", _has_no_limit,
         "a training without a limit never ends", "set trainer.max_epochs, trainer.max_steps or trainer.max_time"),
    Rule("trainer.check_val_every_n_epoch={c.trainer.check_val_every_n_epoch}",
         lambda c: _parse_validation_interval(c).unit != EPOCH and c.trainer.check_val_every_n_epoch != 1,
         "cannot be combined with trainer.val_check_interval={c.trainer.val_check_interval}", LEAVE_ONE),
    Rule("data.global_batch_size={c.data.global_batch_size}",
         lambda c: c.data.global_batch_size is not None and c.trainer.accumulate_grad_batches != 1,
         "sets the accumulation itself", "use trainer.accumulate_grad_batches=1"),
    Rule("data.val_transform=same", lambda c: c.data.val_transform == SAME and c.data.transform is None,
         "there is no data.transform", "set data.transform, or data.val_transform._target_=my_file.MyClass"),
    Rule("data.test_transform=same", lambda c: c.data.test_transform == SAME and c.data.transform is None,
         "there is no data.transform", "set data.transform, or data.test_transform._target_=my_file.MyClass"),
    Rule("parallel.devices={c.parallel.devices}", _has_invalid_devices,
         "must name one GPU or several, each once", "write it as [0,1]"),
    Rule("parallel.devices={c.parallel.devices}",
         lambda c: c.parallel.mode == "single" and _has_several_devices(c),
         "parallel=single uses one device", "use parallel=ddp"),
    Rule("parallel=fsdp", lambda c: c.parallel.mode == "fsdp" and c.checkpoint.adapter_only,
         "cannot be combined with checkpoint.adapter_only=true, because no rank has all frozen weights", LEAVE_ONE),
    Rule("parallel=fsdp", lambda c: c.parallel.mode == "fsdp" and c.precision.fp8,
         "cannot be combined with precision.fp8=true, because its layers need scales of whole weights", LEAVE_ONE),
    Rule("parallel.offload=true",
         lambda c: c.parallel.mode == "fsdp" and c.parallel.offload and c.parallel.accelerator in ("cpu", "mps"),
         "needs a GPU, and parallel.accelerator={c.parallel.accelerator} is none",
         "use parallel.offload=false"),
    Rule("parallel.static_graph=true", lambda c: c.step and c.parallel.static_graph,
         "works only with the default step", "leave it out with a step of your own"),
    Rule("trainer.benchmark=true", lambda c: c.trainer.deterministic and c.trainer.benchmark,
         "chooses kernels by timing, which trainer.deterministic=true forbids", LEAVE_ONE),
    Rule("trainer.detect_anomaly=true",
         lambda c: c.trainer.detect_anomaly and c.precision.mode == "16-mixed",
         "float16 gradients overflow on purpose until the loss scale is found",
         "use precision=bf16-mixed or 32-true to look for a NaN"),
    Rule("trainer.detect_anomaly=true",
         lambda c: c.trainer.detect_anomaly and (_is_compiled(c) or c.trainer.cuda_graphs),
         "checks single operations, which a compiled model or a CUDA graph does not have",
         "use trainer.compile.scope=off and trainer.cuda_graphs=false"),
    Rule("init_from={c.init_from}",
         lambda c: c.init_from is not None and c.ckpt_path is not None and not c.checkpoint.adapter_only,
         "ckpt_path already loads weights, with the whole state", LEAVE_ONE),
    Rule("checkpoint.adapter_only=true", lambda c: c.init_from is None and c.checkpoint.adapter_only,
         "reads frozen weights from init_from, which is not set", "use init_from=RUN_OR_FILE"),
    Rule("checkpoint.enabled=false", lambda c: _rolls_back(c) and not c.checkpoint.enabled,
         "trainer.nan_policy=rollback needs checkpoints", "leave it out, or use trainer.nan_policy=skip"),
    Rule("checkpoint.save_last=false",
         lambda c: _rolls_back(c) and c.checkpoint.enabled and not c.checkpoint.save_last,
         "trainer.nan_policy=rollback needs checkpoints", "leave it out, or use trainer.nan_policy=skip"),
    Rule("precision.fp8=true", lambda c: c.precision.fp8 and c.precision.mode not in ("bf16-mixed", "bf16-true"),
         "works only with bfloat16, and precision.mode={c.precision.mode} is another type",
         "use precision=bf16-mixed or bf16-true"),
    Rule("scheduler.warmup_steps={c.scheduler[warmup_steps]}", _warms_up_too_long,
         "is longer than the run (trainer.max_steps={c.trainer.max_steps})", "use fewer steps"),
    Rule("scheduler.interval=epoch",
         lambda c: (c.scheduler or {}).get("interval") == "epoch"
         and not read_target_name(c.loop, "trainrun.").startswith("trainrun."),
         "does not work with a loop of your own", "use scheduler.interval=step"),
    # how often samples come, and folds
    Rule("data.sampling={c.data.sampling}", lambda c: c.data.mix and c.data.sampling != "none",
         "{mix} already sets how often samples are drawn", LEAVE_ONE),
    Rule("{mix}", lambda c: isinstance(c.data.mix, dict) and c.data.mix
         and set(c.data.mix) != set(named_nodes(c.data.train)),
         "must name the sets of data.train, which are {sets}", "name each, as data.train.a._target_=my_file.MyClass"),
    Rule("data.sampling=weighted", lambda c: c.data.sampling == "weighted" and c.data.weights is None,
         "needs data.weights", "give one weight per sample: a column, a file or a list"),
    Rule("data.shuffle=false", lambda c: c.data.shuffle_buffer and not c.data.shuffle,
         "data.shuffle_buffer={c.data.shuffle_buffer} shuffles the samples", LEAVE_ONE),
    Rule("data.shuffle=false", lambda c: format_sampling_setting(c) and not c.data.shuffle,
         "{asked} draws samples in random order", LEAVE_ONE),
    Rule("data.sampling=balanced",
         lambda c: c.data.sampling == "balanced" and (c.task or {}).get("class_weights") == "balanced",
         "task.class_weights=balanced already corrects the frequencies of classes", LEAVE_ONE),
    Rule("data.padding={c.data.padding}",
         lambda c: format_sampling_setting(c) and c.data.padding in ("pack", "token_budget"),
         PUTS_TOGETHER, "use data.padding=bucket"),
    Rule("data.truncate={c.data.truncate}",
         lambda c: format_sampling_setting(c) and c.data.truncate in ("split", "drop"),
         PUTS_TOGETHER, "use data.truncate=right"),
    Rule("data.fold={c.data.fold}", lambda c: c.data.folds is None and c.data.fold is not None,
         "has no effect without data.folds", "add data.folds=5"),
    Rule("data.stratified=true", lambda c: c.data.folds is None and c.data.stratified,
         "has no effect without data.folds", "add data.folds=5"),
    Rule("data.fold_groups={c.data.fold_groups}",
         lambda c: c.data.folds is None and c.data.fold_groups is not None,
         "has no effect without data.folds", "add data.folds=5"),
    Rule("data.stratified=true", lambda c: c.data.fold_groups is not None and c.data.stratified,
         "data.fold_groups keeps each group in one fold", LEAVE_ONE),
    Rule("data.folds={c.data.folds}", lambda c: c.data.folds is not None and c.data.fold is None,
         "needs data.fold, the part for validation", "add data.fold=0, or use every fold in a sweep: trainrun "
         "--multirun "
         "data.folds={c.data.folds} 'data.fold=range({c.data.folds})'"),
    Rule("data.fold={c.data.fold}",
         lambda c: c.data.folds is not None and c.data.fold is not None and c.data.fold >= c.data.folds,
         "is not a fold of data.folds={c.data.folds}", "use a number from 0 to data.folds - 1"),
    Rule("data.folds={c.data.folds}", lambda c: c.data.folds is not None and c.data.mix,
         "{mix} uses whole data sets", LEAVE_ONE),
    # what saves memory, and graphs of a step
    Rule("trainer.cuda_graphs=true",
         lambda c: c.trainer.cuda_graphs and c.trainer.compile.scope in ("model", "regional", "auto"),
         f"{NOT_COMPILED}: it records the step too",
         "use trainer.compile.scope=step, or trainer.compile.mode=reduce-overhead instead"),
    Rule("trainer.cuda_graphs=true",
         lambda c: c.trainer.cuda_graphs and c.parallel.accelerator in ("cpu", "mps"),
         "cannot be used with parallel.accelerator={c.parallel.accelerator}, because it needs a CUDA device",
         "use trainer.cuda_graphs=false"),
    Rule(AGAIN, lambda c: _uses_gradient_checkpointing(c) and _is_compiled(c),
         f"{NOT_COMPILED}, because the compiler chooses which activations are recomputed", USE_ONE),
    Rule(AGAIN, lambda c: _uses_gradient_checkpointing(c) and c.trainer.cuda_graphs,
         f"{NOT_RECORDED}, because a recorded step cannot repeat its random numbers", USE_ONE),
    Rule(AGAIN, lambda c: _uses_gradient_checkpointing(c) and c.parallel.sync_batchnorm,
         "cannot be combined with parallel.sync_batchnorm=true, because the backward pass would exchange the "
         "statistics again", USE_ONE),
    Rule(MOVED, lambda c: c.trainer.activation_offload and _uses_gradient_checkpointing(c),
         f"{AGAIN} {NO_ACTIVATIONS}", USE_ONE),
    Rule(MOVED, lambda c: c.trainer.activation_offload and _is_compiled(c),
         OPAQUE, "use trainer.compile.scope=off"),
    Rule(MOVED, lambda c: c.trainer.activation_offload and c.trainer.cuda_graphs,
         f"{NOT_RECORDED}, because host memory cannot be allocated while a step is recorded", USE_ONE),
)  # fmt: skip

STEP_RULES = (  # what a step of one graph does not go with
    Rule("parallel={c.parallel.mode}", lambda c: c.parallel.mode != "single",
         "ranks exchange gradients in the step", f"{MODEL_SCOPE}, or parallel=single"),
    Rule("precision=16-mixed", lambda c: c.precision.mode == "16-mixed",
         "a graph cannot scale the loss", "use precision=bf16-mixed, or trainer.compile.scope=model"),
    Rule("step", lambda c: c.step, "a step of your own is not traced", MODEL_SCOPE),
    Rule("loop", lambda c: c.loop, "a loop of your own has its own steps", MODEL_SCOPE),
    Rule("model.unfreeze_at", lambda c: (c.model or {}).get("unfreeze_at"),
         "a graph trains the same parameters in every step", MODEL_SCOPE),
    Rule("task=distillation", lambda c: (c.task or {}).get(TARGET) == DISTILLATION,
         "the teacher runs outside of the graph", MODEL_SCOPE),
    Rule("trainer.compile.dynamic=true", lambda c: c.trainer.compile.dynamic,
         "each batch shape needs its own graph", "leave it out"),
    Rule("trainer.compile.mode=reduce-overhead", lambda c: c.trainer.compile.mode == "reduce-overhead",
         "CUDA graphs of inductor cannot change tensors in place", f"leave it out, or {MODEL_SCOPE}"),
    Rule("data.padding=token_budget", lambda c: c.data.padding == "token_budget",
         "its batches have varying numbers of rows, and only full batches are compiled", "use data.padding=bucket"),
)  # fmt: skip

GPU_RULES = (  # what only a GPU has a use for
    Rule(MOVED, lambda c: c.trainer.activation_offload, TO_HOST,
         f"use trainer.activation_offload=false; {ON_EVERY_DEVICE}"),
)  # fmt: skip


def _iterate_class_dim_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for a network that gives the classes of a token in a dimension where the task does not look.

    A text with as many tokens in a row as classes would have the right shapes, and train on nothing.
    """
    model, task = config.model or {}, config.task or {}
    name, class_dim = read_target_name(model), task.get("class_dim", 1)
    gives_classes_last = name == GPT or (name == LSTM and model.get("outputs", "each") == "each")
    if gives_classes_last and read_target_name(task) == CLASSIFICATION and class_dim in (0, 1):
        why = "returns classes for each token in the last dimension, but task.class_dim="
        ways = "use data=text task=language_modeling for text, or task.class_dim=-1 for a class per token"
        yield Fault("model", "gpt" if name == GPT else "lstm", f"{why}{class_dim}; {ways}")


def _iterate_held_out_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield faults for validation sets that are split off the training data with other settings than the training
    set.
    """
    train = config.data.train or {}
    for split, node in validation_nodes(config.data).items():
        target, key = str(node.get(TARGET)), f"data.{split.replace('/', '.')}"
        if target != train.get(TARGET) or not target.startswith(READERS):
            continue
        if node.get("val_path") is not None or node.get("val_fraction") == 0:  # nothing is cut
            continue
        alike = node.get("path") == train.get("path")
        for name in {"val_fraction", "seed"} & node.keys() & train.keys() if alike else ():
            if str(node[name]) != str(train[name]):
                why = "both parts must be cut from the data in the same way, or some samples would be in both"
                yield Fault(f"{key}.{name}", node[name], f"{why}; set data.train.{name}")
        cut = "val_fraction" in node and str(node["val_fraction"]) == str(train.get("val_fraction"))
        if not alike and cut and not target.startswith(ARRAYS):
            why = f"{key} is a part that is held out from the training data"
            way = f"for separate validation data set data.train.val_path={node['path']}"
            yield Fault(f"{key}.path", node["path"], f"{why}; {way}")


def check_data_path(config: RunConfig) -> list[str]:
    """Return a fault if no node uses `data.path`: the run would train on other data than the user named."""
    path = config.data.path
    prefixes = tuple(
        f"{key}." for key, setting in settings().items() if setting.opens in (NODE, NAMED, NODES)
    )
    has_reader = any(
        value == path or "${data.path}" in config.references.get(key, "")
        for key, value in iterate_config_leaves(config)
        if key.startswith(prefixes)
    )
    if path is None or has_reader:
        return []
    readers = " or ".join(f"data={option}" for option in list_data_options(path))
    return [
        f"data.path={path}: data={config.data.name} does not read it; choose a reader, as "
        f"{readers or 'data=csv, data=text or data=image_folder'} (trainrun --help data), or leave it out"
    ]


def _iterate_optimizer_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield faults for settings that cannot be combined with several named optimizers."""
    named = named_nodes(config.optimizer)
    optimizers = [name for name, value in (config.optimizer or {}).items() if is_node(value)]
    for key, node in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        inner = [name for name in node if name in optimizers] if isinstance(node, dict) else []
        if inner and node.get(TARGET) and (key == "scheduler" or "params" in node[inner[0]]):
            yield Fault(
                f"{key}.{inner[0]}",
                "",
                f"named {key}s cannot be combined with {node[TARGET]}; add {key}=custom",
            )
    for name in named_nodes(config.scheduler):
        if name not in named:
            names = ", ".join(named) or "none by name"
            yield Fault(f"scheduler.{name}", "", f"no optimizer has this name; available: {names}")
    if not named:
        return
    first = f"optimizer.{next(iter(named))}"
    for name, node in named.items():
        if not node.get("params"):
            key = f"optimizer.{name}.params"
            yield Fault(key, "", f"must name its parameters, as {key}='{name}.*'")
    for key, value, applies in (
        ("trainer.compile.scope", "step", config.trainer.compile.scope == "step"),
        ("trainer.cuda_graphs", "true", config.trainer.cuda_graphs),
        ("parallel", config.parallel.mode, config.parallel.mode != "single"),
    ):
        if applies:
            yield Fault(
                key, value, f"cannot be combined with named optimizers ({first}); leave one of them out"
            )
