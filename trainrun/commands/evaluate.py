"""`trainrun evaluate RUN_DIR`: loss and metrics of a saved model."""

from __future__ import annotations

import sys

from trainrun.commands.arguments import add_checkpoint, checkpoint_of, parse, run_parser
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.output import say
from trainrun.rundir import write_json
from trainrun.runner import open_run


def main(argv: list[str]) -> int:
    """Print the metrics and write them to `evaluation-SPLIT.json` in the run folder."""
    parser = run_parser("evaluate", "Loss and metrics of a saved model, each sample counted once.")
    add_checkpoint(parser)
    words = parse(parser, argv)
    run = open_run(words.run_dir)

    from trainrun.loop import evaluate
    from trainrun.restore import parts_of

    which = checkpoint_of(run, words.which)
    parts, _, folder = parts_of(run, which, words.overrides, words.trust)
    if words.split not in parts.splits():
        raise ConfigError(
            f"--split {words.split}: this run has no data.{words.split}; name it with data.{words.split}._target_=..."
        )
    metrics = {
        name: value for name, value in evaluate(parts, words.split).items() if not name.endswith("/seconds")
    }
    say(f"{folder.name} ({which}): " + "  ".join(f"{name} {value:.5g}" for name, value in metrics.items()))
    place = run.root / f"evaluation-{words.split}.json"
    try:
        write_json(place, {"checkpoint": folder.name, **metrics})
    except OSError as error:  # somebody else's folder, or a full disk; what was asked for is said
        say(f"note: {place}: not written ({error.strerror})", file=sys.stderr)
    return EXIT_DONE
