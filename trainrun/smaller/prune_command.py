"""`trainrun prune RUN_DIR --amount 0.5`: write a new run with fewer weights or channels, and compare both runs."""

from __future__ import annotations

import shlex
from argparse import Namespace
from typing import Any, NamedTuple

from torch import nn

from trainrun.cli.run_arguments import add_checkpoint_options, build_run_parser, parse_arguments
from trainrun.config.schema import replace_values
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.export.served import record_call
from trainrun.limits import EPOCH, STEP, parse_duration
from trainrun.output import format_count, say
from trainrun.runs.run import resume_run
from trainrun.smaller.channels import format_reasons
from trainrun.smaller.new_run import SourceRun, compare_with_source, open_source, write_run
from trainrun.smaller.prune import (
    Mask,
    explain_unmasked_layers,
    mask_weights,
    narrow_layers,
    remove_channels,
)
from trainrun.training.without_trace import read_first_batches
from trainrun.transform.lora import LoraLinear
from trainrun.user_code import add_import_paths

NAME = "pruned"  # in `transform`


class PrunedModel(NamedTuple):
    """A pruned network, the transform that prepares a new model for its weights, and a summary of the pruning."""

    model: nn.Module
    transform: dict[str, Any]
    summary: str


def main(argv: list[str]) -> int:
    """Write the new run, train it if `--finetune` is set, and compare the two runs."""
    arguments = parse_prune_arguments(argv)
    limits = parse_finetune_length(arguments.finetune)
    source = open_source(arguments, NAME, [NAME, "int8"])
    pruned = prune_model(source, arguments)
    transforms = {**source.config.transform, NAME: pruned.transform}
    config = replace_values(source.config, {"transform": transforms, **limits})
    reason = f"pruned: --amount {arguments.amount:g}, of {source.run.root.name}"
    write_run(source, config, pruned.model, reason)
    say(f"{source.new_run.root}: {pruned.summary}")
    if arguments.finetune:
        exit_code = resume_run(source.new_run, [], add_import_paths([]), trust=True)
        if exit_code != EXIT_DONE:
            return exit_code
    return compare_with_source(source)


def parse_prune_arguments(argv: list[str]) -> Namespace:
    parser = build_run_parser(
        "prune", "Writes a new run without a part of the weights or channels, and compares both runs."
    )
    add_checkpoint_options(parser)
    parser.add_argument(
        "--amount", type=float, default=0.5, help="the part that is removed, above 0 and below 1"
    )
    parser.add_argument(
        "--structured",
        action="store_true",
        help="remove whole channels, so that layers become smaller",
    )
    parser.add_argument("--finetune", help="how long the new run trains, as 2epoch or 500step")
    parser.add_argument("--out", help="the folder of the new run (default: RUN_DIR-pruned, beside it)")
    arguments = parse_arguments(parser, argv)
    if not 0 < arguments.amount < 1:
        raise ConfigError(f"--amount {arguments.amount:g}: must be above 0 and below 1, as 0.5")
    return arguments


def prune_model(source: SourceRun, arguments: Namespace) -> PrunedModel:
    """Return the pruned network. Raise ConfigError if nothing can be removed."""
    model, amount = source.copy_model(), arguments.amount
    try:
        return prune_channels(source, model, amount) if arguments.structured else prune_weights(model, amount)
    except ValueError as error:
        way_out = ""
        if any(isinstance(layer, LoraLinear) for layer in model.modules()):
            merge = f"trainrun export {shlex.quote(arguments.run_dir)} --to huggingface --merge"
            way_out = f"; or merge LoRA first: {merge}, and init_from that"
        raise ConfigError(f"--amount {amount:g}: {error}{way_out}") from error


def prune_channels(source: SourceRun, model: nn.Module, amount: float) -> PrunedModel:
    """Remove whole channels. The graph of the network is traced with a batch of the run."""
    (batch,) = read_first_batches(source.parts.val or source.parts.train)
    tensors, call = record_call(model, source.parts.task, batch)
    positional, named = call.fill(tensors)
    model, sizes, left = remove_channels(model, positional, named, amount)
    reasons = f"; not narrowed: {format_reasons(left)}" if left else ""
    transform = {"_target_": f"{__package__}.prune.{narrow_layers.__name__}", "sizes": sizes}
    return PrunedModel(model, transform, f"{format_count(len(sizes), 'layer')} narrowed{reasons}")


def prune_weights(model: nn.Module, amount: float) -> PrunedModel:
    """Mask the smallest weights."""
    left = explain_unmasked_layers(model)
    masks = [module.mask for module in mask_weights(model, amount).modules() if isinstance(module, Mask)]
    num_zeros = sum(int((~mask).sum()) for mask in masks)
    share = num_zeros / sum(param.numel() for param in model.parameters())
    reasons = f"; not masked: {format_reasons(left)}" if left else ""
    transform = {"_target_": f"{__package__}.prune.{mask_weights.__name__}", "amount": amount}
    summary = f"{format_count(len(masks), 'layer')} masked, {share:.0%} of all weights stay zero{reasons}"
    return PrunedModel(model, transform, summary)


def parse_finetune_length(text: str | None) -> dict[str, int | None]:
    """Return the trainer settings for the value of `--finetune`. Raise ConfigError if it is invalid."""
    if text is None:
        return {}
    try:
        limit = parse_duration(text, EPOCH, STEP)
        if not limit.amount.is_integer():
            raise ValueError("must be a whole number, as 2epoch or 500step")
    except ValueError as error:
        raise ConfigError(f"--finetune {text}: {error}") from error
    number = int(limit.amount)
    epochs = number if limit.unit == EPOCH else None
    return {"trainer.max_epochs": epochs, "trainer.max_steps": None if epochs else number}
