"""What can be done about each thing that a run waits for: `diagnose` proposes it, and `autotune` tries it.

One list for both. `autotune` finds the fastest way to the same training, so it tries a remedy only if steps and samples
stay what they are; for every other one this list says what else would change.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Remedy(NamedTuple):
    """Settings to try. changes: what else they change; "" if the training stays the same."""

    overrides: tuple[str, ...]
    changes: str = ""

    def __str__(self) -> str:
        return " ".join(self.overrides)


CACHE: Final = Remedy(("data.cache=memory",))
WORKERS_BY_RULE: Final = Remedy(("data.engine=workers", "data.num_workers=auto"))
# Loading that waits, for a disk or a network, is shared by more readers than there are cores.
FOUR_THREADS: Final = Remedy(
    ("data.engine=threads", "data.num_threads=4")
)  # for data that says thread_safe = True
FOUR_WORKERS: Final = Remedy(("data.engine=workers", "data.num_workers=4"))
GRAPHS: Final = Remedy(("trainer.cuda_graphs=true",))
FUSED: Final = Remedy(("optimizer.fused=null", "optimizer.foreach=null"))  # as the runner chooses

OTHER_ORDER: Final = "the order of the samples"
REMEDIES: Final[dict[str, tuple[Remedy, ...]]] = {
    "data": (CACHE, WORKERS_BY_RULE),
    "compile": (
        Remedy(("data.padding=bucket", "data.pad_multiple=64"), OTHER_ORDER),
        Remedy(("trainer.compile.dynamic=true",)),
        Remedy(("trainer.compile.scope=off",)),
    ),
    "logging": (
        Remedy(("monitor.log_every_n_steps=500",)),
        Remedy(("monitor=fast",), "what is written down"),
    ),
    "checkpoint": (
        Remedy(("checkpoint.async_save=true",), "how checkpoints are written"),
        Remedy(("checkpoint.train_time_interval=10min",), "how often checkpoints are written"),
    ),
    "validation": (
        Remedy(("trainer.check_val_every_n_epoch=5",), "how often the run validates"),
        Remedy(("trainer.limit_val_batches=0.2",), "what the run validates on"),
    ),
    "padding": (Remedy(("data.padding=bucket",), OTHER_ORDER),),
    "ranks": (
        Remedy(("trainer.accumulate_grad_batches=4",), "the batch of a step"),
        Remedy(("parallel.static_graph=true",)),
    ),
    "update": (FUSED,),
    "dispatch": (
        Remedy(("trainer.compile=step",)),
        Remedy(("data.batch_size=256",), "the batch of a step"),
    ),
}


def tried_by_autotune(cause: str) -> list[tuple[str, ...]]:
    """Return the settings against one cause that leave the training the same."""
    return [remedy.overrides for remedy in REMEDIES[cause] if not remedy.changes]
