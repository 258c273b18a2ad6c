"""`trainrun evaluate RUN_DIR`: loss and metrics of a saved model."""

from __future__ import annotations

import sys

from trainrun.cli.run_arguments import add_checkpoint, checkpoint_of, no_split, parse, run_parser
from trainrun.errors import EXIT_DONE
from trainrun.output import say
from trainrun.runs.run import open_run
from trainrun.runs.run_folder import write_json


def main(argv: list[str]) -> int:
    """Print the metrics and write them to `evaluation-SPLIT.json` in the run folder."""
    parser = run_parser("evaluate", "Loss and metrics of a saved model, each sample counted once.")
    add_checkpoint(parser)
    words = parse(parser, argv)
    run_dir = open_run(words.run_dir)

    from trainrun.runs.restore_config import parts_of
    from trainrun.training.evaluate import evaluate

    which = checkpoint_of(run_dir, words.which)
    run, _, folder = parts_of(run_dir, which, words.overrides, words.trust)
    splits = [name for name in run.splits() if name == words.split or name.startswith(f"{words.split}/")]
    if not splits:
        raise no_split(run.splits(), words.split)
    found = {name: value for split in splits for name, value in evaluate(run, split).items()}
    metrics = {name: value for name, value in found.items() if not name.endswith("/seconds")}
    say(f"{folder.name} ({which}): " + "  ".join(f"{name} {value:.5g}" for name, value in metrics.items()))
    place = run_dir.root / f"evaluation-{words.split.replace('/', '-')}.json"
    try:
        write_json(place, {"checkpoint": folder.name, **metrics})
    except OSError as error:  # somebody else's folder, or a full disk; what was asked for is said
        say(f"note: {place}: not written ({error.strerror})", file=sys.stderr)
    return EXIT_DONE
