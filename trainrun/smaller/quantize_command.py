"""`trainrun quantize RUN_DIR --to int8-dynamic`: a new run with weights of one byte, compared with the old one."""

from __future__ import annotations

import copy
from itertools import islice

import torch

from trainrun.assemble.model_and_transforms import split_words
from trainrun.cli.run_arguments import add_checkpoint, parse, run_parser
from trainrun.config.schema import with_values
from trainrun.errors import ConfigError
from trainrun.output import counted, say
from trainrun.runs.restore_config import checkpoint_of, load_parts
from trainrun.runs.resume import trusted_config
from trainrun.runs.run import open_run
from trainrun.smaller.channels import format_reasons
from trainrun.smaller.new_run import UNCOMPILED, choose_folder, compare_runs, measure_run, write_run
from trainrun.transform.int8 import MODES, explain_float_layers, int8, record_ranges

STEP = "int8"  # its name in `transform`
CALIBRATION_BATCHES = 16


def main(argv: list[str]) -> int:
    """Write the new run, load it again, and compare the two."""
    parser = run_parser("quantize", "A new run whose layers have weights of one byte, for serving.")
    add_checkpoint(parser)
    parser.add_argument("--to", required=True, choices=MODES, help="which numbers are bytes")
    parser.add_argument("--out", help="the folder of the new run (default: RUN_DIR-TO, beside it)")
    words = parse(parser, argv)
    source = open_run(words.run_dir)
    run = choose_folder(words.out, source, words.to)
    which = checkpoint_of(source, words.which)
    parts, checkpoint = load_parts(source, which, [*UNCOMPILED, *words.overrides], words.trust)
    config = trusted_config(source, words.overrides, words.trust)
    if STEP in config.transform:
        raise ConfigError(
            f"{source.root}: has transform.{STEP} already; quantize the run that it was made from"
        )
    device = parts.parallel.device
    before = measure_run(parts)
    model = copy.deepcopy(parts.model).eval()
    try:
        model = int8(model, words.to).to(device).eval()
    except ValueError as error:
        raise ConfigError(f"{source.root}: --{error}") from error
    num_layers = sum("parametrizations" in dict(layer.named_children()) for layer in model.modules())
    left = explain_float_layers(model)
    if words.to == "int8-static":
        with torch.no_grad(), record_ranges(model):
            for batch in islice(parts.train.epoch(0), CALIBRATION_BATCHES):
                parts.task.step(model, batch.data)
    config = with_values(config, {
        "model": split_words(config.model)[0],  # nothing is frozen where nothing is trained
        "transform": {**config.transform, STEP: {"_target_": f"{int8.__module__}.int8", "to": words.to}},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.0}, "scheduler": None, "hook": {},
        "trainer.ema.enabled": False, "trainer.max_steps": 0,
    })  # fmt: skip
    write_run(run, source, checkpoint, config, model, f"quantized: --to {words.to}, of {source.root.name}")
    in_bytes = sum(one.numel() for one in model.parameters() if one.dtype == torch.int8)
    share = in_bytes / sum(p.numel() for p in before.model.parameters())
    stays = f"; in floating point: {format_reasons(left)}" if left else ""
    say(f"{run.root}: {counted(num_layers, 'layer')} in 8 bits, {share:.0%} of the weights{stays}")
    return compare_runs(run, before, parts)
