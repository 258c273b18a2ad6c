"""What `tune` tries, in its order: one table of knobs that leave the training what it is.

A value is words of a run, so that every rule of the config holds for it too. The global batch, the samples and
their order stay; what changes anything else (learning rate, larger batches, shorter sequences) has no place here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

from trainrun.config import RunConfig
from trainrun.errors import ConfigError
from trainrun.lab.choices import config_of, loader_words
from trainrun.lab.facts import Facts
from trainrun.lab.gate import EXACT, NUMERIC
from trainrun.start.threads import numbers_up_to

NEGLIGIBLE_LOAD: Final = 0.02  # of a step: no engine can give back more
FULL_MEMORY: Final = 0.5  # of the device: from there memory may be what limits the micro-batch
ROOMY_MEMORY: Final = 0.3  # below it nothing needs to be saved
MOST_SPLITS: Final = 4  # a micro-batch is divided by no more
COMPILE_SECONDS: Final = 6.5  # of a tiny model on a CPU, the least there is; a GPU's is no less
MOST_COMPILED_GAIN: Final = 2.0
READERS: Final = 4  # threads or workers; reading may wait for a disk, so also on fewer cores
GPT: Final = "trainrun.model.gpt.Gpt"

Words = tuple[str, ...]


class Value(NamedTuple):
    """One setting to try. mathematics: what may differ, see `trainrun.lab.gate`."""

    words: Words
    mathematics: str = EXACT


@dataclass(frozen=True)
class Knob:
    """values: all that could be tried, the present ones included. applies: why it cannot matter here, or "".
    share: of the time for the search, against that of the other knobs."""

    name: str
    values: Callable[[Facts], Sequence[Value]]
    applies: Callable[[Facts], str]
    share: float


def threads(facts: Facts) -> list[Value]:
    most = max(1, facts.cores // facts.ready.world_size)
    return [Value((f"trainer.num_threads={number}",)) for number in numbers_up_to(most)]


def threads_apply(facts: Facts) -> str:
    if facts.config.trainer.deterministic:
        return "trainer.deterministic=true fixes the number of threads"
    return "" if facts.cores > 1 and facts.on_cpu else "one core, or not a CPU"


def loader(facts: Facts) -> list[Value]:
    """As many readers as hide the reading behind the steps, and twice as many; threads only where the data bears it."""
    needed = math.ceil(facts.load_seconds / max(facts.step_seconds - facts.load_seconds, 1e-9))
    readers = {min(READERS, number) for number in (max(1, needed), 2 * needed)}
    ways = [("resident", 0), ("workers", 0)]
    ways += [(engine, number) for number in sorted(readers) for engine in ("threads", "workers")
             if engine == "workers" or number == 1 or facts.ready.thread_safe]  # fmt: skip
    return [Value(tuple(loader_words(facts.config, *way))) for way in ways]


def loader_applies(facts: Facts) -> str:
    share = facts.load_seconds / facts.step_seconds
    if facts.load_seconds and share < NEGLIGIBLE_LOAD:
        return f"reading takes {100 * share:.2g} % of a step"
    return ""


def kernel(facts: Facts) -> list[Value]:
    """torch's fused update, which is taken where there is one, and batched kernels."""
    return [
        Value(("optimizer.fused=null", "optimizer.foreach=null")),
        Value(("optimizer.fused=false", "optimizer.foreach=true")),
    ]


def kernel_applies(facts: Facts) -> str:
    optimizer = facts.config.optimizer or {}
    return "" if "fused" in optimizer else "the optimizer has no kernels to choose from"


def collector(facts: Facts) -> list[Value]:
    return [Value(("trainer.python_gc=between_steps",))]


def numbers(facts: Facts) -> list[Value]:
    """Precision, layout and attention together: each of them may pay only with another. The promising ones first."""
    mode = facts.config.precision.mode
    modes = [mode]
    if mode in ("32-true", "bf16-mixed", "16-mixed"):
        usual = ["bf16-mixed", *([] if facts.on_cpu else ["16-mixed"]), "32-true"]
        modes = usual if mode in usual else [*usual, mode]
    layouts = [False, True] if facts.has("Conv2d") else [facts.config.trainer.channels_last]
    found = [_numbers(facts, *choice) for choice in product(modes, layouts, _kernels(facts, modes))]
    if mode == "32-true" and facts.config.precision.matmul == "highest":
        found += [Value(("precision.matmul=medium",), NUMERIC)]
        found += (
            [Value(("precision.matmul=medium", "trainer.channels_last=true"), NUMERIC)] if layouts[1:] else []
        )
    return found


def _kernels(facts: Facts, modes: Sequence[str]) -> tuple[str, ...]:
    """`fp32` differs from `flash` in 16 bits only; `math` is torch's reference, and slow."""
    model = facts.config.model or {}
    if model.get("_target_") != GPT:
        return ("",)
    return ("auto", "flash", "plain", "fp32") if len(modes) > 1 else ("auto", "flash", "plain")


def _numbers(facts: Facts, mode: str, channels_last: bool, attention: str) -> Value:
    config, words = facts.config, []
    if mode != config.precision.mode:
        words.append(f"precision={mode}")
    if channels_last != config.trainer.channels_last:
        words.append(f"trainer.channels_last={str(channels_last).lower()}")
    if attention and attention != config.model.get("attention"):
        words.append(f"model.attention={attention}")
    same = mode == config.precision.mode
    return Value(tuple(words), EXACT if same else NUMERIC)


def micro_batch(facts: Facts) -> list[Value]:
    """The same global batch in more or fewer parts."""
    batch, times = facts.config.data.batch_size, _accumulation(facts)
    splits = [2**power for power in range(1, MOST_SPLITS.bit_length())]
    found = [(batch // n, times * n) for n in splits if batch % n == 0]
    found += [(batch * n, times // n) for n in (2, 4, 8, 16, 32) if times % n == 0]
    return [Value(_batch_words(facts, *pair)) for pair in found]


def _accumulation(facts: Facts) -> int:
    """Micro-batches of a step."""
    data = facts.config.data
    if data.global_batch_size is None:
        return facts.config.trainer.accumulate_grad_batches
    return max(1, data.global_batch_size // (data.batch_size * facts.ready.world_size))


def _batch_words(facts: Facts, batch: int, times: int) -> Words:
    own = (f"data.batch_size={batch}",)
    if facts.config.data.global_batch_size is not None:  # sets the accumulation itself
        return own
    return (*own, f"trainer.accumulate_grad_batches={times}")


def parts_of_a_batch(facts: Facts) -> str:
    """Why a step's samples must not be divided otherwise."""
    if facts.has("BatchNorm"):
        return "batch norm looks at a whole micro-batch: another one is another training"
    if facts.config.data.drop_last:
        return "data.drop_last=true: other batches leave out other samples"
    if facts.config.data.padding not in ("longest", "max"):
        return f"data.padding={facts.config.data.padding} makes the batches itself"
    return ""


def ranks(facts: Facts) -> list[Value]:
    config, world = facts.config, facts.ready.world_size
    batch = config.data.batch_size * world
    found = []
    for number in numbers_up_to(facts.cores):
        if number == world or batch % number:
            continue
        mode = ("parallel=ddp", f"parallel.devices={number}") if number > 1 else ("parallel=single",)
        cpu = ("parallel.accelerator=cpu",) if number > 1 and config.parallel.accelerator != "cpu" else ()
        share = f"trainer.num_threads={max(1, facts.cores // number)}"
        found.append(Value((*mode, *cpu, f"data.batch_size={batch // number}", share)))
    return found


def ranks_apply(facts: Facts) -> str:
    if not facts.on_cpu or facts.cores < 2:
        return "ranks of one device are for CPUs with two cores or more"
    return parts_of_a_batch(facts)


def memory(facts: Facts) -> list[Value]:
    """Recomputation for larger parts where memory is full; none of it where there is plenty."""
    if facts.peak_bytes < ROOMY_MEMORY * facts.memory_bytes:
        return [Value(("trainer.gradient_checkpointing=none", "trainer.activation_offload=false"))]
    larger = [value.words for value in micro_batch(facts) if _batch_of(value) > facts.config.data.batch_size]
    return [Value(("trainer.gradient_checkpointing=auto", *words)) for words in larger]


def _batch_of(value: Value) -> int:
    return int(value.words[0].partition("=")[2])


def memory_applies(facts: Facts) -> str:
    trainer, share = facts.config.trainer, facts.peak_bytes / max(facts.memory_bytes, 1)
    saves = str(trainer.gradient_checkpointing) != "none" or trainer.activation_offload
    if saves and share < ROOMY_MEMORY:
        return ""
    if share < FULL_MEMORY:
        return f"memory does not limit: {100 * share:.0f} % of it is used"
    return "" if _accumulation(facts) > 1 else "no accumulation that larger micro-batches could replace"


def compiled(facts: Facts) -> list[Value]:
    return [Value((f"trainer.compile.scope={scope}",)) for scope in ("step", "regional", "model", "off")]


def compile_applies(facts: Facts) -> str:
    if facts.config.trainer.compile.scope != "off":  # whether it should be off can always be asked
        return ""
    saved = facts.run_seconds * (1 - 1 / MOST_COMPILED_GAIN)
    if saved < COMPILE_SECONDS:
        return (
            f"break-even: at {MOST_COMPILED_GAIN:.0f}x this run of {facts.run_seconds:.0f} s would "
            f"save {saved:.0f} s, and compiling takes {COMPILE_SECONDS:g} s or more"
        )
    return ""


def always(facts: Facts) -> str:
    return ""


def different(
    values: Sequence[Value], known: Sequence[RunConfig], with_words: Callable[[Words], Sequence[str]]
) -> list[Value]:
    """Those that give a new config, each once; one that cannot be is kept, to be refused with its reason."""
    seen, found = list(known), []
    for value in values:
        try:
            changed = config_of(with_words(value.words))
        except ConfigError:
            found.append(value)
            continue
        if changed not in seen:
            seen.append(changed)
            found.append(value)
    return found


COMPILE: Final = "compile"
THREADS: Final = "threads"
NUMBERS: Final = "numbers"  # precision, layout and attention
# What usually gives most first: a short search ends before the last. How many threads pay, and whether reading is
# hidden, depends on the number types, so these come before: two threads made an LSTM faster in 32 bits, slower in 16.
KNOBS: Final = (
    Knob(NUMBERS, numbers, always, 3.0),
    Knob(THREADS, threads, threads_apply, 1.0),
    Knob("loader", loader, loader_applies, 2.0),
    Knob("micro-batch", micro_batch, parts_of_a_batch, 1.5),
    Knob("ranks", ranks, ranks_apply, 1.5),
    Knob("optimizer", kernel, kernel_applies, 1.0),
    Knob("collector", collector, always, 0.5),
    Knob("memory", memory, memory_applies, 1.0),
    Knob(COMPILE, compiled, compile_applies, 3.0),
)


@dataclass(frozen=True)
class Wish:
    """What a search is asked for.

    mathematics: what may differ. budget: seconds in all. cores: that the run may use.
    """

    mathematics: str
    budget: float
    cores: int
    knobs: Sequence[Knob] = KNOBS


def share_of(knob: Knob, rest: Sequence[Knob], facts: Facts) -> float:
    """Return the share of the remaining time for `knob`, among all in `rest` that may still matter."""
    return knob.share / sum(other.share for other in rest if other is knob or not other.applies(facts))
