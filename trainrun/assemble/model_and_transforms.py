"""Build the model of one rank from its node, and apply the techniques that change it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainrun.checkpoint.weights import FrozenBase, describe_unsaveable, load_initial
from trainrun.config.rules import check_gpu_settings, iterate_step_obstacles
from trainrun.config.schema import RunConfig, replace_values
from trainrun.config.validate import check_value
from trainrun.errors import ConfigError, DataError, PluginError, raise_as_config_error
from trainrun.hook.unfreeze import (
    Unfreeze,
    build_unfreezing,
    check_unfreezing,
    describe_unfreezing,
    set_training_mode,
)
from trainrun.instantiate import TARGET, build_node, import_target, list_parameters
from trainrun.interfaces import DataFacts, Parallel
from trainrun.model.choices import WORDS
from trainrun.model.layers import initialize
from trainrun.output import format_count
from trainrun.precision.autocast import prepare_model
from trainrun.runtime.memory_layout import make_dense
from trainrun.transform.activation_offload import activation_offload
from trainrun.transform.channels_last import channels_last, guard_convolutions
from trainrun.transform.compile import (
    WITH_CUDA_GRAPHS,
    compile_model,
    copy_gradients,
    gpu_compiler_problem,
)
from trainrun.transform.freeze import FrozenParameters

LAZY_WAY_OUT = "call the model once at the end of its constructor"
EXAMPLES = {
    "in_shape": "data.shape=[1,28,28]",
    "num_classes": "data.num_classes=10 for ten classes, model.num_classes=1 for one real number a sample",
    "vocab_size": "data.num_classes=256",
}


def build_model(config: RunConfig, facts: DataFacts, device: torch.device) -> nn.Module:
    """Build the model on a device. Raise ConfigError if an argument is unknown.

    If `in_shape`, `num_classes` or `vocab_size` is null in the config, its value comes from the data.
    """
    node, words = split_model_settings(config.model)
    classes = facts.num_classes
    from_data = {"in_shape": facts.shape and list(facts.shape), "num_classes": classes, "vocab_size": classes}
    for name, value in from_data.items():
        if name in node and node[name] is None:
            if value is None:
                raise DataError(f"model.{name}: cannot be derived from the data; set it, as {EXAMPLES[name]}")
            node[name] = value

    model = check_is_module(build_node(node, "model"), f"model._target_={node[TARGET]}")
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        with raise_as_config_error(ValueError):
            initialize_lazy_layers(model, facts.shape)
    make_dense(model)
    if "init" in words:
        initialize(model, words["init"])
    return convert_to_precision(move_model_to_device(model, device), config)


def initialize_lazy_layers(model: nn.Module, shape: Sequence[int] | None) -> None:
    """Run one sample of zeros through the model, so that lazy layers create their weights, with the global seed.

    shape: of one input, without the batch dimension. Raise ValueError if it is unknown, or if the forward fails.
    """
    if shape is None:
        raise ValueError(
            f"model: {type(model).__name__} has lazy layers, and the data do not define the shape of an "
            f"input; {LAZY_WAY_OUT}"
        )
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *shape))
    except Exception as error:
        raise ValueError(
            f"model: {type(model).__name__} has lazy layers, and zeros {(1, *shape)} do not pass through it ({error}); "
            f"{LAZY_WAY_OUT}"
        ) from error
    model.train(training)


def build_transformed_model(
    config: RunConfig, facts: DataFacts, parallel: Parallel, init_from: str | None, notes: list[str],
    advice: list[str],
) -> tuple[nn.Module, Unfreeze | None, FrozenBase | None]:  # fmt: skip
    """Build the model, load its initial weights, and apply all transforms.

    Return the model, the hook that unfreezes parameters later, and the frozen weights that checkpoints leave out.
    """
    initial = None
    with parallel.model_init_context():
        model = build_model(config, facts, parallel.device)
        if init_from is not None:
            initial = load_initial(model, init_from, parallel, config.init)
            advice += initial.lines
        model = apply_transforms(config, model, parallel.device, notes)
    for name, tensor in model.state_dict().items():
        if getattr(tensor, "layout", None) is not torch.strided:
            raise PluginError(describe_unsaveable(name, tensor))
    if not all(layer.training for layer in model.modules()):
        set_training_mode(model, advice)
    frozen = freeze_parameters(config, model, notes)
    only = initial if config.checkpoint.adapter_only else None
    return model, frozen, None if only is None else only.base(model, notes)


def split_model_settings(node: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the node of the model into arguments of its class and trainrun's own settings, such as `freeze`
    (`WORDS`).

    A name that is an argument of the class counts as its argument.
    """
    if not (names := WORDS.keys() & node):
        return dict(node), {}
    argument_names = {item.name for item in list_parameters(import_target(node[TARGET], "model")) or ()}
    words = {name: node[name] for name in WORDS if name in names - argument_names}
    return {name: value for name, value in node.items() if name not in words}, words


def check_model_settings(config: RunConfig) -> list[str]:
    """Return a message for each wrong value among trainrun's own settings in the node of the model.

    The `_target_` of the model must be importable.
    """
    words = split_model_settings(config.model)[1]
    faults = [f"model.{n}={fault}" for n, value in words.items() if (fault := check_value(value, WORDS[n]))]
    if words.get("freeze") == "":
        faults.append("model.freeze=: has no value; give one, or leave it out")
    if words.get("freeze_norm") or words.get("unfreeze_at") is not None:
        faults += check_unfreezing(words)
    return faults


def freeze_parameters(config: RunConfig, model: nn.Module, notes: list[str]) -> Unfreeze | None:
    """Freeze the parameters that `model.freeze` names. Return the hook that unfreezes them later; None without one."""
    words = split_model_settings(config.model)[1]
    if not words.get("freeze"):
        return None
    with raise_as_config_error(ValueError):
        frozen = FrozenParameters(model, words["freeze"], words.get("freeze_norm", False))
    until = words.get("unfreeze_at")
    notes.append(describe_unfreezing(frozen, until))
    return build_unfreezing(frozen, until, model)


def check_is_module(model: object, key: str, way_out: str = "") -> nn.Module:
    """Return the model. Raise ConfigError if it is not a torch module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{key}: returns a {type(model).__name__}, not a torch.nn.Module{way_out}")
    return model


def move_model_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model on the device. Tensors that are there keep their memory, with or without values."""
    is_there = all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
    return model if is_there else model.to(device)


def convert_to_precision(model: nn.Module, config: RunConfig) -> nn.Module:
    """Convert the model to the number type of the run. Layers with a bug in torch's convolutions are guarded."""
    prepare_model(model, config.precision.mode)
    if any(isinstance(layer, nn.Conv2d) for layer in model.modules()):
        guard_convolutions(model)
    return model


def apply_transforms(
    config: RunConfig, model: nn.Module, device: torch.device, notes: list[str] | None = None
) -> nn.Module:
    """Apply the nodes of `transform` in order, for a training or when a run is loaded."""
    for name, node in config.transform.items():
        key = f"transform.{name}"
        changed = check_is_module(
            build_node(node, key, model), f"{key}._target_={node['_target_']}", "; return the model"
        )
        make_dense(changed)
        model = convert_to_precision(move_model_to_device(changed, device), config)
        if notes is not None:
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            notes.append(f"{key}: {format_count(trained, 'parameter')} trained")
    return model


def apply_built_in_techniques(
    config: RunConfig, model: nn.Module, device: torch.device, notes: list[str]
) -> None:
    """Apply the built-in techniques that change a model in place; compilation comes last. Raise ConfigError.

    A line about each choice is added to `notes`.
    """
    trainer = config.trainer
    if faults := check_gpu_settings(config, device.type):
        raise ConfigError(*map(str, faults))
    if config.precision.fp8:
        from trainrun.transform.fp8 import fp8_linear

        with raise_as_config_error():
            notes.append(fp8_linear(model, device, trainer.compile.scope != "off"))
    if trainer.channels_last:
        channels_last(model)
    if trainer.gradient_checkpointing != "none":
        notes.append(apply_gradient_checkpointing(model, config))
    if trainer.activation_offload:
        activation_offload(model)
    if trainer.compile.scope in ("model", "regional"):
        compile_model_or_blocks(model, config, device)


# A tiny step on one core: digits MLP of 9,610 weights, batch 32, Xeon with AVX-512, torch 2.13.
CPU_SAVED_SECONDS, CPU_COMPILE_SECONDS = 1e-4, 6.5
# Above it kernels and not Python take the time: on a CPU 0.7x to 1.0x in float32. A small GPT in bf16 gains (1.27x),
# but nothing here tells it from those that lose; `trainer.compile=model` is for users who have measured it.
SMALL_STEP_FLOP = 1e8
# GPT of 124 million weights in bf16 on an H100: 129 -> 104 ms, 18 s of compiling. Smaller steps save less.
GPU_SAVED_SECONDS, GPU_COMPILE_SECONDS = 8e-3, 30.0
GPU_LEAST_WEIGHTS = 1_000_000  # a step of fewer does not take as long as that


def choose_compile_scope(
    config: RunConfig, num_weights: int, total_steps: int | None, device: torch.device, problem: str = ""
) -> tuple[str, str]:
    """Return the compile scope for this run, and a line with the reason. problem: why the compiler cannot be used."""

    def turn_off(why: str) -> tuple[str, str]:
        return "off", f"compile: off (auto), {why}"

    if total_steps is None:
        return turn_off("the number of steps is not known; give trainer.max_steps")
    if device.type == "cuda" and num_weights < GPU_LEAST_WEIGHTS:
        return turn_off("a small network on a GPU; there trainer.cuda_graphs=true may pay")
    if device.type == "cuda":
        scope, saved, cost = "model", GPU_SAVED_SECONDS, GPU_COMPILE_SECONDS
    else:
        if device.type != "cpu" or 6 * num_weights * config.data.batch_size > SMALL_STEP_FLOP:
            return turn_off(f"on the device {device.type} it pays for tiny steps only")
        if obstacle := next(iterate_step_obstacles(config), None):
            return turn_off(f"a step of one graph cannot be combined with {obstacle[0]}")
        scope, saved, cost = "step", CPU_SAVED_SECONDS, CPU_COMPILE_SECONDS
    gain = total_steps * saved
    sum_of_it = f"{total_steps:,} steps x {1e3 * saved:g} ms = {gain:.1f} s saved"
    if gain <= cost:
        return turn_off(f"{sum_of_it} <= {cost:g} s of compiling")
    if problem:
        return turn_off(f"it would pay, but torch.compile on a GPU {problem}")
    return scope, f"compile: {scope} (auto), {sum_of_it} > {cost:g} s of compiling"


def resolve_compile_scope(
    config: RunConfig, num_weights: int, total_steps: int | None, device: torch.device, notes: list[str]
) -> RunConfig:
    """Return the config with `trainer.compile.scope=auto` resolved."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    problem = (
        gpu_compiler_problem(capability)
        if capability and config.trainer.compile.backend == "inductor"
        else ""
    )
    scope, note = choose_compile_scope(config, num_weights, total_steps, device, problem)
    notes.append(note)
    return replace_values(config, {"trainer.compile.scope": scope})


NO_BLOCKS = (
    "the model has no blocks to recompute: no torch.nn.ModuleList or torch.nn.Sequential with several children "
    "of one class that have layers of their own, and in a Sequential no runs of layers that save more than their input"
)


def apply_gradient_checkpointing(model: nn.Module, config: RunConfig) -> str:
    """Wrap blocks of the model in activation checkpointing. Return a line about it.

    `auto` wraps nothing if steps are compiled or recorded.
    """
    from trainrun.transform.gradient_checkpointing import gradient_checkpointing

    trainer, key = config.trainer, "trainer.gradient_checkpointing"
    mode, is_auto = trainer.gradient_checkpointing, trainer.gradient_checkpointing == "auto"
    if is_auto and (trainer.compile.scope != "off" or trainer.cuda_graphs or config.parallel.sync_batchnorm):
        return f"{key}: off, with compiled or recorded steps or synchronised batch norm (auto)"
    number = gradient_checkpointing(model, "full" if is_auto else mode)
    if not number and not is_auto:
        raise ConfigError(f"{key}={mode}: {NO_BLOCKS}; use {key}=none")
    result = (
        f"{number} blocks are computed again in the backward" if number else "off, the model has no blocks"
    )
    return f"{key}: {result}" + (" (auto)" if is_auto else "")


def compile_model_or_blocks(model: nn.Module, config: RunConfig, device: torch.device) -> None:
    """Compile the model or its blocks, as `trainer.compile` says. Do nothing for `compile.scope=step`, which
    `step/whole.py` compiles.
    """
    wanted = config.trainer.compile
    sizes = {config.data.batch_size, config.data.val_batch_size or config.data.batch_size}
    with raise_as_config_error():
        compile_model(
            model, sizes, wanted.scope == "regional", mode=wanted.mode, backend=wanted.backend,
            fullgraph=wanted.fullgraph, dynamic=wanted.dynamic,
        )  # fmt: skip
    adds_up = config.trainer.accumulate_grad_batches > 1
    if adds_up and device.type == "cuda" and wanted.mode in WITH_CUDA_GRAPHS:
        copy_gradients(model)
