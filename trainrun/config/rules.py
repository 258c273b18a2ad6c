"""Settings that do not go together: one line each, with both keys as typed, and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from trainrun.config.schema import (
    DISTILLATION,
    SAME,
    RunConfig,
    config_leaves,
    plain_values,
    validation_nodes,
)
from trainrun.instantiate import TARGET, is_node, named_nodes, target_name
from trainrun.limits import EPOCH, Duration, is_finite, parse_interval

Rules = tuple[tuple[Any, str], ...]  # whether a line applies, and the line


def pair_faults(config: RunConfig) -> Iterator[str]:
    """List every pair of settings that is refused, whatever the device is."""
    for rules in (_general, _sampling, _networks, _compilation, _memory):
        yield from (line for applies, line in rules(config) if applies)
    yield from _held_out_parts(config)
    yield from _optimizers_by_name(config)
    if config.parallel.accelerator != "auto":
        yield from needs_gpu(config, config.parallel.accelerator)


def _general(config: RunConfig) -> Rules:
    trainer, data, checkpoint, precision = config.trainer, config.data, config.checkpoint, config.precision
    devices = config.parallel.devices
    saved, init = "save_last" if checkpoint.enabled else "enabled", config.init
    interval = Duration(1, EPOCH)
    with suppress(ValueError):  # told already
        interval = parse_interval(trainer.val_check_interval)
    scheduler, most = config.scheduler or {}, trainer.max_steps
    warmup = scheduler.get("warmup_steps")
    no_limit = trainer.max_epochs is trainer.max_steps is trainer.max_time is trainer.max_duration is None
    return (
        (data.padding == "pack" and target_name(config.task) == "trainrun.task.regression.Regression",
         "data.padding=pack: task=regression needs a row for each sample; use data.padding=bucket"),
        (no_limit, "trainer.max_epochs=null: give a limit: trainer.max_epochs, max_steps or max_time"),
        (interval.unit != EPOCH and trainer.check_val_every_n_epoch != 1,
         f"trainer.check_val_every_n_epoch={trainer.check_val_every_n_epoch}: does not go with "
         f"trainer.val_check_interval={trainer.val_check_interval}; leave one of them out"),
        (data.global_batch_size is not None and trainer.accumulate_grad_batches != 1,
         f"data.global_batch_size={data.global_batch_size}: sets the accumulation itself; "
         "use trainer.accumulate_grad_batches=1"),
        *((getattr(data, name) == SAME and data.transform is None,
           f"data.{name}=same: there is no data.transform; name that, or data.{name}._target_=my_file.MyClass")
          for name in ("val_transform", "test_transform")),
        (isinstance(devices, list) and len(set(devices)) < max(1, len(devices)),
         f"parallel.devices={devices}: must name one GPU or several, each once, as [0,1]"),
        (config.parallel.mode == "single" and _several(devices),
         f"parallel.devices={devices}: parallel=single is one device; use parallel=ddp"),
        (config.step and config.parallel.static_graph,
         "parallel.static_graph=true: learns from the default step when gradients come; a step of your own makes its "
         "own; leave it out"),
        (trainer.deterministic and trainer.benchmark,
         "trainer.benchmark=true: picks kernels by timing, which trainer.deterministic=true rules out"),
        (trainer.detect_anomaly and precision.mode == "16-mixed",
         "trainer.detect_anomaly=true: float16 overflows on purpose while its loss scale is found; use "
         "precision=bf16-mixed or 32-true to look for a NaN"),
        (trainer.detect_anomaly and (trainer.compile.scope != "off" or trainer.cuda_graphs),
         "trainer.detect_anomaly=true: sees single operations, which a compiled model or a CUDA graph has no more; "
         "use trainer.compile.scope=off and trainer.cuda_graphs=false"),
        (config.monitor.sync_debug and config.parallel.accelerator in ("cpu", "mps"),
         f"monitor.sync_debug=true: does not go with parallel.accelerator={config.parallel.accelerator}: looks for "
         "what makes the host wait for a CUDA device; use monitor.sync_debug=false"),
        (config.init_from is not None and config.ckpt_path is not None and not checkpoint.adapter_only,
         f"init_from={config.init_from}: ckpt_path takes over a whole state; leave one of them out"),
        (config.init_from is None and checkpoint.adapter_only,
         "checkpoint.adapter_only=true: frozen weights stay in init_from, which is not set; use init_from=RUN_OR_FILE"),
        *((config.init_from is None and bool(value),
           f"init.{name}: says what is taken of init_from, which is not set; give init_from=RUN_OR_FILE")
          for name, value in (("skip", init.skip), ("rename", init.rename), ("strict=false", not init.strict))),
        (trainer.nan_policy == "rollback" and not (checkpoint.enabled and checkpoint.save_last),
         f"checkpoint.{saved}=false: trainer.nan_policy=rollback goes back to a checkpoint; leave it out, or use "
         "trainer.nan_policy=skip"),
        (precision.fp8 and precision.mode not in ("bf16-mixed", "bf16-true"),
         f"precision.fp8=true: rounds products of bfloat16 further, and precision.mode={precision.mode} is another "
         "type; use precision=bf16-mixed or bf16-true"),
        (warmup is not None and is_finite(warmup) and most is not None and warmup > most,
         f"scheduler.warmup_steps={warmup}: longer than the run: trainer.max_steps={most}; choose fewer"),
        (scheduler.get("interval") == "epoch" and not target_name(config.loop, "trainrun.").startswith("trainrun."),
         "scheduler.interval=epoch: a loop of your own ends its epochs itself; use scheduler.interval=step"),
    )  # fmt: skip


def _several(devices: Any) -> bool:
    return len(devices) > 1 if isinstance(devices, list) else devices not in ("auto", 1)


READERS, ARRAYS = "trainrun.data.", "trainrun.data.readers.arrays."


def _sampling(config: RunConfig) -> Rules:
    data, names = config.data, named_nodes(config.data.train)
    mix = f"data.mix={data.mix}".replace("'", "") if data.mix else ""
    asked = mix or (f"data.sampling={data.sampling}" if data.sampling != "none" else "")
    folds, words = f"data.folds={data.folds}", {"padding": data.padding, "truncate": data.truncate}
    return (
        (mix and data.sampling != "none",
         f"data.sampling={data.sampling}: {mix} says how often samples come already; leave one of them out"),
        (isinstance(data.mix, dict) and data.mix and set(data.mix) != set(names),
         f"{mix}: must name the sets of data.train, which are "
         f"{', '.join(names) or 'not named; name them, as data.train.a._target_=my_file.MyClass'}"),
        (data.sampling == "weighted" and data.weights is None,
         "data.sampling=weighted: needs data.weights: a column, a file or a list of one weight a sample"),
        (data.weights is not None and data.sampling != "weighted",
         "data.weights: has no effect without data.sampling=weighted"),
        (data.shuffle_buffer and not data.shuffle,
         f"data.shuffle=false: data.shuffle_buffer={data.shuffle_buffer} shuffles; leave one of them out"),
        (asked and not data.shuffle, f"data.shuffle=false: {asked} has no order of its own; leave one of them out"),
        (data.sampling == "balanced" and (config.task or {}).get("class_weights") == "balanced",
         "data.sampling=balanced: task.class_weights=balanced makes up for the same once more; leave one of them out"),
        *((asked and words[name] == value,
           f"data.{name}={value}: puts samples together once and for all, which {asked} chooses in every epoch; "
           f"use data.{name}={other}")
          for name, value, other in (("padding", "pack", "bucket"), ("padding", "token_budget", "bucket"),
                                     ("truncate", "split", "right"), ("truncate", "drop", "right"))),
        (data.folds is None and data.fold is not None, f"data.fold={data.fold}: of how many? Say data.folds=5"),
        (data.folds is None and data.stratified, "data.stratified=true: has no effect without data.folds"),
        (data.folds is None and data.fold_groups is not None,
         f"data.fold_groups={data.fold_groups}: has no effect without data.folds"),
        (data.fold_groups is not None and data.stratified,
         "data.stratified=true: the samples of a group stay in one fold; leave it or data.fold_groups out"),
        (data.folds is not None and data.fold is None,
         f"{folds}: which of them validates? data.fold=0, or all as a sweep: trainrun --multirun {folds} "
         f"'data.fold=range({data.folds})'"),
        (data.folds is not None and data.fold is not None and data.fold >= data.folds,
         f"data.fold={data.fold}: {folds} are numbered 0 to {(data.folds or 0) - 1}"),
        (data.folds is not None and mix, f"{folds}: {mix} counts whole sets; leave one of them out"),
    )  # fmt: skip


def _held_out_parts(config: RunConfig) -> Iterator[str]:
    """A validation set that a reader of ours cuts from the training data, but by other settings than that."""
    train = config.data.train or {}
    for split, node in validation_nodes(config.data).items():
        target, key = str(node.get(TARGET)), f"data.{split.replace('/', '.')}"
        if target != train.get(TARGET) or not target.startswith(READERS):
            continue
        if node.get("val_path") is not None or node.get("val_fraction") == 0:  # nothing is cut
            continue
        alike = node.get("path") == train.get("path")
        for name in {"val_fraction", "seed"} & node.keys() & train.keys() if alike else ():
            if str(node[name]) != str(train[name]):
                yield (
                    f"{key}.{name}={node[name]}: both parts are cut from the same data, or samples would be in both; "
                    f"set data.train.{name}"
                )
        cut = "val_fraction" in node and str(node["val_fraction"]) == str(train.get("val_fraction"))
        if not alike and cut and not target.startswith(ARRAYS):
            yield (
                f"{key}.path={node['path']}: {key} is a part held out of its path; for validation data of its own set "
                f"data.train.val_path={node['path']}"
            )


def unread_path(config: RunConfig) -> list[str]:
    """A fault where no node has the path: the run would train on other data than its words name."""
    path, found = config.data.path, plain_values(config)
    del found["data"]["path"]
    if path is None or any(value == path for _, value in config_leaves(found)):
        return []
    return [
        f"data.path={path}: nothing reads it with data={config.data.name}; say what it is, as data=csv, data=text or "
        "data=image_folder (trainrun --help data), or leave it out"
    ]


VAES = ("trainrun.model.vae.Vae", "trainrun.model.sequence_vae.SequenceVae")
GPT, LSTM = "trainrun.model.gpt.Gpt", "trainrun.model.lstm.Lstm"
VAE_TASK, VAE_HEALTH = "trainrun.task.vae.Vae", "trainrun.hook.vae_health.VaeHealth"
CLASSIFICATION = "trainrun.task.classification.Classification"


def _networks(config: RunConfig) -> Rules:
    """Networks that only their own task can train, and a hook that looks at one of them."""
    model, task = config.model or {}, config.task or {}
    name, kind = target_name(model), target_name(task)
    class_dim, of_tokens = task.get("class_dim", 1), "gpt" if name == GPT else "lstm"
    classes_last = name == GPT or (name == LSTM and model.get("outputs", "each") == "each")
    return (
        (name in VAES and kind.startswith("trainrun.task.") and kind != VAE_TASK,
         f"model={name.split('.')[-2:][0]}: gives a reconstruction, not classes; its task is task=vae"),
        *((kind.startswith("trainrun.task.") and kind != VAE_TASK and target_name(node) == VAE_HEALTH,
           f"hook.{key}: monitor=vae watches the code of a VAE, and task={kind.split('.')[-2]} has none; use model=vae "
           "task=vae, or leave it out")
          for key, node in config.hook.items()),
        (classes_last and kind == CLASSIFICATION and class_dim in (0, 1),
         f"model={of_tokens}: reads tokens and gives classes for each of them, in the last dimension, where "
         f"task.class_dim={class_dim} does not look; for text: data=text task=language_modeling; for a class of every "
         "token: task.class_dim=-1"),
    )  # fmt: skip


def _compilation(config: RunConfig) -> Rules:
    scope, records = config.trainer.compile.scope, config.trainer.cuda_graphs
    key = "trainer.compile.scope=step" if scope == "step" else "trainer.cuda_graphs=true"
    accelerator = config.parallel.accelerator
    return (
        *((scope == "step" or records, f"{key}: does not go with {pair}: {reason}")
          for pair, reason in step_obstacles(config)),
        (records and scope in ("model", "regional", "auto"),
         f"trainer.cuda_graphs=true: does not go with trainer.compile.scope={scope}: it records the step; use "
         "trainer.compile.scope=step, or trainer.compile.mode=reduce-overhead in its place"),
        (records and accelerator in ("cpu", "mps"),
         f"trainer.cuda_graphs=true: does not go with parallel.accelerator={accelerator}: only a CUDA device has them; "
         "use trainer.cuda_graphs=false"),
    )  # fmt: skip


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
        ((config.model or {}).get("unfreeze_at"), "model.unfreeze_at", "a graph trains the same parameters in every "
         "step; use trainer.compile.scope=model"),
        ((config.task or {}).get(TARGET) == DISTILLATION, "task=distillation",
         "a teacher is asked outside of a graph; use trainer.compile.scope=model"),
        (options.dynamic, "trainer.compile.dynamic=true", "each shape of batch is a graph of its own; leave it out"),
        (options.mode == "reduce-overhead", "trainer.compile.mode=reduce-overhead", "CUDA graphs of inductor hold no "
         "tensors that change in place; leave it out, or use trainer.compile.scope=model"),
        (config.trainer.cpu_offload != "none", f"trainer.cpu_offload={config.trainer.cpu_offload}", moved),
        (config.data.padding == "token_budget", "data.padding=token_budget", "its batches have other rows each time, "
         "and only full ones are compiled; use data.padding=bucket"),
    )  # fmt: skip
    yield from ((pair, reason) for applies, pair, reason in obstacles if applies)


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


def _memory(config: RunConfig) -> Rules:
    """Activations computed again, activations on the host, and weights on the host."""
    trainer, scope, mode = config.trainer, config.trainer.compile.scope, config.trainer.gradient_checkpointing
    again, recomputes = f"trainer.gradient_checkpointing={mode}", mode not in ("none", "auto")
    compiled, recorded = (
        f"does not go with trainer.compile.scope={scope}",
        "does not go with trainer.cuda_graphs=true",
    )
    moved, moves = "trainer.activation_offload=true", trainer.activation_offload
    offload, offloads = f"trainer.cpu_offload={trainer.cpu_offload}", trainer.cpu_offload == "parameters"
    no_activations = (
        "computes the activations of blocks again, so that there are none to move; use one of the two"
    )
    opaque = f"{compiled}, which cannot look into what it moves; use trainer.compile.scope=off"
    return (
        (recomputes and scope != "off",
         f"{again}: {compiled}, because compiled code decides itself what it computes again; use one of the two"),
        (recomputes and trainer.cuda_graphs,
         f"{again}: {recorded}, because random numbers cannot be drawn again while a step is recorded; use one of the "
         "two"),
        (recomputes and config.parallel.sync_batchnorm,
         f"{again}: does not go with parallel.sync_batchnorm=true, which would exchange the statistics of the ranks a "
         "second time in the backward; use one of the two"),
        (moves and recomputes, f"{moved}: {again} {no_activations}"),
        (moves and offloads, f"{moved}: {offload} {no_activations}"),
        (moves and scope != "off", f"{moved}: {opaque}"),
        (moves and trainer.cuda_graphs,
         f"{moved}: {recorded}, because no memory of the host can be had while a step is recorded; use one of the two"),
        (trainer.cpu_offload != "none" and config.precision.mode == "16-mixed",
         f"{offload}: the loss scaling of precision=16-mixed reads gradients on a GPU only; use precision=bf16-mixed"),
        (offloads and scope != "off", f"{offload}: {opaque}"),
        (offloads and config.parallel.mode != "single",
         f"{offload}: parallel={config.parallel.mode} wants all weights on one device; use parallel=single"),
        (offloads and recomputes and mode != "full",
         f"{offload}: computes all blocks again (trainer.gradient_checkpointing=full), so {again} does not go with it; "
         "leave it out"),
    )  # fmt: skip


def _optimizers_by_name(config: RunConfig) -> Iterator[str]:
    """What a step of one's own, and several optimizers by name, do not go with."""
    named = named_nodes(config.optimizer)
    optimizers = [name for name, value in (config.optimizer or {}).items() if is_node(value)]
    for key, node in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        inner = [name for name in node if name in optimizers] if isinstance(node, dict) else []
        if inner and node.get(TARGET) and (key == "scheduler" or "params" in node[inner[0]]):
            yield f"{key}.{inner[0]}: {key}s by name stand beside {node[TARGET]}; add {key}=custom"
    for name in named_nodes(config.scheduler):
        if name not in named:
            yield f"scheduler.{name}: no optimizer has this name; there are {', '.join(named) or 'none by name'}"
    if not named:
        return
    first = f"optimizer.{next(iter(named))}"
    for name, node in named.items():
        if not node.get("params"):
            yield f"optimizer.{name}.params: must say which parameters, as optimizer.{name}.params='{name}.*'"
    for applies, word in (
        (config.trainer.compile.scope == "step", "trainer.compile.scope=step"),
        (config.trainer.cuda_graphs, "trainer.cuda_graphs=true"),
        (config.parallel.mode != "single", f"parallel={config.parallel.mode}"),
    ):
        if applies:
            yield f"{word}: does not go with optimizers by name ({first}); leave one of them out"
