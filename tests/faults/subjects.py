"""The runs that are faulted: one small training per engine, precision, backend and way of saving."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = [
    "data.train._target_=faults.own.Noisy", "data.val._target_=faults.own.Noisy", "data.val.seed=1",
    "data.val.count=13", "model._target_=faults.own.Net", "task._target_=faults.own.Watched",
    "data.batch_size=4", "data.num_workers=0", "trainer.max_epochs=3", "trainer.accumulate_grad_batches=3",
    "trainer.gradient_clip_val=1.0", "trainer.val_check_interval=0.5", "trainer.num_threads=1",
    "trainer.out_of_memory=stop",
    "trainer.ema.enabled=true", "trainer.ema.decay=0.9", "scheduler=cosine", "scheduler.warmup_steps=3",
    "checkpoint.every_n_train_steps=2", "checkpoint.keep_last=2", "checkpoint.save_top_k=2",
    "monitor.log_every_n_steps=1", "monitor.hardware=false", "monitor.plots=false", "monitor.progress_bar=false",
]  # fmt: skip
TENSORS = ["data.train._target_=faults.own.tensors_of", "data.val._target_=faults.own.tensors_of"]
DRAWN = ["data.train._target_=faults.own.Drawn", "data.val._target_=faults.own.Drawn"]
TEXT = [
    "data.train._target_=faults.own.Sequences", "data.val._target_=faults.own.Sequences",
    "model._target_=faults.own.Reader", "data.padding=bucket", "data.max_sequence_length=8",
]  # fmt: skip
# as many samples as all ranks take together without a rest, so that none is seen twice
RANKS = ["parallel=ddp", "data.batch_size=2", "parallel.timeout_seconds=20"]
TWO = [*RANKS, "data.train.count=64"]
AGAIN = [*TWO[:2], "parallel.timeout_seconds=5", "data.train.count=64", "parallel.max_restarts=12"]
THREE = [*RANKS, "parallel.devices=3", "data.train.count=60"]


@dataclass(frozen=True)
class Subject:
    """words: of the command line; ranks: how many processes train; samples: in an epoch."""

    name: str
    words: tuple[str, ...]
    ranks: int = 1
    samples: int = 61
    epochs: int = 3

    @property
    def starts_again(self) -> bool:
        """Whether ranks that died are started again by the run itself."""
        return any(word.startswith("parallel.max_restarts=") for word in self.words)


def _subject(name: str, *new: str, ranks: int = 1, samples: int = 61) -> Subject:
    keys = {word.partition("=")[0] for word in new}
    kept = [word for word in PLAIN if word.partition("=")[0] not in keys]
    return Subject(name, (*kept, *new), ranks, samples)


SUBJECTS = {
    one.name: one
    for one in [
        _subject("fp32"),
        _subject("sync", "checkpoint.async_save=false"),
        _subject("bf16", "precision=bf16-mixed", "scheduler=onecycle"),
        _subject("fp16", "precision=16-mixed", "scheduler=plateau", "trainer.ema.enabled=false"),
        _subject("fp16-workers", "precision=16-mixed", "data.num_workers=2", "trainer.ema.enabled=false",
                 "data.worker_timeout_seconds=3"),
        _subject("fp64", "precision=64-true", "optimizer=sgd", "optimizer.momentum=0.9", "scheduler=step"),
        _subject("workers", "data.num_workers=2", "data.worker_timeout_seconds=3"),
        _subject("bf16-workers", "data.num_workers=1", "precision=bf16-mixed", "scheduler=constant"),
        _subject("threads", *DRAWN, "data.engine=threads", "data.num_workers=2"),
        _subject("resident", *TENSORS, "data.engine=resident"),
        _subject("bucket", *TEXT),
        _subject("best", "checkpoint.every_n_train_steps=null", "checkpoint.save_top_k=3", "checkpoint.keep_last=1"),
        _subject("compiled", "trainer.compile.scope=model"),
        _subject("ddp", *TWO, ranks=2, samples=64),
        _subject("ddp-sync", *TWO, "checkpoint.async_save=false", ranks=2, samples=64),
        _subject("ddp-fp16", *TWO, "precision=16-mixed", ranks=2, samples=64),
        _subject("ddp-workers", *TWO, "data.num_workers=1", ranks=2, samples=64),
        _subject("ddp-again", *AGAIN, ranks=2, samples=64),
        _subject("ddp3", *THREE, ranks=3, samples=60),
        _subject("fsdp", "parallel=fsdp", *TWO[1:], ranks=2, samples=64),
    ]
}  # fmt: skip
