"""The schema of the config: every setting with its default, limits, help text and aliases. Nothing here imports
torch.

Hydra composes into these dataclasses. The checks, messages, `--help`, aliases and the tables of the manual are made
from their fields, so a setting is added only here. A `RunConfig` never changes: `replace_values` returns a new one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from trainrun.limits import (
    ANY,
    Auto,
    Count,
    Limits,
    NotNegative,
    NotNegativeInt,
    Setting,
    check_batch_limit,
    check_batch_limit_or_zero,
    check_shares,
    choice,
    node,
    nodes,
    parse_any_duration,
    parse_cache,
    parse_interval,
    parse_name_map,
    parse_saving_interval,
    parse_seconds,
    parse_steps_or_epochs,
    parse_untimed_interval,
    parse_url,
    section,
    setting,
)  # fmt: skip

PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true", "auto")
OTHER_WORDS = {"32-true": "32 fp32 float32 no", "16-mixed": "16 fp16 float16 amp_fp16 mixed_float16",
               "bf16-mixed": "bf16 bfloat16 amp_bf16 mixed_bfloat16", "64-true": "64 fp64 float64 double"}  # fmt: skip
PRECISION_WORDS = {word: mode for mode, words in OTHER_WORDS.items() for word in words.split()}
SAME = "same"  # of data.val_transform: that of data.transform
NO_LIMIT = {"-1": "null"}
PARALLELS = ("single", "ddp", "fsdp")
DISTILLATION = "trainrun.task.distillation.Distillation"
TrackerName = Literal["csv", "mlflow", "tensorboard", "trackio", "wandb"]
Config = TypeVar("Config")
READ: set[str] = (
    set()
)  # keys of the settings that code has read, from `record_setting_reads` to `stop_recording_reads`


@dataclass(frozen=True)
class DataConfig:
    """The data, and how samples become batches (`batch_size` is per device)."""

    name: str = setting("custom", "name of the data; a part of the run's name", read_by="run_name")
    path: str | None = setting(None, "file or folder of the data", read_by="nodes that refer to it")
    train: Any = node(
        "_target_ and arguments of the training samples, or several named sets, which are joined",
        required=True, named=True,
    )  # fmt: skip
    val: Any = node("the same for validation, or several named sets; null: none", named=True)
    test: Any = node(
        "the same for the test (one set), see trainrun evaluate RUN_DIR --split test; null: none"
    )
    shape: list[int] | None = setting(
        None, "shape of one input; needed if it does not follow from the data",
        kind=Annotated[list[Count], "as [1,28,28]"] | None,
        read_by="nodes that refer to it",
    )  # fmt: skip
    num_classes: int | None = setting(
        None, "number of classes; needed if it does not follow from the data", at_least=2
    )
    batch_size: int = setting(
        32, "samples per device and micro-batch", at_least=1, aliases=("batch_size", "per_device_train_batch_size"),
    )  # fmt: skip
    val_batch_size: int | None = setting(
        None, "samples per device in evaluation; null: at least twice data.batch_size", at_least=1,
        aliases=("val_batch_size", "per_device_eval_batch_size", "eval_batch_size"),
    )  # fmt: skip
    global_batch_size: int | None = setting(
        None, "samples of one step over all ranks; sets trainer.accumulate_grad_batches", at_least=1,
        aliases=("global_batch_size",),
    )  # fmt: skip
    shuffle: bool = setting(True, "a new order in every epoch")
    shuffle_buffer: int | None = setting(
        None, "number of samples that are shuffled at a time, for iterable sources", at_least=2
    )
    sampling: str = choice(
        "none", "balanced", "weighted",
        help="how often samples are used: once per epoch, every class equally often, or in proportion to data.weights",
    )  # fmt: skip
    weights: Any = setting(
        None, "weight of each sample, for data.sampling=weighted: a list, a column, an attribute or a file",
        kind=str | list[NotNegative] | None,
    )  # fmt: skip
    mix: Any = setting(
        None, "share of each named set of data.train in an epoch, such as {a: 0.7, b: 0.3}", parse=check_shares,
    )  # fmt: skip
    folds: int | None = setting(None, "number of parts of data.train for cross-validation", at_least=2)
    fold: int | None = setting(
        None, "number of the part for validation, from 0; sweep over all parts: range(5)", at_least=0
    )
    stratified: bool = setting(False, "every fold has each class in proportion")
    fold_groups: str | None = setting(
        None, "attribute of data.train; samples with equal values stay in one fold"
    )
    drop_last: bool = setting(False, "leave out the last batch of an epoch if it is short")
    engine: str = choice(
        "auto", "resident", "workers", "threads",
        help="who reads the samples: nobody (data in memory), processes or threads",
    )  # fmt: skip
    num_workers: Any = setting(
        "auto", "number of processes that read samples", kind=NotNegativeInt | Auto,
        aliases=("num_workers", "dataloader_num_workers"),
    )  # fmt: skip
    num_threads: Any = setting("auto", "number of threads that read samples", kind=Count | Auto)
    cache: str = setting(
        "none", "where decoded samples are cached: none, memory, pool:<size> or disk:<folder>", parse=parse_cache,
    )  # fmt: skip
    transform: Any = node("_target_ of a function that changes every training sample")
    val_transform: Any = node(
        "the same for validation and test samples; same: use data.transform; null: no change",
        also=(SAME,),
    )
    test_transform: Any = node("the same for test samples only; null: use data.val_transform", also=(SAME,))
    augment: dict[str, Any] = nodes("random changes of whole batches, by name")
    on_error: str = choice(
        "raise", "skip", help="whether a sample that cannot be read ends the run or is skipped"
    )
    max_skipped_fraction: float = setting(
        0.01, "with data.on_error=skip: largest fraction of skipped samples before the run ends", at_least=0, at_most=1,
    )  # fmt: skip
    pin_memory: bool = setting(
        True,
        "keep batches in page-locked memory, from which copies to a GPU are faster",
        aliases=("dataloader_pin_memory",),
    )
    persistent_workers: bool = setting(
        True, "keep the reading processes for all epochs", aliases=("dataloader_persistent_workers",)
    )
    prefetch_factor: int = setting(
        2, "batches that each process or thread reads ahead; from 2 on, threads read at least 4 in all", at_least=1,
        aliases=("dataloader_prefetch_factor",),
    )  # fmt: skip
    worker_timeout_seconds: float = setting(
        300.0, "longest wait for one batch in seconds; 0: no limit", at_least=0
    )
    collate_fn: Any = node("_target_ of a function that builds a batch from samples")
    max_sequence_length: int | None = setting(None, "length to which longer sequences are cut", at_least=1)
    truncate: str = choice(
        "left", "right", "drop", "split", default="right", help="which part of a longer sequence is kept"
    )
    padding: str = choice(
        "longest", "max", "bucket", "pack", "token_budget",
        help="how sequences of unequal length become a batch",
    )  # fmt: skip
    max_tokens: int | None = setting(
        None, "largest number of tokens in a batch, for data.padding=token_budget", at_least=1
    )
    pad_multiple: int | None = setting(None, "round lengths up to a multiple of this number", at_least=1)


def validation_nodes(data: DataConfig) -> dict[str, Any]:
    """Return the nodes of `data.val` by split: `val`, or `val/day` and `val/night` for named validation sets."""
    if not isinstance(data.val, dict):
        return {}
    if "_target_" in data.val:
        return {"val": data.val}
    return {f"val/{name}": node for name, node in data.val.items() if node}


@dataclass(frozen=True)
class EmaConfig:
    """A running average of the weights; validation and predictions use it."""

    enabled: bool = setting(
        False, "keep an average of the weights; validation uses it. trainer.ema=true is short for it"
    )
    decay: float = setting(0.999, "weight of the old average at each update", at_least=0, below=1)
    update_every_n_steps: int = setting(1, "steps between updates", at_least=1)


@dataclass(frozen=True)
class EarlyStoppingConfig:
    """When to stop early: the monitored metric no longer improves, has reached a good value, or has diverged."""

    enabled: bool = setting(
        False, "end the run when a metric stops improving; trainer.early_stopping=true is short for it"
    )
    monitor: str | None = setting(None, "metric to watch; null: that of the checkpoints")
    mode: str = choice("auto", "min", "max", help="auto: by the metric's name")
    patience: int = setting(
        3,
        "number of validations without improvement before the run ends",
        at_least=1,
        aliases=("early_stopping_patience",),
    )
    min_delta: float = setting(
        0.0, "smallest change that counts as an improvement", at_least=0, aliases=("early_stopping_threshold",),
    )  # fmt: skip
    stopping_threshold: float | None = setting(None, "end the run when the metric is at least this good")
    divergence_threshold: float | None = setting(None, "end the run when the metric is worse than this")
    worse_than_best_by: float | None = setting(
        None, "end the run when the metric is worse than its best value by this much", above=0
    )
    min_epochs: int = setting(0, "no early stop before the end of this epoch", at_least=0)


@dataclass(frozen=True)
class CompileConfig:
    """What torch compiles, and torch's own arguments. `auto` compiles if that saves time before the run ends."""

    scope: str = choice(
        "off", "model", "regional", "step", "auto",
        help="what torch.compile compiles; trainer.compile=model is short for it",
        words={
            **dict.fromkeys(("true", "on", "yes"), "model"),
            **dict.fromkeys(("false", "off", "no", "none", "null"), "off"),
        },
    )  # fmt: skip
    mode: str | None = setting(
        None, "mode of torch.compile: default, reduce-overhead, max-autotune (compiles longest), ...",
        aliases=("torch_compile_mode",),
    )  # fmt: skip
    backend: str = setting("inductor", "backend of torch.compile", aliases=("torch_compile_backend",))
    fullgraph: bool = setting(False, "refuse models that cannot be compiled as one graph")
    dynamic: bool | None = setting(None, "compile one graph for all shapes; null: torch decides")


@dataclass(frozen=True)
class TrainerConfig:
    """The training loop. A step is one optimizer update."""

    max_epochs: int | None = setting(
        20, "limit in epochs; no default with max_steps, or with a max_duration other than time; null: none",
        at_least=0, aliases=("epochs", "max_epochs", "num_train_epochs"), words=NO_LIMIT,
    )  # fmt: skip
    max_steps: int | None = setting(
        None, "limit in optimizer updates", at_least=0, aliases=("max_steps",), words=NO_LIMIT
    )
    max_time: Any = setting(
        None, "limit: seconds, 90s, 10min, 2h, 1d or DD:HH:MM:SS", parse=parse_seconds, aliases=("max_time",)
    )
    max_duration: Any = setting(
        None, "limit in any unit: 2epoch, 500step, 10min, 1e6sample, 1e9token", parse=parse_any_duration,
        aliases=("max_duration",),
    )  # fmt: skip
    stop_grace_seconds: float = setting(
        120.0,
        "longest time in seconds from a stop signal to the end of the process, saved or not",
        at_least=0,
        read_by="the launcher",
    )
    watchdog_seconds: float = setting(
        0.0,
        "longest seconds without progress (hook, batch or save) before the run ends with its stacks; 0: no limit",
        at_least=0,
        words={"auto": "0"},
    )
    accumulate_grad_batches: int = setting(
        1, "micro-batches of one step", at_least=1,
        aliases=("accumulate_grad_batches", "gradient_accumulation_steps",
                 "trainer.gradient_accumulation_steps", "grad_accum_steps"),
    )  # fmt: skip
    gradient_clip_val: float | None = setting(
        None,
        "largest norm or value of the gradients; null: no clipping",
        at_least=0,
        aliases=("gradient_clip_val", "max_grad_norm", "clip_grad"),
    )
    gradient_clip_algorithm: str = choice("norm", "value", help="clip the total norm, or each value")
    val_check_interval: Any = setting(
        1.0, "time between validations: steps (100), part of an epoch (0.25), 2epoch, 10min, 1e6sample, 1e9token",
        parse=parse_interval,
        aliases=("eval_steps", "val_check_interval"),
    )  # fmt: skip
    check_val_every_n_epoch: int = setting(1, "epochs between validations", at_least=1)
    limit_train_batches: Any = setting(
        1.0, "a fraction (0.1) or a number (10) of the batches of an epoch", parse=check_batch_limit,
        aliases=("limit_train_batches",),
    )  # fmt: skip
    limit_val_batches: Any = setting(
        1.0, "a fraction (0.1) or a number (10) of validation batches, always the same samples; 0: no validation",
        parse=check_batch_limit_or_zero, aliases=("limit_val_batches",),
    )  # fmt: skip
    out_of_memory: str = choice(
        "split", "split-batchnorm", "stop",
        help="repeat the step in smaller micro-batches (also with batch norm), or end the run",
    )  # fmt: skip
    nan_policy: str = choice(
        "stop", "skip", "rollback", "ignore", help="what happens if gradients are not finite"
    )
    compile: CompileConfig = section(CompileConfig, "scope", ("compile", "torch_compile"))
    cuda_graphs: bool = setting(
        False, "record the forward and backward pass as a CUDA graph and replay it (GPU)"
    )
    channels_last: bool = setting(
        False, "use the channels-last memory format for images and convolutions", aliases=("channels_last",)
    )
    gradient_checkpointing: Any = setting(
        "none", "recompute activations in the backward pass; a number is the fraction of blocks that is not recomputed",
        kind=Literal["none", "auto", "full", "selective"] | Annotated[float, Limits(above=0, below=1)],
        aliases=("gradient_checkpointing", "trainer.activation_checkpointing", "activation_checkpointing"),
        words={"true": "full", "on": "full", "yes": "full", "false": "none", "off": "none", "no": "none"},
    )  # fmt: skip
    activation_offload: bool = setting(False, "keep activations in host memory until the backward pass (GPU)")
    cpu_allocator: str = choice(
        "auto", "keep", "libc", "return",
        help="freed host memory: kept for the next step, left to the C library, or returned to the system",
    )  # fmt: skip
    deterministic: bool = setting(
        False, "use only deterministic algorithms", aliases=("deterministic", "full_determinism")
    )
    detect_anomaly: bool = setting(
        False, "end the run at the operation whose backward pass gives NaN, and show its call; slow"
    )
    benchmark: bool = setting(False, "let cuDNN choose kernels by timing (GPU)")
    num_threads: Any = setting("auto", "number of threads of one operation on a CPU", kind=Count | Auto)
    check_task: bool = setting(
        True, "check at the first step that the loss of your own task or model is a sum and ignores padding"
    )
    ema: EmaConfig = section(EmaConfig, "enabled", ("ema",))
    early_stopping: EarlyStoppingConfig = section(EarlyStoppingConfig, "enabled", ("early_stopping",))


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are saved and kept: the newest (`last`), the best by a metric, and others by steps or time."""

    enabled: bool = setting(
        True,
        "save checkpoints; checkpoint=false is short for checkpoint.enabled=false",
        aliases=("trainer.enable_checkpointing",),
    )
    monitor: str | None = setting(
        None, "metric that chooses the best checkpoint; null: that of the task", aliases=("metric_for_best_model",),
    )  # fmt: skip
    mode: str = choice("auto", "min", "max", help="auto: by the metric's name")
    save_top_k: int = setting(
        1, "number of best checkpoints that are kept", at_least=0, aliases=("save_top_k",)
    )
    save_last: bool = setting(True, "save at the end of the run, and by train_time_interval")
    keep_last: int = setting(
        2, "number of newest checkpoints that are kept", at_least=1, aliases=("save_total_limit",)
    )
    every_n_train_steps: Any = setting(
        None, "also save at every multiple of this duration: steps (100), 1e6sample, 1e9token",
        parse=parse_saving_interval,
        aliases=("save_steps", "every_n_train_steps"),
    )  # fmt: skip
    every_n_epochs: int | None = setting(
        None, "also save at the end of every n-th epoch", at_least=1, aliases=("every_n_epochs",)
    )
    train_time_interval: Any = setting(
        60, "time between saves: seconds, 10min, 2h; null: do not save by time", parse=parse_seconds
    )
    async_save: bool = setting(True, "continue the training while a copy of the state is written")
    mirror: str | None = setting(
        None, "folder of an object store that also gets the checkpoints, such as s3://bucket/run", parse=parse_url,
    )  # fmt: skip
    mirror_keep: int = setting(
        2, "number of newest checkpoints that stay in the mirror, besides the best ones", at_least=1
    )
    adapter_only: bool = setting(False, "leave frozen weights out of checkpoints; they stay in init_from")


@dataclass(frozen=True)
class PrecisionConfig:
    """The number types of the run. The mode `auto` chooses 32-true or bf16-mixed by measurement."""

    mode: str = choice(*PRECISIONS, help="number types; chosen by precision=", words=PRECISION_WORDS)
    matmul: str = choice(
        "highest", "high", "medium", help="precision of float32 products; high allows TF32, medium allows bfloat16"
    )  # fmt: skip
    fp8: bool = setting(False, "compute linear layers in 8 bits (GPUs from Ada or Hopper on)")


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of a run and how they communicate."""

    mode: str = choice(*PARALLELS, help="chosen by parallel=", read_by="the launcher")
    accelerator: str = choice(
        "auto", "cpu", "cuda", "mps", help="kind of device", words={"gpu": "cuda"},
        aliases=("accelerator", "trainer.accelerator"), read_by="the launcher",
    )  # fmt: skip
    devices: Any = setting(
        "auto", "number of ranks on this machine, or a list of GPUs such as [0,1]; auto: one per GPU, or two on a CPU",
        kind=Count | Auto | list[NotNegativeInt],
        aliases=("devices", "trainer.devices", "nproc_per_node"), words={"-1": "auto"}, read_by="the launcher",
    )  # fmt: skip
    sync_batchnorm: bool = setting(
        False, "compute the statistics of batch norm over all ranks", aliases=("sync_batchnorm",)
    )
    find_unused_parameters: bool = setting(
        False, "allow parameters that a step does not use", aliases=("ddp_find_unused_parameters",),
    )  # fmt: skip
    static_graph: bool = setting(False, "promise that every step uses the same parameters")
    gradient_as_bucket_view: bool = setting(
        True, "store gradients in the buckets that are exchanged, which saves a copy"
    )
    bucket_cap_mb: float = setting(25.0, "MB that are exchanged at a time", above=0)
    compress: str = choice(
        "none", "bf16", help="number type in which gradients are exchanged; bf16: half the bytes"
    )
    reshard: bool = setting(True, "fsdp: release the weights of a block between forward and backward")
    replicate: int = setting(
        1, "fsdp: number of groups of ranks, each with the whole model (HSDP)", at_least=1
    )
    blocks: Any = setting(
        "auto", "fsdp: modules that are gathered as a whole, by patterns such as layers.*; auto: the repeated blocks",
        kind=str | list[str],
    )  # fmt: skip
    meta_device: bool = setting(
        False, "fsdp: create the weights in shards, so that no process ever has the whole model"
    )
    offload: bool = setting(False, "fsdp: keep weights and moments in host memory (GPUs)")
    timeout_seconds: float = setting(
        1800.0, "longest time of one exchange between ranks in seconds", above=0, read_by="the launcher"
    )
    meeting_seconds: float = setting(
        90.0, "longest wait in seconds until all ranks are connected", above=0, read_by="the launcher"
    )
    max_restarts: int = setting(
        0, "number of restarts of the ranks after a failure", at_least=0, read_by="the launcher"
    )


@dataclass(frozen=True)
class InitConfig:
    """Which weights of `init_from` are loaded if names or shapes differ from the names or shapes in the model."""

    skip: Any = setting(
        None, "tensors that are not loaded, by patterns of their names in the model, such as head.*",
        kind=str | list[str]
        | None,
    )  # fmt: skip
    rename: Any = setting(
        None, "prefixes to replace in the names of init_from, such as {backbone.: encoder.}; *: every name",
        parse=parse_name_map,
    )  # fmt: skip
    strict: bool = setting(
        True, "require all other tensors with the right shapes; false: load the tensors that fit"
    )


@dataclass(frozen=True)
class MonitorConfig:
    """What is logged, how often, and where it is shown."""

    log_every_n_steps: Any = setting(
        50, "steps between log points; also as 0.5epoch, 1e6sample", parse=parse_untimed_interval,
        aliases=("log_every_n_steps", "trainer.log_every_n_steps", "logging_steps"),
    )  # fmt: skip
    progress_bar: bool = setting(
        True, "show a progress bar on the terminal", aliases=("trainer.enable_progress_bar",)
    )
    samples_every: Any = setting(
        None,
        "time between text samples of a language model or sequence_vae in the report, such as 1epoch; null: none",
        parse=parse_steps_or_epochs,
    )
    metrics_file: bool = setting(True, "write metrics.jsonl into the run folder")
    hardware: bool = setting(True, "log memory and load of the machine")
    plots: bool = setting(True, "draw plots at the end of the run", read_by="the end of a run")
    verbose: bool = setting(True, "print a line for every validation")
    summary: bool = setting(
        False, "show automatic choices and a table of layers at the start; also --summary", aliases=("summary",),
    )  # fmt: skip
    tracker: Any = setting(
        None, "tracking services that also get metrics, config and pictures",
        kind=TrackerName | list[TrackerName] | None, read_by="the composition of the config",
    )  # fmt: skip
    histograms_every_n_steps: int | None = setting(
        None, "steps between histograms of weights and gradients, for trackers; null: none", at_least=1
    )
    listeners: dict[str, Any] = nodes("a tracker of your own: _target_ and arguments", typed="monitor")


@dataclass(frozen=True)
class RunConfig:
    """The complete config of a run. Other rooms of the package receive their settings from it."""

    data: DataConfig = section(DataConfig)
    model: Any = node("_target_ and arguments; chosen by model=", required=True)
    transform: dict[str, Any] = nodes(
        "changes of the model at the start, in this order: _target_ and arguments"
    )
    task: Any = node("_target_ and arguments; chosen by task=", required=True)
    optimizer: Any = node("_target_ and arguments; chosen by optimizer=", required=True, named=True)
    scheduler: Any = node("_target_ and arguments; chosen by scheduler=", named=True)
    precision: PrecisionConfig = section(PrecisionConfig, "mode")
    parallel: ParallelConfig = section(ParallelConfig, "mode")
    trainer: TrainerConfig = section(TrainerConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig, "enabled")
    monitor: MonitorConfig = section(MonitorConfig)
    hook: dict[str, Any] = nodes(
        "functions that are called at steps, epochs, validations and checkpoints: _target_ and arguments"
    )
    step: Any = node("_target_ of a step of your own: (run, micro_batches) -> StepReport")
    loop: Any = node("_target_ of a training loop of your own")
    seed: int | None = setting(
        42, "random seed; null: another one each time", at_least=0, below=2**32,
        aliases=("seed_everything",),
    )  # fmt: skip
    run_name: str | None = setting(
        None, "name of the run; null: names of data and model", aliases=("task_name",)
    )
    ckpt_path: str | None = setting(
        None, "a run or checkpoint whose whole state is loaded", aliases=("resume_from_checkpoint",)
    )
    init_from: str | None = setting(
        None,
        "a run, a checkpoint, or a .safetensors, .pt, .pth, .bin or .ckpt file with the first weights",
    )
    init: InitConfig = section(InitConfig)
    user: Any = field(
        default=None, metadata={"help": "values of your own that are stored in config.yaml", "opens": ANY}
    )
    # No settings: the keys that a person typed for this training, each of which some code must read; and the texts of
    # references to other settings, by key, as `data.train.path: ${data.path}/a.csv`.
    typed: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata={"omegaconf_ignore": True})
    references: dict[str, str] = field(
        default_factory=dict, compare=False, repr=False, metadata={"omegaconf_ignore": True}
    )


def list_setting_fields(schema: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a section that are settings."""
    return [item for item in dataclasses.fields(schema) if "omegaconf_ignore" not in item.metadata]


@cache
def settings(schema: type = RunConfig, prefix: str = "") -> dict[str, Setting]:
    """Return every setting and section of a config dataclass by its key."""
    by_key: dict[str, Setting] = {}
    hints = get_type_hints(schema)
    for item in list_setting_fields(schema):
        key, kind, about = f"{prefix}{item.name}", hints[item.name], dict(item.metadata)
        limits = about.pop("limits", None)
        kind = about.pop("kind", None) or _add_limits(kind, limits)
        inner = kind if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None
        default = item.default if item.default is not dataclasses.MISSING else {} if inner is None else None
        by_key[key] = Setting(key=key, default=default, kind=kind, section=inner, **about)
        if inner is not None:
            by_key |= settings(inner, f"{key}.")
    return by_key


def _add_limits(kind: Any, limits: Limits | None) -> Any:
    """Return the annotation of a field with its limits. For `int | None` the limits apply to the number."""
    if limits is None or limits == Limits():
        return kind
    number: Any = int if kind in (int, int | None) else float
    limited: Any = Annotated[number, limits]
    return limited | None if NoneType in get_args(kind) else limited


def record_setting_reads() -> None:
    """Add to `READ`, from now on, the key of every setting that code reads as an attribute of a `RunConfig`.

    Functions that copy or write a whole config read no attributes, so they do not count.
    """
    READ.clear()
    for prefix, kind in _list_sections().items():
        kind.__getattribute__ = _build_recording_reader(kind, prefix)  # type: ignore[method-assign, assignment]


def stop_recording_reads() -> None:
    """Undo `record_setting_reads`, so that reads cost nothing extra."""
    for kind in _list_sections().values():
        if "__getattribute__" in vars(kind):
            del kind.__getattribute__


def _list_sections() -> dict[str, type]:
    """Return the class of every section by the prefix of its keys, such as `trainer.`."""
    return {"": RunConfig} | {
        f"{key}.": found_section.section for key, found_section in settings().items() if found_section.section
    }


def _build_recording_reader(section: type, prefix: str) -> Callable[[Any, str], Any]:
    names = {item.name for item in dataclasses.fields(section)}

    def read_and_record(config: Any, name: str) -> Any:
        if name in names:
            READ.add(prefix + name)
        return object.__getattribute__(config, name)

    return read_and_record


def is_tracker(key: str) -> bool:
    """Return whether a key is a tracker or one of its arguments: a name below `monitor` that is not a setting."""
    parts = key.split(".")
    return parts[0] == "monitor" and len(parts) > 1 and f"monitor.{parts[1]}" not in settings()


def convert_to_plain_values(config: RunConfig) -> dict[str, Any]:
    """Return a config as nested dicts, as a user types it: trackers are keys of `monitor`."""
    values: dict[str, Any] = _copy_as_dicts(config)
    values["monitor"] |= values["monitor"].pop("listeners")
    return values


def _copy_as_dicts(value: Any) -> Any:
    """Return a deep copy with a dict for each section."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in list_setting_fields(type(value))]
        return {name: _copy_as_dicts(vars(value)[name]) for name in names}
    return copy.deepcopy(value)


def list_open_nodes(schema: type = RunConfig) -> tuple[str, ...]:
    """Return the keys of nodes in which users may add keys of their own."""
    return tuple(key for key, found_setting in settings(schema).items() if found_setting.opens)


def read_value(config: Any, key: str) -> Any:
    """Return the value at a dotted key, which may lead into an open node. Raise KeyError or AttributeError."""
    value = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def replace_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy with other values at some keys, such as `{"trainer.ema.enabled": False}`. Nothing is checked."""
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            value = replace_values(
                config[name] if isinstance(config, dict) else vars(config)[name], {rest: value}
            )
        if isinstance(config, dict):
            config = config | {name: value}  # type: ignore[assignment]
        else:
            config = type(config)(**vars(config) | {name: value})
    return config


def map_config(value: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """Return a copy in which each leaf is replaced by `change(key, value)`."""
    inner = f"{key}." if key else ""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in list_setting_fields(type(value))]
        changed = {name: map_config(vars(value)[name], change, f"{inner}{name}") for name in names}
        return type(value)(**vars(value) | changed)
    if isinstance(value, dict):
        return {name: map_config(item, change, f"{inner}{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [map_config(item, change, f"{inner}{number}") for number, item in enumerate(value)]
    return change(key, value)


def iterate_config_leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Return an iterator over (key, value) of all values that are not sections, dicts or lists."""
    leaves: list[tuple[str, Any]] = []
    map_config(value, lambda key, leaf: leaves.append((key, leaf)))
    return iter(leaves)
