"""Settings that do not go together: one line each, with both keys as typed, and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainrun.config.schema import SAME, RunConfig
from trainrun.instantiate import TARGET, is_node, named_nodes
from trainrun.limits import is_finite

VAE, VAE_TASK = "trainrun.model.vae.Vae", "trainrun.task.vae.Vae"
GPT, LSTM = "trainrun.model.gpt.Gpt", "trainrun.model.lstm.Lstm"
CLASSIFICATION = "trainrun.task.classification.Classification"


def pair_faults(config: RunConfig) -> Iterator[str]:
    """Every pair of settings that is refused, whatever the device is."""
    yield from _general(config)
    yield from _schedule(config)
    yield from _networks(config)
    yield from _compilation(config)
    yield from _recomputing(config)
    yield from _offload(config)
    yield from _in_backward(config)
    yield from _steps(config)


def _general(config: RunConfig) -> Iterator[str]:
    trainer, data, checkpoint = config.trainer, config.data, config.checkpoint
    if trainer.max_epochs is None and trainer.max_steps is None and trainer.max_time is None:
        yield "trainer.max_epochs=null: give a limit: trainer.max_epochs, max_steps or max_time"
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
    for name in ("val_transform", "test_transform"):
        if getattr(data, name) == SAME and data.transform is None:
            yield f"data.{name}=same: there is no data.transform; name that, or data.{name}._target_=my_file.MyClass"
    if config.parallel.mode == "single" and config.parallel.devices not in ("auto", 1):
        yield f"parallel.devices={config.parallel.devices}: parallel=single is one device; use parallel=ddp"
    if trainer.deterministic and trainer.benchmark:
        yield "trainer.benchmark=true: picks kernels by timing, which trainer.deterministic=true rules out"
    if config.monitor.sync_debug and config.parallel.accelerator in ("cpu", "mps"):
        yield (
            f"monitor.sync_debug=true: does not go with parallel.accelerator={config.parallel.accelerator}: looks for "
            "what makes the host wait for a CUDA device; use monitor.sync_debug=false"
        )
    if config.init_from is not None and config.ckpt_path is not None:
        yield f"init_from={config.init_from}: ckpt_path takes over a whole state; leave one of them out"
    if trainer.nan_policy == "rollback" and not (checkpoint.enabled and checkpoint.save_last):
        yield (
            f"checkpoint.{'save_last' if checkpoint.enabled else 'enabled'}=false: trainer.nan_policy=rollback goes "
            "back to a checkpoint; leave it out, or use trainer.nan_policy=skip"
        )
    if config.precision.fp8 and config.precision.mode not in ("bf16-mixed", "bf16-true"):
        yield (
            f"precision.fp8=true: rounds products of bfloat16 further, and precision.mode={config.precision.mode} is "
            "another type; use precision=bf16-mixed or bf16-true"
        )
    if config.precision.master_weights and config.precision.mode != "bf16-true":
        yield (
            f"precision.master_weights=true: keeps float32 copies of bfloat16 weights, and those of "
            f"precision={config.precision.mode} are none; use precision=bf16-true, or leave it out"
        )


def _schedule(config: RunConfig) -> Iterator[str]:
    optimizer, scheduler = config.optimizer or {}, config.scheduler or {}
    for name in ("foreach", "differentiable"):
        if optimizer.get("fused") is True and optimizer.get(name) is True:
            yield f"optimizer.{name}=true: does not go with optimizer.fused=true; leave one of them out"
    warmup, most = scheduler.get("warmup_steps"), config.trainer.max_steps
    if warmup is not None and is_finite(warmup) and most is not None and warmup > most:
        yield f"scheduler.warmup_steps={warmup}: longer than the run: trainer.max_steps={most}; choose fewer"
    own_loop = not _target(config.loop, "trainrun.").startswith("trainrun.")
    if scheduler.get("interval") == "epoch" and own_loop:
        yield "scheduler.interval=epoch: a loop of your own ends its epochs itself; use scheduler.interval=step"


def _networks(config: RunConfig) -> Iterator[str]:
    """A network that only its own task can train, or that puts its classes elsewhere."""
    model, task = config.model or {}, config.task or {}
    name, kind = _target(model), _target(task)
    if name == VAE and kind.startswith("trainrun.task.") and kind != VAE_TASK:
        yield "model=vae: gives a reconstruction, not classes; its task is task=vae"
    classes_last = name == GPT or (name == LSTM and model.get("outputs", "each") == "each")
    if classes_last and kind == CLASSIFICATION and task.get("class_dim", 1) in (0, 1):
        yield (
            f"model={'gpt' if name == GPT else 'lstm'}: reads tokens and gives classes for each of them, in the last "
            f"dimension, where task.class_dim={task.get('class_dim', 1)} does not look; for text: data=text "
            "task=language_modeling; for a class of every token: task.class_dim=-1"
        )


def _target(node: Any, usual: str = "") -> str:
    return str((node or {}).get("_target_") or usual)


def _compilation(config: RunConfig) -> Iterator[str]:
    scope, records = config.trainer.compile.scope, config.trainer.cuda_graphs
    key = "trainer.compile.scope=step" if scope == "step" else "trainer.cuda_graphs=true"
    if scope == "step" or records:
        for pair, reason in step_obstacles(config):
            yield f"{key}: does not go with {pair}: {reason}"
    if records and scope in ("model", "regional", "auto"):
        yield (
            f"trainer.cuda_graphs=true: does not go with trainer.compile.scope={scope}: it records the step; use "
            "trainer.compile.scope=step, or trainer.compile.mode=reduce-overhead in its place"
        )
    if records and config.parallel.accelerator in ("cpu", "mps"):
        yield (
            f"trainer.cuda_graphs=true: does not go with parallel.accelerator={config.parallel.accelerator}: only a "
            "CUDA device has them; use trainer.cuda_graphs=false"
        )


def step_obstacles(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What stands against a step of one graph: a setting, and the reason with the way out."""
    options = config.trainer.compile
    moved = "the update would be at another time or place; use one of the two"
    obstacles = (
        (config.parallel.mode != "single", f"parallel={config.parallel.mode}",
         "ranks exchange gradients in the step; use trainer.compile.scope=model, or parallel=single"),
        (config.precision.mode == "16-mixed", "precision=16-mixed", "a graph does not scale its loss; use "
         "precision=bf16-mixed, or trainer.compile.scope=model"),
        (config.step, "step", "a step of your own is not traced; use trainer.compile.scope=model"),
        (config.loop, "loop", "a loop of your own makes the steps itself; use trainer.compile.scope=model"),
        (config.hook, f"hook.{next(iter(config.hook), '')}", "it may change what a graph holds; use "
         "trainer.compile.scope=model"),
        (options.dynamic, "trainer.compile.dynamic=true", "each shape of batch is a graph of its own; leave it out"),
        (options.mode == "reduce-overhead", "trainer.compile.mode=reduce-overhead", "CUDA graphs of inductor hold no "
         "tensors that change in place; leave it out, or use trainer.compile.scope=model"),
        (config.trainer.optimizer_in_backward, "trainer.optimizer_in_backward=true", moved),
        (config.trainer.cpu_offload != "none", f"trainer.cpu_offload={config.trainer.cpu_offload}", moved),
        (config.precision.master_weights, "precision.master_weights=true", moved),
        (config.data.padding == "token_budget", "data.padding=token_budget", "its batches have other rows each time, "
         "and only full ones are compiled; use data.padding=bucket"),
    )  # fmt: skip
    for applies, pair, reason in obstacles:
        if applies:
            yield pair, reason


def _recomputing(config: RunConfig) -> Iterator[str]:
    trainer, mode = config.trainer, config.trainer.gradient_checkpointing
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


def needs_gpu(config: RunConfig, device_type: str) -> list[str]:
    """Faults that are known once the device is: what moves tensors from a GPU to the host."""
    trainer = config.trainer
    chosen = [
        ("trainer.activation_offload", str(trainer.activation_offload).lower(), "false"),
        ("trainer.cpu_offload", trainer.cpu_offload, "none"),
    ]
    return [
        f"{key}={value}: moves tensors from a GPU to the host's memory, and this run computes on the device "
        f"{device_type}; use {key}={off}; trainer.gradient_checkpointing=full saves memory on every device"
        for key, value, off in chosen
        if value != off and device_type != "cuda"
    ]


def _offload(config: RunConfig) -> Iterator[str]:
    trainer, recomputes = config.trainer, config.trainer.gradient_checkpointing not in ("none", "auto")
    if config.parallel.accelerator != "auto":
        yield from needs_gpu(config, config.parallel.accelerator)
    if trainer.activation_offload:
        key = "trainer.activation_offload=true"
        again = f"trainer.gradient_checkpointing={trainer.gradient_checkpointing}" if recomputes else ""
        for other in (again, "trainer.cpu_offload=parameters" if trainer.cpu_offload == "parameters" else ""):
            if other:
                yield (
                    f"{key}: {other} computes the activations of blocks again, so that there are none to move; use one "
                    "of the two"
                )
        if trainer.compile.scope != "off":
            yield _compiled(key, trainer.compile.scope)
        if trainer.cuda_graphs:
            yield (
                f"{key}: does not go with trainer.cuda_graphs=true, because no memory of the host can be had while a "
                "step is recorded; use one of the two"
            )
    key = f"trainer.cpu_offload={trainer.cpu_offload}"
    if trainer.cpu_offload != "none" and config.precision.mode == "16-mixed":
        yield f"{key}: the loss scaling of precision=16-mixed reads gradients on a GPU only; use precision=bf16-mixed"
    if trainer.cpu_offload != "parameters":
        return
    if trainer.compile.scope != "off":
        yield _compiled(key, trainer.compile.scope)
    if config.parallel.mode != "single":
        yield f"{key}: parallel={config.parallel.mode} wants all weights on one device; use parallel=single"
    if recomputes and trainer.gradient_checkpointing != "full":
        yield (
            f"{key}: computes all blocks again (trainer.gradient_checkpointing=full), so "
            f"trainer.gradient_checkpointing={trainer.gradient_checkpointing} does not go with it; leave it out"
        )


def _compiled(key: str, scope: str) -> str:
    return (
        f"{key}: does not go with trainer.compile.scope={scope}, which cannot look into what it moves; "
        "use trainer.compile.scope=off"
    )


def _in_backward(config: RunConfig) -> Iterator[str]:
    """An update before all gradients are there: whatever reads several of them is ruled out."""
    trainer, data, mode = config.trainer, config.data, config.precision.mode
    if not trainer.optimizer_in_backward:
        return
    several = "adds up the gradients of several micro-batches"
    together = "updates copies of all weights together; leave it out"
    batches = (None, data.batch_size)
    wrong = {
        f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} {several}; use 1":
            trainer.accumulate_grad_batches > 1,
        f"data.global_batch_size={data.global_batch_size} with data.batch_size={data.batch_size} {several}; "
        "leave it out": data.global_batch_size not in batches,
        f"trainer.gradient_clip_val={trainer.gradient_clip_val} clips before the update; leave it out":
            trainer.gradient_clip_val,
        f"trainer.nan_policy={trainer.nan_policy} looks at all gradients before the update; use "
        "trainer.nan_policy=ignore": trainer.nan_policy != "ignore",
        f"trainer.out_of_memory={trainer.out_of_memory} runs a window again, of which parts are updated already; use "
        "trainer.out_of_memory=stop": trainer.out_of_memory != "stop",
        f"parallel={config.parallel.mode} averages the gradients of the ranks before the update; use "
        "parallel=single": config.parallel.mode != "single",
        "precision=16-mixed scales the loss and checks all gradients before the update; use "
        "precision=bf16-mixed": mode == "16-mixed",
        f"precision.master_weights=true {together}": config.precision.master_weights,
        f"trainer.cpu_offload=optimizer {together}": trainer.cpu_offload == "optimizer",
    }  # fmt: skip
    for reason, applies in wrong.items():
        if applies:
            yield f"trainer.optimizer_in_backward=true updates each parameter in the backward: {reason}"


def _steps(config: RunConfig) -> Iterator[str]:
    """What a step of one's own, and several optimizers by name, do not go with."""
    named = named_nodes(config.optimizer)
    for key, node in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        inner = [name for name, value in node.items() if is_node(value)] if isinstance(node, dict) else []
        if inner and node.get(TARGET) and (key == "scheduler" or "params" in node[inner[0]]):
            yield f"{key}.{inner[0]}: {key}s by name stand beside {node[TARGET]}; add {key}=custom"
    for name in named_nodes(config.scheduler):
        if name not in named:
            yield f"scheduler.{name}: no optimizer has this name; there are {', '.join(named) or 'none by name'}"
    if not named:
        return
    first = f"optimizer.{next(iter(named))}"
    if not config.step and not config.loop:
        yield f"{first}: optimizers by name are called by a step of your own; name it: step._target_=my_file.my_step"
    for name, node in named.items():
        if not node.get("params"):
            yield f"optimizer.{name}.params: must say which parameters, as optimizer.{name}.params='{name}.*'"
    for word, wrong in {
        f"parallel={config.parallel.mode}": config.parallel.mode != "single",
        "trainer.optimizer_in_backward=true": config.trainer.optimizer_in_backward,
        "trainer.cpu_offload=optimizer": config.trainer.cpu_offload == "optimizer",
        "precision.master_weights=true": config.precision.master_weights,
    }.items():
        if wrong:
            yield f"{word}: does not go with optimizers by name ({first}); leave one of them out"
