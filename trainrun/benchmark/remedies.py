"""Settings that help against each cause of a slow run. `diagnose` proposes them, and `autotune` tries them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from trainrun.benchmark.run_overrides import compose_config, replace_overrides
from trainrun.errors import ConfigError

if TYPE_CHECKING:
    from trainrun.benchmark.diagnose.diagnosis import Diagnosis, WhatIf
    from trainrun.benchmark.worker_messages import RunInfo

EXACT, NUMERIC, TRAINING = "exact", "numeric", "training"
EFFECTS: Final = (EXACT, NUMERIC, TRAINING)
EFFECT_TEXTS: Final = {EXACT: "the same", NUMERIC: "rounds differently", TRAINING: "changes"}
BUSY: Final = 0.5  # cores: loading that computes; below, it waits


class Remedy(NamedTuple):
    """Settings that help against one cause.

    effect: EXACT if the training stays the same, NUMERIC if rounding differs, TRAINING if the training or its logs
        change.
    changes: what changes, in words. start_cost: what it costs at the start, in words.
    """

    overrides: tuple[str, ...]
    effect: str = EXACT
    changes: str = ""
    start_cost: str = ""

    @property
    def effect_text(self) -> str:
        """Return `the same`, `rounds differently`, or `changes the batch of a step`."""
        return f"changes {self.changes}" if self.changes else EFFECT_TEXTS[self.effect]

    @property
    def notes(self) -> list[str]:
        """Return what a user should know before using it."""
        return [*([] if self.effect == EXACT else [self.effect_text]), *filter(None, [self.start_cost])]

    @property
    def compiles(self) -> bool:
        return self.start_cost == COMPILE_COST

    @property
    def shortens_samples(self) -> bool:
        return any(override.startswith("data.max_sequence_length=") for override in self.overrides)

    def __str__(self) -> str:
        return " ".join(self.overrides)


COMPILE_COST: Final = (
    "compiles 7 s or more at the start, needs a C++ compiler, not every model can be compiled"
)
CACHE: Final = Remedy(("data.cache=memory",), start_cost="the first epoch reads all samples into memory")
WORKERS_BY_RULE: Final = Remedy(("data.engine=workers", "data.num_workers=auto"))
# Loading that waits, for a disk or a network, is shared by more readers than there are cores.
FOUR_THREADS: Final = Remedy(("data.engine=threads", "data.num_threads=4"))  # for data that is thread-safe
FOUR_WORKERS: Final = Remedy(("data.engine=workers", "data.num_workers=4"))
GRAPHS: Final = Remedy(("trainer.cuda_graphs=true",))
FUSED: Final = Remedy(("optimizer.fused=null", "optimizer.foreach=null"))  # as the runner chooses
COMPILED_STEP: Final = Remedy(("trainer.compile.scope=step",), NUMERIC, start_cost=COMPILE_COST)
NUMBER_TYPES: Final = (
    Remedy(("precision.mode=bf16-mixed",), NUMERIC),
    Remedy(("precision.mode=32-true",), NUMERIC),  # where 16 bits are emulated
    Remedy(("precision.matmul=medium",), NUMERIC),
)
CHANNELS_LAST: Final = Remedy(("trainer.channels_last=true",))
BFLOAT16_CHANNELS_LAST: Final = Remedy(("precision.mode=bf16-mixed", "trainer.channels_last=true"), NUMERIC)
COMPILED: Final = (COMPILED_STEP, Remedy(("trainer.compile.scope=model",), NUMERIC, start_cost=COMPILE_COST))
ATTENTION_KERNELS: Final = (
    Remedy(("model.attention=plain",), NUMERIC),
    Remedy(("model.attention=flash",), NUMERIC),
)
LEAST_TO_COMPILE: Final = 15.0  # seconds of a run: compiling takes 7 or more, and gains at most a half

OTHER_ORDER: Final = "the order of the samples"
OTHER_BATCH: Final = "the batch of a step"
REMEDIES: Final[dict[str, tuple[Remedy, ...]]] = {
    "compile": (
        Remedy(("trainer.compile.dynamic=true",), NUMERIC),
        Remedy(("trainer.compile.scope=off",), NUMERIC),
        Remedy(("data.padding=bucket", "data.pad_multiple=64"), TRAINING, OTHER_ORDER),
    ),
    "logging": (
        Remedy(("monitor.log_every_n_steps=500",), TRAINING, "how often values are logged"),
        Remedy(("monitor=fast",), TRAINING, "what is logged"),
    ),
    "checkpoint": (
        Remedy(("checkpoint.async_save=true",)),
        Remedy(
            ("checkpoint.every_n_train_steps=null", "checkpoint.train_time_interval=10min"),
            TRAINING,
            "how often checkpoints are written",
        ),
    ),
    "validation": (
        Remedy(("trainer.check_val_every_n_epoch=5",), TRAINING, "how often the run validates"),
        Remedy(("trainer.limit_val_batches=0.2",), TRAINING, "what the run validates on"),
    ),
    "ranks": (
        Remedy(("parallel.static_graph=true",)),
        Remedy(("trainer.accumulate_grad_batches=4",), TRAINING, OTHER_BATCH),
    ),
    "update": (FUSED,),
}


def find_remedies(what_if: WhatIf, diagnosis: Diagnosis) -> tuple[Remedy, ...]:
    """Return the remedies for one cause that this run accepts and does not have yet. Those that change least come
    first.
    """
    name, measured = what_if.name, (what_if.setting,)
    remedies = REMEDIES.get(name, ())
    if name == "data":
        remedies = loading_remedies(diagnosis)
    elif name == "threads":
        remedies = (Remedy(measured),)
    elif name == "padding":
        remedies = (Remedy(measured, TRAINING, OTHER_ORDER),)
    elif name == "dispatch":
        records = diagnosis.info.device.startswith("cuda") and diagnosis.info.one_graph
        larger = Remedy(measured, TRAINING, OTHER_BATCH)
        remedies = (*[GRAPHS] * records, COMPILED_STEP, larger)
    return tuple(select_new_settings(remedies, diagnosis.overrides))


def select_new_settings(remedies: Iterable[Remedy], overrides: Sequence[str]) -> list[Remedy]:
    """Return the remedies that give a valid config other than these overrides, each config once."""
    configs, remaining = [compose_config(overrides)], []
    for remedy in remedies:
        try:
            config = compose_config(replace_overrides(overrides, remedy.overrides))
        except ConfigError:
            continue
        if config not in configs:
            configs.append(config)
            remaining.append(remedy)
    return remaining


def loading_remedies(diagnosis: Diagnosis) -> tuple[Remedy, ...]:
    """Return the remedies for loading that waits or computes; none if the samples are in memory already."""
    most_readers = diagnosis.info.most_readers
    if most_readers is not None:  # an iterable source is neither cached nor read by threads
        number = f"data.num_workers={min(4, most_readers)}"
        changes = OTHER_ORDER if most_readers > 1 else ""
        return (Remedy(("data.engine=workers", number), TRAINING if changes else EXACT, changes),)
    if not is_loading_busy(diagnosis):
        return (FOUR_THREADS if diagnosis.info.thread_safe else FOUR_WORKERS), CACHE
    return () if diagnosis.info.engine == "resident" else (CACHE, WORKERS_BY_RULE)


def is_loading_busy(diagnosis: Diagnosis) -> bool:
    return diagnosis.load_cores >= BUSY


def model_remedies(info: RunInfo, run_seconds: float | None) -> dict[str, list[Remedy]]:
    """Return remedies that may make the model faster, in groups that are tried together.

    run_seconds: the length of the run; None for a run without an end.
    """
    has_convolutions = any("Conv2d" in layer for layer in info.layers)
    layouts = [CHANNELS_LAST, BFLOAT16_CHANNELS_LAST] if has_convolutions else []
    kernels = [*ATTENTION_KERNELS] if "Gpt" in info.layers else []
    long = run_seconds is None or run_seconds >= LEAST_TO_COMPILE
    return {
        "number types and layout": [*NUMBER_TYPES, *layouts],
        "attention": kernels,
        "Python between kernels": [*COMPILED] * long,
    }
