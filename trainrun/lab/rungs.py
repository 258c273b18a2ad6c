"""The folklore of fast training, as words of a run: what everybody says helps, to be measured on the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainrun.lab.choices import loader_words
from trainrun.lab.facts import Facts
from trainrun.lab.gate import EXACT, NUMERIC
from trainrun.lab.knobs import Words, parts_of_a_batch

OTHER: Final = "other"  # another training: other batches, other samples
CADENCE: Final = "cadence"  # of what happens besides the steps: computed from its measured seconds
NEEDS_GPU: Final = "needs a GPU"
RARE_LOG: Final = 500
FEWER: Final = 4  # times


@dataclass(frozen=True)
class Step:
    """on, off: words with it and without. mathematics: what it changes. applies: why it cannot be measured, or ""."""

    title: str
    on: Callable[[Facts], Words]
    off: Callable[[Facts], Words] = lambda facts: ()
    mathematics: str = EXACT
    applies: Callable[[Facts], str] = lambda facts: ""


def loads(engine: str, number: int) -> Callable[[Facts], Words]:
    return lambda facts: tuple(loader_words(facts.config, engine, number))


def fixed(*words: str) -> Callable[[Facts], Words]:
    return lambda facts: words


def gpu_only(facts: Facts) -> str:
    return NEEDS_GPU if facts.on_cpu else ""


def cpu_only(facts: Facts) -> str:
    return "" if facts.on_cpu else "not a CPU"


def convolutions(facts: Facts) -> str:
    return "" if facts.has("Conv2d") else "the model has no convolutions"


def kernels(facts: Facts) -> str:
    return "" if "fused" in (facts.config.optimizer or {}) else "the optimizer has one kernel only"


def halves(facts: Facts) -> str:
    even = facts.config.data.batch_size % 2 == 0
    return "a batch that is not even" if not even else parts_of_a_batch(facts)


def two_parts(facts: Facts) -> Words:
    data, trainer = facts.config.data, facts.config.trainer
    words = (f"data.batch_size={data.batch_size // 2}",)
    own = (f"trainer.accumulate_grad_batches={2 * trainer.accumulate_grad_batches}",)
    return words if data.global_batch_size is not None else (*words, *own)


def larger(facts: Facts) -> Words:
    data = facts.config.data
    words = (f"data.batch_size={FEWER * data.batch_size}",)
    whole = (
        ()
        if data.global_batch_size is None
        else (f"data.global_batch_size={FEWER * data.global_batch_size}",)
    )
    return (*words, *whole)


def sequences(facts: Facts) -> str:
    data = facts.config.data
    return "" if data.max_sequence_length else "data.max_sequence_length is not set"


def shorter(facts: Facts) -> Words:
    return (f"data.max_sequence_length={max(1, (facts.config.data.max_sequence_length or 2) // 2)}",)


def validates(facts: Facts) -> str:
    return "" if facts.config.data.val and facts.ready.val_every else "no validation after a number of steps"


def threads_apply(facts: Facts) -> str:
    return "" if facts.on_cpu and facts.cores > 1 else "one core, or not a CPU"


STEPS: Final = (
    Step("no workers (0)", loads("workers", 0)),
    Step("2 workers", loads("workers", 2)),
    Step("8 workers", loads("workers", 8)),
    Step("pinned memory", fixed("data.pin_memory=true"), fixed("data.pin_memory=false"), applies=gpu_only),
    Step("resident data", loads("resident", 0)),
    Step("prefetch thread", loads("threads", 1)),
    Step("mixed precision (bf16)", fixed("precision=bf16-mixed"), fixed("precision=32-true"), NUMERIC),
    Step("mixed precision (fp16)", fixed("precision=16-mixed"), fixed("precision=32-true"), NUMERIC, gpu_only),
    Step("TF32", fixed("precision.matmul=high"), fixed("precision.matmul=highest"), NUMERIC, gpu_only),
    Step("channels-last layout", fixed("trainer.channels_last=true"), fixed("trainer.channels_last=false"),
         applies=convolutions),
    Step("accumulation (2 halves)", two_parts, applies=halves),
    Step("fused optimizer", fixed("optimizer.fused=null", "optimizer.foreach=null"),
         fixed("optimizer.fused=false", "optimizer.foreach=false"), applies=kernels),
    Step("freed memory kept", fixed("trainer.freed_memory=auto"), fixed("trainer.freed_memory=libc"), applies=cpu_only),
    Step("one thread", fixed("trainer.num_threads=1"), applies=threads_apply),
    Step("a thread for each core", lambda facts: (f"trainer.num_threads={facts.cores}",), applies=threads_apply),
    Step("compiled (whole step)", fixed("trainer.compile.scope=step"), fixed("trainer.compile.scope=off")),
    Step("compiled (model)", fixed("trainer.compile.scope=model"), fixed("trainer.compile.scope=off")),
    Step("CUDA graphs", fixed("trainer.cuda_graphs=true"), fixed("trainer.cuda_graphs=false"), applies=gpu_only),
    Step("less monitoring", fixed(f"monitor.log_every_n_steps={RARE_LOG}", "monitor.hardware=false")),
    Step(f"validation {FEWER}x as rare", lambda facts: (), mathematics=CADENCE, applies=validates),
    Step(f"batch {FEWER}x as large", larger, mathematics=OTHER),
    Step("half the length", shorter, mathematics=OTHER, applies=sequences),
)  # fmt: skip
