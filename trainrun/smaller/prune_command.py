"""`trainrun prune RUN_DIR --amount 0.5`: a new run with fewer weights or channels, compared with the old one."""

from __future__ import annotations

import copy
from typing import Any

from trainrun.cli.commands import add_import_paths
from trainrun.cli.run_arguments import add_checkpoint, parse, run_parser
from trainrun.config.schema import with_values
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.export.served import record_call
from trainrun.limits import EPOCH, STEP, parse_duration
from trainrun.output import counted, say
from trainrun.runs.restore_config import checkpoint_of, load_parts
from trainrun.runs.resume import trusted_config
from trainrun.runs.run import open_run, resume_run
from trainrun.smaller.channels import format_reasons
from trainrun.smaller.new_run import UNCOMPILED, choose_folder, compare_runs, measure_run, write_run
from trainrun.smaller.prune import (
    Mask,
    explain_unmasked,
    mask_weights,
    narrow_layers,
    remove_channels,
)
from trainrun.training.without_trace import first_batches
from trainrun.transform.lora import LoraLinear

NAME = "pruned"  # in `transform`


def main(argv: list[str]) -> int:
    """Write the new run, train it on if asked to, and compare the two."""
    parser = run_parser("prune", "A new run with a part of the weights, or of the channels, taken out.")
    add_checkpoint(parser)
    parser.add_argument("--amount", type=float, default=0.5, help="the part that goes, above 0 and below 1")
    parser.add_argument(
        "--structured", action="store_true", help="whole channels, so that layers become smaller"
    )
    parser.add_argument("--finetune", help="how long the new run trains, as 2epoch or 500step")
    parser.add_argument("--out", help="the folder of the new run (default: RUN_DIR-pruned, beside it)")
    words = parse(parser, argv)
    if not 0 < words.amount < 1:
        raise ConfigError(f"--amount {words.amount:g}: must be above 0 and below 1, as 0.5")
    limits = training_limits(words.finetune)
    source = open_run(words.run_dir)
    run = choose_folder(words.out, source, NAME)
    which = checkpoint_of(source, words.which)
    parts, checkpoint = load_parts(source, which, [*UNCOMPILED, *words.overrides], words.trust)
    config = trusted_config(source, words.overrides, words.trust)
    if NAME in config.transform or "int8" in config.transform:
        name = NAME if NAME in config.transform else "int8"
        raise ConfigError(f"{source.root}: has transform.{name} already; prune the run that it was made from")
    before = measure_run(parts)
    model = copy.deepcopy(parts.model).eval()
    node: dict[str, Any]
    try:
        if words.structured:
            (batch,) = first_batches(parts.val or parts.train)
            tensors, call = record_call(model, parts.task, batch)
            positional, named = call.filled(tensors)
            model, sizes, left = remove_channels(model, positional, named, words.amount)
            node = {"_target_": f"{__package__}.prune.{narrow_layers.__name__}", "sizes": sizes}
            reasons = f"; not narrowed: {format_reasons(left)}" if left else ""
            what = f"{counted(len(sizes), 'layer')} narrowed{reasons}"
        else:
            left = explain_unmasked(model)
            masks = [one.mask for one in mask_weights(model, words.amount).modules() if isinstance(one, Mask)]
            node = {"_target_": f"{__package__}.prune.{mask_weights.__name__}", "amount": words.amount}
            zeros = sum(int((~mask).sum()) for mask in masks) / sum(p.numel() for p in model.parameters())
            reasons = f"; not masked: {format_reasons(left)}" if left else ""
            what = f"{counted(len(masks), 'layer')} masked, {zeros:.0%} of all weights stay zero{reasons}"
    except ValueError as error:
        adapted = any(isinstance(layer, LoraLinear) for layer in model.modules())
        way = f"; or merge LoRA first: trainrun export {words.run_dir} --to huggingface --merge, and init_from that"
        raise ConfigError(f"--amount {words.amount:g}: {error}{way if adapted else ''}") from error
    config = with_values(config, {"transform": {**config.transform, NAME: node}, **limits})
    write_run(
        run, source, checkpoint, config, model, f"pruned: --amount {words.amount:g}, of {source.root.name}"
    )
    say(f"{run.root}: {what}")
    if words.finetune and (code := resume_run(run, [], add_import_paths([]), trust=True)) != EXIT_DONE:
        return code
    return compare_runs(run, before, parts)


def training_limits(text: str | None) -> dict[str, int | None]:
    """Return the settings that `--finetune` stands for. Raise ConfigError."""
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
