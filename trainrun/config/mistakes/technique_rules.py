"""What does not go with compiling, with what saves memory, and with several optimizers by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainrun.config.schema import DISTILLATION, RunConfig
from trainrun.instantiate import TARGET, is_node, named_nodes, target_of

Rules = tuple[tuple[Any, str], ...]  # whether a line applies, and the line
VAES = ("trainrun.model.vae.Vae", "trainrun.model.sequence_vae.SequenceVae")
GPT, LSTM = "trainrun.model.gpt.Gpt", "trainrun.model.lstm.Lstm"
VAE_TASK, VAE_HEALTH = "trainrun.task.vae.Vae", "trainrun.hook.vae_health.VaeHealth"
CLASSIFICATION = "trainrun.task.classification.Classification"


def networks(config: RunConfig) -> Rules:
    """Networks that only their own task can train, and a hook that looks at one of them."""
    model, task = config.model or {}, config.task or {}
    name, kind = target_of(model), target_of(task)
    class_dim, of_tokens = task.get("class_dim", 1), "gpt" if name == GPT else "lstm"
    classes_last = name == GPT or (name == LSTM and model.get("outputs", "each") == "each")
    return (
        (name in VAES and kind.startswith("trainrun.task.") and kind != VAE_TASK,
         f"model={name.split('.')[-2:][0]}: gives a reconstruction, not classes; its task is task=vae"),
        *((kind.startswith("trainrun.task.") and kind != VAE_TASK and target_of(node) == VAE_HEALTH,
           f"hook.{key}: monitor=vae watches the code of a VAE, and task={kind.split('.')[-2]} has none; use model=vae "
           "task=vae, or leave it out")
          for key, node in config.hook.items()),
        (classes_last and kind == CLASSIFICATION and class_dim in (0, 1),
         f"model={of_tokens}: reads tokens and gives classes for each of them, in the last dimension, where "
         f"task.class_dim={class_dim} does not look; for text: data=text task=language_modeling; for a class of every "
         "token: task.class_dim=-1"),
    )  # fmt: skip


def technique_faults(config: RunConfig) -> Iterator[str]:
    for rules in (_compilation, _memory):
        yield from (line for applies, line in rules(config) if applies)
    if config.parallel.accelerator != "auto":
        yield from needs_gpu(config, config.parallel.accelerator)


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


def by_name(config: RunConfig) -> Iterator[str]:
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
