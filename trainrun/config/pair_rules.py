"""Settings that do not go together: one line each, with both keys as typed, and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from trainrun.config.schema import SAME, RunConfig, validation_nodes
from trainrun.instantiate import is_node, target_of
from trainrun.limits import EPOCH, Duration, is_finite, parse_interval

NETWORKS = tuple(f"trainrun.model.{name}." for name in ("vae", "sequence_vae", "gpt", "lstm"))
PARTS = ("path", "val_fraction", "seed")  # which part of the data is held out
USUAL = ("off", "none", "none")  # compile.scope, gradient_checkpointing, cpu_offload
Rules = tuple[tuple[Any, str], ...]  # whether a line applies, and the line


def pair_faults(config: RunConfig) -> Iterator[str]:
    """Every pair of settings that is refused, whatever the device is."""
    yield from (line for applies, line in _general(config) if applies)
    trainer, data = config.trainer, config.data
    asked = (data.weights, data.mix, data.shuffle_buffer, data.folds, data.fold, data.fold_groups)
    if data.sampling != "none" or data.stratified or any(value is not None for value in asked):
        from trainrun.config.mistakes.sampling_rules import sampling

        yield from (line for applies, line in sampling(config) if applies)
    train, sets = data.train or {}, validation_nodes(data).values()
    if any(str(node.get(name)) != str(train.get(name)) for node in sets for name in PARTS if name in node):
        from trainrun.config.mistakes.sampling_rules import parts

        yield from parts(config)
    if config.hook or target_of(config.model).startswith(NETWORKS):
        from trainrun.config.mistakes.technique_rules import networks

        yield from (line for applies, line in networks(config) if applies)
    techniques = (trainer.cuda_graphs, trainer.activation_offload)
    chosen = (trainer.compile.scope, trainer.gradient_checkpointing, trainer.cpu_offload)
    if any(techniques) or chosen != USUAL:
        from trainrun.config.mistakes.technique_rules import technique_faults

        yield from technique_faults(config)
    nodes = (node for node in (config.optimizer, config.scheduler) if isinstance(node, dict))
    if any(is_node(value) for node in nodes for value in node.values()):
        from trainrun.config.mistakes.technique_rules import by_name

        yield from by_name(config)


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
        (data.padding == "pack" and target_of(config.task) == "trainrun.task.regression.Regression",
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
        (scheduler.get("interval") == "epoch" and not target_of(config.loop, "trainrun.").startswith("trainrun."),
         "scheduler.interval=epoch: a loop of your own ends its epochs itself; use scheduler.interval=step"),
    )  # fmt: skip


def _several(devices: Any) -> bool:
    return len(devices) > 1 if isinstance(devices, list) else devices not in ("auto", 1)
