"""The run config: its sections with their defaults, and where the `conf/` folder is.

This page is also the schema that Hydra composes into. A value's rules stand next to it, so that
`words/checks.py` finds all faults of a config together, before anything starts. No torch here: a config
mistake is answered before torch could be imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainrun.errors import ConfigError

PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true", "auto")
SAME = "same"  # of data.val_transform: that of data.transform
PARALLELS = ("single", "ddp")
OPEN_NODES = (
    "model", "task", "optimizer", "scheduler", "data.train", "data.val", "data.test", "data.collate_fn",
    "data.transform", "data.val_transform", "data.test_transform", "data.augment",
    "loop", "user", "monitor.listeners",
)  # fmt: skip


def one_of(*choices: str, default: str) -> Any:
    return field(default=default, metadata={"choices": choices})


def number(default: Any, at_least: float | None = None, above: float | None = None,
           at_most: float | None = None, below: float | None = None) -> Any:  # fmt: skip
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    return field(default=default, metadata=limits)


@dataclass
class DataConfig:
    """Which samples, and how they become batches (`batch_size` is per device).

    train, val, test, collate_fn are open nodes: `_target_` and the keyword arguments of that target.
    """

    name: str = "custom"
    path: str | None = None
    train: Any = None
    val: Any = None
    test: Any = None
    shape: list[int] | None = None
    num_classes: int | None = number(None, at_least=2)
    batch_size: int = number(32, at_least=1)
    val_batch_size: int | None = number(None, at_least=1)
    global_batch_size: int | None = number(None, at_least=1)
    shuffle: bool = True
    drop_last: bool = False
    engine: str = one_of("auto", "resident", "workers", "threads", default="auto")
    num_workers: Any = number("auto", at_least=0)
    num_threads: Any = number("auto", at_least=1)
    cache: str = "none"
    transform: Any = None
    val_transform: Any = None
    test_transform: Any = None
    augment: dict[str, Any] = field(default_factory=dict)
    on_error: str = one_of("raise", "skip", default="raise")
    max_skipped_share: float = number(0.01, at_least=0, at_most=1)
    pin_memory: bool = True
    persistent_workers: bool = True
    prefetch_factor: int = number(2, at_least=1)
    worker_timeout_seconds: float = number(300.0, at_least=0)
    collate_fn: Any = None
    max_sequence_length: int | None = number(None, at_least=1)
    truncate: str = one_of("left", "right", "drop", "split", default="right")
    padding: str = one_of("longest", "max", "bucket", "pack", "token_budget", default="longest")
    max_tokens: int | None = number(None, at_least=1)
    pad_multiple: int | None = number(None, at_least=1)


@dataclass
class EmaConfig:
    """A running average of the weights; validation and predictions use it."""

    enabled: bool = False
    decay: float = number(0.999, at_least=0, below=1)
    update_every_n_steps: int = number(1, at_least=1)


@dataclass
class EarlyStoppingConfig:
    """Stops when the monitored metric no longer improves, or is good enough."""

    enabled: bool = False
    monitor: str | None = None
    mode: str = one_of("auto", "min", "max", default="auto")
    patience: int = number(3, at_least=1)
    min_delta: float = number(0.0, at_least=0)
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None


@dataclass
class CompileConfig:
    """What becomes generated code, with torch's own arguments; auto: what pays before the run ends."""

    scope: str = one_of("off", "model", "regional", "step", "auto", default="off")
    mode: str | None = None
    backend: str = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        self.scope = {"False": "off", "True": "model"}.get(str(self.scope), self.scope)  # YAML's off and on


@dataclass
class TrainerConfig:
    """The loop. A step is one optimizer update, everywhere."""

    max_epochs: int | None = number(20, at_least=0)
    max_steps: int | None = number(None, at_least=0)
    max_time: Any = None
    stop_grace_seconds: float = number(120.0, at_least=0)
    watchdog_seconds: Any = number("auto", at_least=0)
    accumulate_grad_batches: int = number(1, at_least=1)
    gradient_clip_val: float | None = number(None, at_least=0)
    gradient_clip_algorithm: str = one_of("norm", "value", default="norm")
    val_check_interval: Any = 1.0
    check_val_every_n_epoch: int = number(1, at_least=1)
    limit_train_batches: Any = 1.0
    limit_val_batches: Any = 1.0
    limit_test_batches: Any = 1.0
    out_of_memory: str = one_of("split", "split-batchnorm", "stop", default="split")
    nan_policy: str = one_of("stop", "skip", "rollback", "ignore", default="stop")
    max_rollbacks: int = number(3, at_least=1)
    compile: CompileConfig = field(default_factory=CompileConfig)
    cuda_graphs: bool = False
    channels_last: bool = False
    gradient_checkpointing: Any = "none"
    activation_offload: bool = False
    cpu_offload: str = one_of("none", "optimizer", "parameters", default="none")
    optimizer_in_backward: bool = False
    freed_memory: str = one_of("auto", "keep", "libc", "return", default="auto")
    deterministic: bool = False
    benchmark: bool = False
    num_threads: Any = number("auto", at_least=1)
    flush_denormal: bool = False
    check_task: bool = True
    python_gc: str = one_of("between_steps", "automatic", default="between_steps")
    ema: EmaConfig = field(default_factory=EmaConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)


@dataclass
class CheckpointConfig:
    """What is kept: the newest (`last`), the best by a metric, and others by steps or time.

    async_save: the training goes on while a checkpoint is written, for one copy of the state in memory.
    strict: a resume elsewhere (torch, threads, ranks, device, chip) than where it was saved is refused.
    """

    enabled: bool = True
    monitor: str | None = None
    mode: str = one_of("auto", "min", "max", default="auto")
    save_top_k: int = number(1, at_least=0)
    save_last: bool = True
    keep_last: int = number(2, at_least=1)
    every_n_train_steps: int | None = number(None, at_least=1)
    train_time_interval: Any = 60
    async_save: bool = True
    strict: bool = False


@dataclass
class PrecisionConfig:
    """Number types; mode `auto` is 32-true or bf16-mixed, whichever is measured to be faster. matmul: what float32
    products may round to (TF32 on a GPU); fp8: linear layers in 8 bits.

    master_weights: of bf16-true, float32 copies that the optimizer updates.
    """

    mode: str = one_of(*PRECISIONS, default="32-true")
    matmul: str = one_of("highest", "high", "medium", default="highest")
    fp8: bool = False
    master_weights: bool = False


@dataclass
class ParallelConfig:
    """Who trains together. devices: `auto` is every GPU, or two ranks on a CPU."""

    mode: str = one_of(*PARALLELS, default="single")
    accelerator: str = one_of("auto", "cpu", "cuda", "mps", default="auto")
    devices: Any = number("auto", at_least=1)
    sync_batchnorm: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: float = number(25.0, above=0)
    timeout_seconds: float = number(1800.0, above=0)
    max_restarts: int = number(0, at_least=0)


@dataclass
class MonitorConfig:
    """What is logged, how often, and where it is shown."""

    log_every_n_steps: int = number(50, at_least=1)
    plot_every_n_steps: int | None = number(None, at_least=1)
    window_size: int = number(20, at_least=1)
    progress_bar: bool = True
    metrics_file: bool = True
    hardware: bool = True
    sync_debug: bool = False
    plots: bool = True
    verbose: bool = True
    listeners: dict[str, Any] = field(default_factory=dict)
    on_error: str = one_of("warn", "raise", default="warn")


@dataclass
class RunConfig:
    """The whole run: the only config object that the rest of the code sees.

    ckpt_path: a run or checkpoint whose whole state is taken over. init_from: weights alone, of a run, a
    checkpoint or a safetensors file.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: Any = None
    task: Any = None
    optimizer: Any = None
    scheduler: Any = None
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    loop: Any = None
    seed: int | None = number(42, at_least=0, below=2**32)
    run_name: str | None = None
    ckpt_path: str | None = None
    init_from: str | None = None
    user: Any = None


def conf_dir() -> Path:
    """The folder of the config groups: inside an installed package, or next to it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "trainrun.yaml").is_file():
            return folder
    raise FileNotFoundError(f"trainrun's own config files are not in {here}: install the package again")


def groups(folders: list[Path]) -> list[str]:
    return sorted({item.name for folder in folders for item in folder.iterdir() if item.is_dir()})


def options(group: str, folders: list[Path]) -> list[str]:
    return sorted({item.stem for folder in folders for item in (folder / group).glob("*.yaml")})


def user_conf_dirs(extra: list[str], working_dir: Path) -> list[Path]:
    """Folders searched before ours: each --config-dir, then ./conf where it has one of our groups."""
    folders = [Path(folder).expanduser().resolve() for folder in extra]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: no such folder")
    beside = (working_dir / "conf").resolve()
    if beside != conf_dir() and any((beside / group).is_dir() for group in groups([conf_dir()])):
        folders.append(beside)
    return folders
