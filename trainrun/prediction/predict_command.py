"""`trainrun predict RUN_DIR`: write one row per sample as CSV or Parquet. `trainrun evaluate RUN_DIR`: loss and
metrics.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainrun.cli.run_arguments import (
    add_checkpoint_options,
    build_missing_split_error,
    build_run_parser,
    parse_arguments,
)
from trainrun.errors import EXIT_DONE, ConfigError
from trainrun.folder.run_folder import RunDir, write_json
from trainrun.output import format_count, format_table, report_result, say
from trainrun.prediction.new_samples import SHOWN_CLASSES, predict_new_samples
from trainrun.prediction.predictions import predict_batches
from trainrun.runs.restore_config import choose_saved_checkpoint, load_parts
from trainrun.runs.run import open_run
from trainrun.training import evaluate as evaluation

if TYPE_CHECKING:
    from torch import Tensor

    from trainrun.training.components import Components

FORMATS = (".csv", ".parquet")
NUMBERS_OF_CLASSES = ("prediction", "target")  # columns
SETTING = re.compile(r"[+~]?[\w.@/-]+=")
MOST_ROWS, MOST_COLUMNS = 10, 8  # on the screen


def main(argv: list[str]) -> int:
    """Write the predictions of a saved run, one row per sample in the order of the data. The columns depend on the
    task.
    """
    parser = build_run_parser(
        "predict",
        "Writes predictions of a saved model, one row per sample, in the order of the data. The samples are files, "
        "folders, patterns or tables named after RUN_DIR, or else those of a split of the run.",
        ("FILE or key=value", "new samples; or, without them, single values to change"),
    )
    add_checkpoint_options(parser)
    parser.add_argument(
        "--out",
        default=None,
        help="a .csv or .parquet file, which is replaced if it is there (default: predictions-SPLIT.csv in RUN_DIR)",
    )
    parser.add_argument(
        "--top", type=int, default=SHOWN_CLASSES,
        help=f"number of likeliest classes with a column, for new files (default: {SHOWN_CLASSES})",
    )  # fmt: skip
    words = parse_arguments(parser, argv)
    run_dir = open_run(words.run_dir)
    files = [word for word in words.overrides if not SETTING.match(word) or Path(word).exists()]
    if files and len(files) < len(words.overrides):
        setting = next(word for word in words.overrides if word not in files)
        raise ConfigError(f"predict {files[0]}: files are read as in the training; leave {setting} out")
    split = "new" if files else words.split.replace("/", "-")
    usual = run_dir.root / f"predictions-{split}.csv"
    out = Path(words.out).expanduser() if words.out else usual
    if out.suffix not in FORMATS:
        raise ConfigError(f"--out {out}: must end in {' or '.join(FORMATS)}")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist")
    if words.top < 1:
        raise ConfigError(f"--top {words.top}: must be 1 or more")
    which = choose_saved_checkpoint(run_dir, words.which)
    if files:
        columns = predict_new_samples(run_dir, files, which, words.trust, words.top)
        print_rows(columns)
    else:
        columns = collect_predictions(run_dir, which, words.split, words.overrides, words.trust)
    replaced = " (the earlier file is replaced)" if out.exists() else ""
    try:
        write_prediction_table(out, columns)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write in it ({error.strerror}); name another file") from error
    number = len(next(iter(columns.values())))
    say(f"{format_count(number, 'prediction')} in {out}{replaced}")
    report_result(file=out, num_predictions=number, columns=list(columns))
    return EXIT_DONE


def print_rows(columns: dict[str, list[Any]]) -> None:
    """Print the first predictions as a table."""
    rows = list(zip(*columns.values(), strict=True))[:MOST_ROWS]
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    say(format_table(list(columns)[:MOST_COLUMNS], [row[:MOST_COLUMNS] for row in cells]))


def collect_predictions(
    run_dir: RunDir, which: str, split: str, overrides: list[str], trust: bool = False
) -> dict[str, list[Any]]:
    """Return columns of equal length: `index` (number of the sample), `piece` (of split samples), and the columns of
    the task.

    If classes have names, a column such as `prediction_name` follows their numbers.
    """
    run, _ = load_run_with_all_samples(run_dir, which, split, overrides, trust)
    if split not in run.splits():
        raise build_missing_split_error(run.splits(), split)
    columns: dict[str, list[Any]] = {}
    class_names = run.data_facts.class_names
    for name, tensor in predict_split(run, split).items():
        flat = tensor.reshape(len(tensor), -1)
        if flat.shape[1] == 1:
            columns[name] = flat[:, 0].tolist()
            if name in NUMBERS_OF_CLASSES and are_class_numbers(columns[name], class_names):
                columns[f"{name}_name"] = [class_names[number] for number in columns[name]]
        else:
            columns |= {f"{name}_{i}": flat[:, i].tolist() for i in range(flat.shape[1])}
    count = len(next(iter(columns.values())))
    return {"index": list(range(count))} | columns


def are_class_numbers(numbers: list[Any], class_names: Sequence[str]) -> bool:
    """Return whether every number is the number of a class."""
    return all(type(number) is int and 0 <= number < len(class_names) for number in numbers)


def load_run_with_all_samples(
    run_dir: RunDir, which: str, split: str, words: list[str], trust: bool, is_held_out: bool = False
) -> tuple[Components, Path]:
    """Return the parts of a run with all samples of a split. The run's `trainer.limit_val_batches` does not apply.

    A limit applies if it is typed in this command, or if the data has no length. is_held_out: see `load_parts`.
    """
    kind = split.partition("/")[0]
    is_limited = kind == "val" and not any("limit_val_batches" in word for word in words)
    lifted = ["trainer.limit_val_batches=1.0"] if is_limited else []
    run, folder = load_parts(run_dir, which, [*words, *lifted], trust, split, is_held_out)
    sets = [stream for name, stream in run.splits().items() if split in (name, name.partition("/")[0])]
    if any(stream.num_samples is None for stream in sets):
        return load_parts(run_dir, which, words, trust, split, is_held_out)
    return run, folder


def predict_split(run: Components, split: str) -> dict[str, Tensor]:
    """Return the task's columns for a whole split, see `predict_batches`."""
    import torch

    batches = run.splits()[split].epoch(0)
    predicted = predict_batches(run.model, run.task, batches, run.precision.autocast)
    index = predicted.get("index")
    # a number twice: of data.truncate=split, in the order of the data
    if index is not None and bool((index.diff() == 0).any()):
        piece = torch.arange(len(index)) - torch.searchsorted(index, index)
        predicted = {"index": index, "piece": piece, **predicted}
    return predicted


def write_prediction_table(out: Path, columns: dict[str, list[Any]]) -> None:
    """Write the columns as CSV or Parquet and replace the file atomically. Raise ConfigError if pyarrow is missing."""
    temporary = out.with_name(f".{out.name}.tmp")
    if out.suffix == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(
                f"--out {out}: needs pyarrow; pip install 'trainrun[parquet]', or write .csv"
            ) from error
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
    else:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    temporary.replace(out)


def evaluate_command(argv: list[str]) -> int:
    """Print the metrics of a saved run, and write them to `evaluation-SPLIT.json` in its folder."""
    parser = build_run_parser(
        "evaluate", "Prints loss and metrics of a saved model. Each sample counts once."
    )
    add_checkpoint_options(parser)
    words = parse_arguments(parser, argv)
    run_dir = open_run(words.run_dir)

    which = choose_saved_checkpoint(run_dir, words.which)
    run, folder = load_run_with_all_samples(run_dir, which, words.split, words.overrides, words.trust, True)
    splits = [name for name in run.splits() if name == words.split or name.startswith(f"{words.split}/")]
    if not splits:
        raise build_missing_split_error(run.splits(), words.split)
    results = {name: value for split in splits for name, value in evaluation.evaluate(run, split).items()}
    metrics = {name: value for name, value in results.items() if not name.endswith("/seconds")}
    number = sum(run.splits()[split].num_samples or 0 for split in splits)
    of_samples = f"  ({format_count(number, 'sample')})" if number else ""
    values = "  ".join(f"{name} {value:.5g}" for name, value in metrics.items())
    say(f"{folder.name} ({which}): {values}{of_samples}")
    report_result(checkpoint=folder.name, metrics=metrics, num_samples=number or None)
    place = run_dir.root / f"evaluation-{words.split.replace('/', '-')}.json"
    try:
        write_json(place, {"checkpoint": folder.name, **metrics})
    except OSError as error:  # somebody else's folder, or a full disk; what was asked for is said
        say(f"note: {place}: not written ({error.strerror})", file=sys.stderr)
    return EXIT_DONE
