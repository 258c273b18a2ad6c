"""What the techniques that save memory do not go together with, in the words of the config."""

from __future__ import annotations

from collections.abc import Iterator

from trainrun.config import RunConfig

RECOMPUTE_MODES = ("none", "auto", "full", "selective")


def memory_faults(config: RunConfig) -> Iterator[str]:
    yield from _recompute_faults(config)
    yield from _offload_faults(config)
    yield from _in_backward_faults(config)
    if config.precision.master_weights and config.precision.mode != "bf16-true":
        yield (
            f"precision.master_weights=true: keeps float32 copies of bfloat16 weights, and those of "
            f"precision={config.precision.mode} are none; use precision=bf16-true, or leave it out"
        )


def needs_gpu(config: RunConfig, device_type: str) -> list[str]:
    """Faults that are known once the device is: what moves tensors from a GPU to the host."""
    trainer = config.trainer
    if device_type == "cuda":
        return []
    chosen = [
        ("trainer.activation_offload", str(trainer.activation_offload).lower(), "false"),
        ("trainer.cpu_offload", trainer.cpu_offload, "none"),
    ]
    return [
        f"{key}={value}: moves tensors from a GPU to the host's memory, and this run computes on the device "
        f"{device_type}; use {key}={off}; trainer.gradient_checkpointing=full saves memory on every device"
        for key, value, off in chosen
        if value != off
    ]


def _recompute_faults(config: RunConfig) -> Iterator[str]:
    trainer, mode = config.trainer, config.trainer.gradient_checkpointing
    is_share = isinstance(mode, float) and 0 < mode < 1
    if not is_share and mode not in RECOMPUTE_MODES:
        yield (
            f"trainer.gradient_checkpointing={mode}: must be one of {', '.join(RECOMPUTE_MODES)}, or the share of "
            "the blocks that keep their activations, above 0 and below 1"
        )
    if mode in ("none", "auto"):
        return
    key = f"trainer.gradient_checkpointing={mode}"
    if trainer.compile.scope != "off":
        yield (
            f"{key}: does not go with trainer.compile.scope={trainer.compile.scope}, because compiled code "
            "decides itself what it computes again; use one of the two"
        )
    if trainer.cuda_graphs:
        yield (
            f"{key}: does not go with trainer.cuda_graphs=true, because random numbers cannot be drawn again while a "
            "step is recorded; use one of the two"
        )
    if config.parallel.sync_batchnorm:
        yield (
            f"{key}: does not go with parallel.sync_batchnorm=true, which would exchange the statistics of the ranks "
            "a second time in the backward; use one of the two"
        )


def _offload_faults(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if config.parallel.accelerator != "auto":
        yield from needs_gpu(config, config.parallel.accelerator)
    chosen = {"trainer.gradient_checkpointing": trainer.gradient_checkpointing, "trainer.cpu_offload": "none"}
    if trainer.activation_offload:
        chosen["trainer.cpu_offload"] = trainer.cpu_offload if trainer.cpu_offload == "parameters" else "none"
        for key, value in chosen.items():
            if value not in ("none", "auto"):
                yield (
                    f"trainer.activation_offload=true: {key}={value} computes the activations of blocks again, so that "
                    "there are none to move; use one of the two"
                )
        if trainer.compile.scope != "off":
            yield _compiled("trainer.activation_offload=true", trainer.compile.scope)
        if trainer.cuda_graphs:
            yield (
                "trainer.activation_offload=true: does not go with trainer.cuda_graphs=true, because no memory of the "
                "host can be had while a step is recorded; use one of the two"
            )
    if trainer.cpu_offload == "none":
        return
    key = f"trainer.cpu_offload={trainer.cpu_offload}"
    if config.precision.mode == "16-mixed":
        yield f"{key}: the loss scaling of precision=16-mixed reads gradients on a GPU only; use precision=bf16-mixed"
    if trainer.cpu_offload == "optimizer":
        return
    if trainer.compile.scope != "off":
        yield _compiled(key, trainer.compile.scope)
    if config.parallel.mode != "single":
        yield f"{key}: parallel={config.parallel.mode} wants all weights on one device; use parallel=single"
    if trainer.gradient_checkpointing not in ("none", "auto", "full"):
        yield (
            f"{key}: computes all blocks again (trainer.gradient_checkpointing=full), so "
            f"trainer.gradient_checkpointing={trainer.gradient_checkpointing} does not go with it; leave it out"
        )


def _in_backward_faults(config: RunConfig) -> Iterator[str]:
    """An update before all gradients are there: whatever reads several of them is ruled out."""
    trainer, data = config.trainer, config.data
    if not trainer.optimizer_in_backward:
        return
    wrong = {
        f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} adds up the gradients of several "
        "micro-batches; use 1": trainer.accumulate_grad_batches > 1,
        f"data.global_batch_size={data.global_batch_size} with data.batch_size={data.batch_size} adds up the "
        "gradients of several micro-batches; leave it out": data.global_batch_size
        not in (None, data.batch_size),
        f"trainer.gradient_clip_val={trainer.gradient_clip_val} clips before the update; leave it out": bool(
            trainer.gradient_clip_val
        ),
        f"trainer.nan_policy={trainer.nan_policy} looks at all gradients before the update; use "
        "trainer.nan_policy=ignore": trainer.nan_policy != "ignore",
        f"trainer.out_of_memory={trainer.out_of_memory} runs a window again, of which parts are updated already; use "
        "trainer.out_of_memory=stop": trainer.out_of_memory != "stop",
        f"parallel={config.parallel.mode} averages the gradients of the ranks before the update; use "
        "parallel=single": config.parallel.mode != "single",
        "precision=16-mixed scales the loss and checks all gradients before the update; use "
        "precision=bf16-mixed": config.precision.mode == "16-mixed",
        "precision.master_weights=true updates copies of all weights together; leave it out":
        config.precision.master_weights,
        "trainer.cpu_offload=optimizer updates copies of all weights together; leave it out":
        trainer.cpu_offload == "optimizer",
    }  # fmt: skip
    for reason, applies in wrong.items():
        if applies:
            yield f"trainer.optimizer_in_backward=true updates each parameter in the backward: {reason}"


def _compiled(key: str, scope: str) -> str:
    return (
        f"{key}: does not go with trainer.compile.scope={scope}, which cannot look into what it moves; "
        "use trainer.compile.scope=off"
    )
