"""What `autotune` tries, in its order, and the techniques of `autotune --table`: overrides of a run.

Options leave the training what it is: the global batch, the samples and their order stay. Techniques are what everybody
says makes training fast; some of them change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

from trainrun.benchmark.remedies import FUSED, GRAPHS, tried_by_autotune
from trainrun.benchmark.run_overrides import loader_overrides
from trainrun.benchmark.search.acceptance import EXACT, NUMERIC
from trainrun.benchmark.worker_messages import RunInfo
from trainrun.config.rules import step_obstacles
from trainrun.config.schema import RunConfig
from trainrun.data.engines.choice import numbers_up_to

NEGLIGIBLE_LOAD: Final = 0.02  # of a step: no engine can give back more
MOST_SPLITS: Final = 4  # a micro-batch is divided by no more
COMPILE_SECONDS: Final = 6.5  # of a tiny model on a CPU, the least there is; a GPU's is no less
MOST_COMPILED_GAIN: Final = 2.0
READERS: Final = 4  # threads or workers; reading may wait for a disk, so also on fewer cores
GPT: Final = "trainrun.model.gpt.Gpt"
Overrides = tuple[str, ...]


@dataclass(frozen=True)
class SearchFacts:
    """What is known of the run before anything is tried. load_seconds: of reading the samples of a step.
    run_seconds: of the whole training; infinite if only its user ends it."""

    config: RunConfig
    info: RunInfo
    cores: int
    step_seconds: float
    load_seconds: float
    run_seconds: float

    @property
    def on_cpu(self) -> bool:
        return self.info.device == "cpu"

    def has(self, name: str) -> bool:
        """Whether the model has a layer with this in its class name."""
        return any(name in layer for layer in self.info.layers)


class TriedSetting(NamedTuple):
    """gate: what may differ, see `acceptance`."""

    overrides: Overrides
    gate: str = EXACT


@dataclass(frozen=True)
class SearchOption:
    """settings: all that could be tried, the present one included. skip: why it cannot matter here, or "".
    weight: of its time against that of the others."""

    name: str
    settings: Callable[[SearchFacts], Sequence[TriedSetting]]
    skip: Callable[[SearchFacts], str] = lambda facts: ""
    weight: float = 1.0


def number_formats(facts: SearchFacts) -> list[TriedSetting]:
    """Precision, layout and attention together: each of them may pay only with another. The promising ones first."""
    config, mode = facts.config, facts.config.precision.mode
    modes = [mode]
    if mode in ("32-true", "bf16-mixed", "16-mixed"):
        modes = [
            one for one in ("bf16-mixed", "16-mixed", "32-true") if one != "16-mixed" or not facts.on_cpu
        ]
        modes += [] if mode in modes else [mode]
    layouts = [False, True] if facts.has("Conv2d") else [config.trainer.channels_last]
    kernels: list[str] = [""]
    if (config.model or {}).get("_target_") == GPT:  # `fp32` differs from `flash` in 16 bits only
        kernels = ["auto", "flash", "plain", *["fp32"] * (len(modes) > 1)]
    found = []
    for chosen, last, kernel in product(modes, layouts, kernels):
        overrides = [f"precision={chosen}"] if chosen != mode else []
        if last != config.trainer.channels_last:
            overrides.append(f"trainer.channels_last={str(last).lower()}")
        if kernel and kernel != config.model.get("attention"):
            overrides.append(f"model.attention={kernel}")
        found.append(TriedSetting(tuple(overrides), EXACT if chosen == mode else NUMERIC))
    if mode == "32-true" and config.precision.matmul == "highest":
        found += [
            TriedSetting(("precision.matmul=medium", *["trainer.channels_last=true"] * last), NUMERIC)
            for last in layouts
        ]
    return found


def threads(facts: SearchFacts) -> list[TriedSetting]:
    most = max(1, facts.cores // facts.info.world_size)
    return [TriedSetting((f"trainer.num_threads={number}",)) for number in numbers_up_to(most)]


def skip_threads(facts: SearchFacts) -> str:
    if facts.config.trainer.deterministic:
        return "trainer.deterministic=true fixes the number of threads"
    return "" if facts.cores > 1 and facts.on_cpu else "one core, or not a CPU"


def loader(facts: SearchFacts) -> list[TriedSetting]:
    """As many readers as hide the reading behind the steps, and twice as many; threads only if the data is safe."""
    needed = math.ceil(facts.load_seconds / max(facts.step_seconds - facts.load_seconds, 1e-9))
    readers = sorted({min(READERS, number) for number in (max(1, needed), 2 * needed)})
    ways = [("resident", 0), ("workers", 0)]
    ways += [(engine, number) for number in readers for engine in ("threads", "workers")
             if engine == "workers" or number == 1 or facts.info.thread_safe]  # fmt: skip
    return [TriedSetting(tuple(loader_overrides(facts.config, *way))) for way in ways]


def skip_loader(facts: SearchFacts) -> str:
    fraction = facts.load_seconds / facts.step_seconds
    return f"reading takes {100 * fraction:.2g} % of a step" if 0 < fraction < NEGLIGIBLE_LOAD else ""


def remedies_of(cause: str) -> Callable[[SearchFacts], list[TriedSetting]]:
    """Return what `diagnose` proposes against a cause and leaves the training the same."""
    return lambda facts: [TriedSetting(overrides) for overrides in tried_by_autotune(cause)]


def skip_data(facts: SearchFacts) -> str:
    if facts.info.engine == "resident":
        return "the samples are in memory already"
    return skip_loader(facts)


def skip_ranks(facts: SearchFacts) -> str:
    return "" if facts.config.parallel.mode == "ddp" else "only for parallel=ddp"


def skip_compiling(facts: SearchFacts) -> str:
    return "nothing is compiled" if facts.config.trainer.compile.scope == "off" else ""


def micro_batch(facts: SearchFacts) -> list[TriedSetting]:
    """The same global batch in more or fewer parts."""
    data = facts.config.data
    batch, times = data.batch_size, facts.config.trainer.accumulate_grad_batches
    if data.global_batch_size is not None:
        times = max(1, data.global_batch_size // (batch * facts.info.world_size))
    pairs = [(batch // n, times * n) for n in (2, MOST_SPLITS) if batch % n == 0]
    pairs += [(batch * n, times // n) for n in (2, 4, 8, 16, 32) if times % n == 0]
    found = []
    for size, parts in pairs:  # a global batch size sets the accumulation itself
        own = () if data.global_batch_size is not None else (f"trainer.accumulate_grad_batches={parts}",)
        found.append(TriedSetting((f"data.batch_size={size}", *own)))
    return found


def skip_other_parts(facts: SearchFacts) -> str:
    """Why a step's samples must not be divided otherwise."""
    if facts.has("BatchNorm"):
        return "batch norm looks at a whole micro-batch: another one is another training"
    if facts.config.data.drop_last:
        return "data.drop_last=true: other batches leave out other samples"
    if facts.config.data.padding not in ("longest", "max"):
        return f"data.padding={facts.config.data.padding} makes the batches itself"
    return ""


def skip_kernels(facts: SearchFacts) -> str:
    return "" if "fused" in (facts.config.optimizer or {}) else "the optimizer has one kernel only"


def skip_memory(facts: SearchFacts) -> str:
    trainer = facts.config.trainer
    saves = str(trainer.gradient_checkpointing) != "none" or trainer.activation_offload
    return "" if saves else "nothing is computed again or offloaded to save memory"


def skip_compile(facts: SearchFacts) -> str:
    saved = facts.run_seconds * (1 - 1 / MOST_COMPILED_GAIN)
    if facts.config.trainer.compile.scope != "off" or saved >= COMPILE_SECONDS:
        return ""
    return (
        f"break-even: at {MOST_COMPILED_GAIN:.0f}x this run of {facts.run_seconds:.0f} s would save {saved:.0f} s, "
        f"and compiling takes {COMPILE_SECONDS:g} s or more"
    )


def compilers(facts: SearchFacts) -> list[TriedSetting]:
    """Graphs that are recorded already go with a compiled step, and not with a compiled model."""
    plain = ("trainer.cuda_graphs=false",) * facts.config.trainer.cuda_graphs
    others = {"step": (), "regional": plain, "model": plain, "off": ()}
    return [TriedSetting((f"trainer.compile.scope={scope}", *more)) for scope, more in others.items()]


def skip_graphs(facts: SearchFacts) -> str:
    config = facts.config
    if not facts.info.device.startswith("cuda"):
        return "only a CUDA device has them"
    if config.trainer.compile.scope not in ("off", "step"):
        return f"does not go with trainer.compile.scope={config.trainer.compile.scope}"
    obstacle = next(step_obstacles(config), None)
    return f"does not go with {obstacle[0]}" if obstacle else ""


def fixed(*settings: Overrides) -> Callable[[SearchFacts], list[TriedSetting]]:
    return lambda facts: [TriedSetting(overrides) for overrides in settings]


COMPILE: Final = "compile"
NUMBERS: Final = "numbers"
DATA: Final = "data"
NOT_FUSED: Final = ("optimizer.fused=false", "optimizer.foreach=true")
NO_SAVING: Final = ("trainer.gradient_checkpointing=none", "trainer.activation_offload=false")
# What usually gives most first: a short search ends before the last. How many threads pay, and whether reading is
# hidden, depends on the number types, so these come first: two threads made an LSTM faster in 32 bits, slower in 16.
# What `diagnose` proposes against slow loading comes first: behind it nothing else is seen.
OPTIONS: Final = (
    SearchOption(DATA, remedies_of("data"), skip_data, 2.0),
    SearchOption(NUMBERS, number_formats, weight=3.0),
    SearchOption("threads", threads, skip_threads),
    SearchOption("CUDA graphs", fixed(GRAPHS.overrides, ("trainer.cuda_graphs=false",)), skip_graphs),
    SearchOption("loader", loader, skip_loader, 2.0),
    SearchOption("micro-batch", micro_batch, skip_other_parts, 1.5),
    SearchOption("optimizer", fixed(FUSED.overrides, NOT_FUSED), skip_kernels),
    SearchOption("collector", fixed(("trainer.python_gc=between_steps",)), weight=0.5),
    SearchOption("logging", remedies_of("logging"), weight=0.5),
    SearchOption("ranks", remedies_of("ranks"), skip_ranks),
    SearchOption("memory", fixed(NO_SAVING), skip_memory),
    SearchOption("shapes", remedies_of("compile"), skip_compiling, 2.0),
    SearchOption(COMPILE, compilers, skip_compile, 3.0),
)  # fmt: skip


@dataclass(frozen=True)
class Technique:
    """on, off: overrides with it and without it. gate: EXACT, NUMERIC, or OTHER. skip: why it cannot be measured."""

    title: str
    on: Callable[[SearchFacts], Overrides]
    off: Overrides = ()
    gate: str = EXACT
    skip: Callable[[SearchFacts], str] = lambda facts: ""


OTHER: Final = "other"  # another training: other batches, other samples
TIMES: Final = 4


def gpu_only(facts: SearchFacts) -> str:
    return "needs a GPU" if facts.on_cpu else ""


def cpu_only(facts: SearchFacts) -> str:
    return "" if facts.on_cpu else "not a CPU"


def larger_batch(facts: SearchFacts) -> Overrides:
    data = facts.config.data
    sizes = {"batch_size": data.batch_size, "global_batch_size": data.global_batch_size}
    return tuple(f"data.{name}={TIMES * size}" for name, size in sizes.items() if size is not None)


def half_length(facts: SearchFacts) -> Overrides:
    return (f"data.max_sequence_length={max(1, (facts.config.data.max_sequence_length or 2) // 2)}",)


def halves(facts: SearchFacts) -> Overrides:
    settings = micro_batch(facts)
    return settings[0].overrides if facts.config.data.batch_size % 2 == 0 else ()


def loads(engine: str, number: int) -> Callable[[SearchFacts], Overrides]:
    return lambda facts: tuple(loader_overrides(facts.config, engine, number))


def always(*overrides: str) -> Callable[[SearchFacts], Overrides]:
    return lambda facts: overrides


TECHNIQUES: Final = (
    Technique("no workers (0)", loads("workers", 0)),
    Technique("2 workers", loads("workers", 2)),
    Technique("8 workers", loads("workers", 8)),
    Technique("pinned memory", always("data.pin_memory=true"), ("data.pin_memory=false",), skip=gpu_only),
    Technique("resident data", loads("resident", 0)),
    Technique("prefetch thread", loads("threads", 1)),
    Technique("mixed precision (bf16)", always("precision=bf16-mixed"), ("precision=32-true",), NUMERIC),
    Technique("mixed precision (fp16)", always("precision=16-mixed"), ("precision=32-true",), NUMERIC, gpu_only),
    Technique("TF32", always("precision.matmul=high"), ("precision.matmul=highest",), NUMERIC, gpu_only),
    Technique("channels-last layout", always("trainer.channels_last=true"), ("trainer.channels_last=false",),
              skip=lambda facts: "" if facts.has("Conv2d") else "the model has no convolutions"),
    Technique("accumulation (2 halves)", halves, skip=skip_other_parts),
    Technique("fused optimizer", always(*FUSED.overrides), ("optimizer.fused=false", "optimizer.foreach=false"),
              skip=skip_kernels),
    Technique("freed memory kept", always("trainer.cpu_allocator=auto"), ("trainer.cpu_allocator=libc",),
              skip=cpu_only),
    Technique("one thread", always("trainer.num_threads=1"), skip=skip_threads),
    Technique("a thread for each core", lambda facts: (f"trainer.num_threads={facts.cores}",), skip=skip_threads),
    Technique("compiled (whole step)", always("trainer.compile.scope=step"), ("trainer.compile.scope=off",)),
    Technique("compiled (model)", always("trainer.compile.scope=model"), ("trainer.compile.scope=off",)),
    Technique("CUDA graphs", always(*GRAPHS.overrides), ("trainer.cuda_graphs=false",), skip=gpu_only),
    Technique("less monitoring", always("monitor.log_every_n_steps=500", "monitor.hardware=false")),
    Technique(f"batch {TIMES}x as large", larger_batch, gate=OTHER),
    Technique("half the length", half_length, gate=OTHER,
              skip=lambda facts: "" if facts.config.data.max_sequence_length else "no data.max_sequence_length"),
)  # fmt: skip
