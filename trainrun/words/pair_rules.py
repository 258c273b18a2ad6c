"""Settings that do not go together, whatever model and data there are."""

from __future__ import annotations

from collections.abc import Iterator

from trainrun.config import RunConfig


def pair_faults(config: RunConfig) -> Iterator[str]:
    """One line each, with both keys as typed, and the way out."""
    trainer, data = config.trainer, config.data
    if isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch != 1:
        yield (
            f"trainer.check_val_every_n_epoch={trainer.check_val_every_n_epoch}: does not go with "
            f"trainer.val_check_interval={trainer.val_check_interval} steps; leave one of them out"
        )
    if data.global_batch_size is not None and trainer.accumulate_grad_batches != 1:
        yield (
            f"data.global_batch_size={data.global_batch_size}: sets the accumulation itself; "
            "leave out trainer.accumulate_grad_batches"
        )
    if config.parallel.mode == "single" and config.parallel.devices not in ("auto", 1, "1"):
        yield (f"parallel.devices={config.parallel.devices}: parallel=single is one device; use parallel=ddp")
    if trainer.deterministic and trainer.benchmark:
        yield ("trainer.benchmark=true: picks kernels by timing, which trainer.deterministic=true rules out")
    if config.monitor.sync_debug and config.parallel.accelerator in ("cpu", "mps"):
        yield (
            f"monitor.sync_debug=true: does not go with parallel.accelerator={config.parallel.accelerator}: looks for "
            "what makes the host wait for a CUDA device; use monitor.sync_debug=false"
        )
    if config.init_from is not None and config.ckpt_path is not None:
        yield (f"init_from={config.init_from}: ckpt_path takes over a whole state; leave one of them out")
    if trainer.nan_policy == "rollback" and not (config.checkpoint.enabled and config.checkpoint.save_last):
        key = "save_last" if config.checkpoint.enabled else "enabled"
        yield (
            f"checkpoint.{key}=false: trainer.nan_policy=rollback goes back to a checkpoint; leave it out, or use "
            "trainer.nan_policy=skip"
        )
    if config.precision.fp8 and config.precision.mode not in ("bf16-mixed", "bf16-true"):
        yield (
            f"precision.fp8=true: rounds products of bfloat16 further, and precision.mode={config.precision.mode} is "
            "another type; use precision=bf16-mixed or bf16-true"
        )
