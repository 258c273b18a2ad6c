"""`trainrun quantize RUN_DIR --to int8-dynamic`: write a new run with one byte per weight, and compare both runs."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn

from trainrun.assemble.model_and_transforms import split_model_settings
from trainrun.cli.run_arguments import add_checkpoint_options, build_run_parser, parse_arguments
from trainrun.config.schema import RunConfig, replace_values
from trainrun.errors import ConfigError
from trainrun.output import format_count, say
from trainrun.smaller.channels import format_reasons
from trainrun.smaller.new_run import SourceRun, compare_with_source, open_source, write_run
from trainrun.transform.int8 import MODES, explain_float_layers, int8, record_ranges

NAME = "int8"  # in `transform`
CALIBRATION_BATCHES = 16


def main(argv: list[str]) -> int:
    """Write the new run, load it again, and compare the two runs."""
    parser = build_run_parser(
        "quantize", "Writes a new run whose layers have weights of one byte, for serving."
    )
    add_checkpoint_options(parser)
    parser.add_argument("--to", required=True, choices=MODES, help="which values become bytes")
    parser.add_argument("--out", help="the folder of the new run (default: RUN_DIR-TO, beside it)")
    arguments = parse_arguments(parser, argv)
    mode = arguments.to
    source = open_source(arguments, mode, [NAME])
    model = source.copy_model()
    try:
        model = int8(model, mode).to(source.parts.parallel.device).eval()
    except ValueError as error:
        raise ConfigError(f"{source.run.root}: --{error}") from error
    summary = describe_int8_layers(source, model)
    if mode == "int8-static":
        record_activation_ranges(source, model)
    reason = f"quantized: --to {mode}, of {source.run.root.name}"
    write_run(source, quantized_config(source.config, mode), model, reason)
    say(f"{source.new_run.root}: {summary}")
    return compare_with_source(source)


def record_activation_ranges(source: SourceRun, model: nn.Module) -> None:
    """Record the ranges of inputs and outputs of layers on the first training batches."""
    with torch.no_grad(), record_ranges(model):
        for batch in islice(source.parts.train.epoch(0), CALIBRATION_BATCHES):
            source.parts.task.step(model, batch.data)


def quantized_config(config: RunConfig, mode: str) -> RunConfig:
    """Return the settings of a run that loads these weights and is not trained."""
    return replace_values(config, {
        "model": split_model_settings(config.model)[0],  # nothing is frozen where nothing is trained
        "transform": {**config.transform, NAME: {"_target_": f"{int8.__module__}.int8", "to": mode}},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.0}, "scheduler": None, "hook": {},
        "trainer.ema.enabled": False, "trainer.max_steps": 0,
    })  # fmt: skip


def describe_int8_layers(source: SourceRun, model: nn.Module) -> str:
    """Return a text with the number of layers and weights that became bytes, and the layers that did not."""
    num_layers = sum("parametrizations" in dict(layer.named_children()) for layer in model.modules())
    num_bytes = sum(param.numel() for param in model.parameters() if param.dtype == torch.int8)
    share = num_bytes / sum(param.numel() for param in source.before.model.parameters())
    left = explain_float_layers(model)
    reasons = f"; in floating point: {format_reasons(left)}" if left else ""
    return f"{format_count(num_layers, 'layer')} in 8 bits, {share:.0%} of the weights{reasons}"
