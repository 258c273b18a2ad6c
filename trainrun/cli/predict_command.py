"""`trainrun predict RUN_DIR`: one row a sample, as CSV or Parquet; `trainrun evaluate RUN_DIR`: loss and metrics."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainrun.cli.run_arguments import add_checkpoint, no_split, parse, run_parser
from trainrun.errors import EXIT_DONE, ConfigError, PluginError
from trainrun.folder.run_folder import RunDir, write_json
from trainrun.interfaces import IGNORED, Predicts, batch_fields
from trainrun.output import counted, say
from trainrun.runs.restore_config import checkpoint_of, load_parts
from trainrun.runs.run import open_run
from trainrun.task.batches import inputs_and_maybe_target, join_batches, output_tensor, run_model
from trainrun.task.classification import Classification
from trainrun.task.language_modeling import LanguageModeling
from trainrun.training import evaluate as evaluation

if TYPE_CHECKING:
    from torch import Tensor

    from trainrun.training.components import Components

FORMATS = (".csv", ".parquet")
NUMBERS_OF_CLASSES = ("prediction", "target")  # columns


def main(argv: list[str]) -> int:
    """Rows are in the order of the data; the columns are the task's."""
    parser = run_parser(
        "predict", "Predictions of a saved model, one row a sample, in the order of the data."
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--out", default=None, help="a .csv or .parquet file (default: predictions-SPLIT.csv in RUN_DIR)"
    )
    words = parse(parser, argv)
    run_dir = open_run(words.run_dir)
    usual = run_dir.root / f"predictions-{words.split.replace('/', '-')}.csv"
    out = Path(words.out).expanduser() if words.out else usual
    if out.suffix not in FORMATS:
        raise ConfigError(f"--out {out}: must end in {' or '.join(FORMATS)}")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist")
    columns = predictions(
        run_dir, checkpoint_of(run_dir, words.which), words.split, words.overrides, words.trust
    )
    try:
        write_table(out, columns)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write there ({error.strerror}); name another file") from error
    say(f"{counted(len(columns['index']), 'prediction')} in {out}")
    return EXIT_DONE


def predictions(
    run_dir: RunDir, which: str, split: str, overrides: list[str], trust: bool = False
) -> dict[str, list[Any]]:
    """Columns of equal length: `index`, the number of the sample in the data; `piece`, of split ones; the task's.

    Behind numbers of classes that have names stands a column with these, as `prediction_name`.
    """
    run, _ = with_all_samples(run_dir, which, split, overrides, trust)
    if split not in run.splits():
        raise no_split(run.splits(), split)
    columns: dict[str, list[Any]] = {}
    class_names = run.data_facts.class_names
    for name, tensor in predict_split(run, split).items():
        flat = tensor.reshape(len(tensor), -1)
        if flat.shape[1] == 1:
            columns[name] = flat[:, 0].tolist()
            if name in NUMBERS_OF_CLASSES and names_fit(columns[name], class_names):
                columns[f"{name}_name"] = [class_names[number] for number in columns[name]]
        else:
            columns |= {f"{name}_{i}": flat[:, i].tolist() for i in range(flat.shape[1])}
    count = len(next(iter(columns.values())))
    return {"index": list(range(count))} | columns


def names_fit(numbers: list[Any], class_names: Sequence[str]) -> bool:
    """Return whether each of the numbers is that of a class."""
    return all(type(number) is int and 0 <= number < len(class_names) for number in numbers)


def with_all_samples(
    run_dir: RunDir, which: str, split: str, words: list[str], trust: bool, is_held_out: bool = False
) -> tuple[Components, Path]:
    """As `parts_of`, with every sample: a limit is of the run's validations. It stays where it is typed here, and where
    the data says no length, for it may have no end. is_held_out: see `parts_of`."""
    asked = split.partition("/")[0]
    limits = [limit for limit in ("limit_val_batches", "limit_test_batches") if asked in limit.split("_")]
    lifted = [f"trainer.{limit}=1.0" for limit in limits if not any(limit in word for word in words)]
    run, folder = load_parts(run_dir, which, [*words, *lifted], trust, split, is_held_out)
    sets = [stream for name, stream in run.splits().items() if split in (name, name.partition("/")[0])]
    if any(stream.num_samples is None for stream in sets):
        return load_parts(run_dir, which, words, trust, split, is_held_out)
    return run, folder


def predict_split(run: Components, split: str) -> dict[str, Tensor]:
    """The task's columns over a whole split, on the CPU; raw outputs where the task predicts nothing. At padding of
    tokens that task=classification or language_modeling predicts, -100 or NaN; a task of one's own knows its own."""
    import torch

    who = getattr(getattr(run.task, "predict", None), "__self__", None)  # of distillation, the student's task
    of_tokens = type(who) in (Classification, LanguageModeling)
    collected: dict[str, list[Tensor]] = {}
    run.model.eval()
    with torch.no_grad():
        for batch in run.splits()[split].epoch(0):
            with run.precision.autocast():
                if isinstance(run.task, Predicts):
                    columns = run.task.predict(run.model, batch.data)
                else:
                    columns = {"output": raw_output(run.model, batch.data)}
            if of_tokens:
                columns = without_padding(columns, batch.data)
            if batch.indices is not None and len(batch.indices) == len(next(iter(columns.values()))):
                columns = {"index": batch.indices, **columns}
            for name, column in columns.items():
                collected.setdefault(name, []).append(column.detach().cpu())
    found = {name: join_batches(chunks) for name, chunks in collected.items()}
    index = found.get("index")
    # a number twice: of data.truncate=split, in the order of the data
    if index is not None and bool((index.diff() == 0).any()):
        piece = torch.arange(len(index)) - torch.searchsorted(index, index)
        found = {"index": index, "piece": piece, **found}
    return found


def without_padding(columns: dict[str, Tensor], batch: Any) -> dict[str, Tensor]:
    """Columns (B, T, ...) of predictions of tokens, with -100, or NaN among floats, where `attention_mask` (B, T) is 0.
    What a decoder gives, of other places, is left as it is."""
    from torch import Tensor

    fields = batch_fields(batch)
    mask = fields.get("attention_mask")
    if not isinstance(mask, Tensor) or any(str(name).startswith("decoder_") for name in fields):
        return columns
    hidden, (first, *_), target = mask == 0, columns.values(), columns.get("target")
    if first.shape[: mask.ndim] != mask.shape:
        return columns
    if target is not None and target.shape == mask.shape and bool((target[hidden] >= 0).any()):
        return columns
    shown, places = dict(columns), hidden.nonzero(as_tuple=True)
    for name, column in columns.items():
        if column.shape[: mask.ndim] == mask.shape:
            column, fill = (column, float("nan")) if column.is_floating_point() else (column.long(), IGNORED)
            shown[name] = column.index_put(places, column.new_tensor(fill))
    return shown


def raw_output(model: Any, batch: Any) -> Tensor:
    """The model's tensor for the inputs of a batch; a dict is passed by the names of its `forward`."""
    inputs = batch[0] if isinstance(batch, tuple | list) else inputs_and_maybe_target(batch)[0]
    try:
        return output_tensor(run_model(model, inputs, batch))
    except PluginError as error:
        raise PluginError(f"{error}; or give your task a method predict(model, batch)") from error


def write_table(out: Path, columns: dict[str, list[Any]]) -> None:
    """Replace the file as a whole."""
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
    """Print the metrics and write them to `evaluation-SPLIT.json` in the run folder."""
    parser = run_parser("evaluate", "Loss and metrics of a saved model, each sample counted once.")
    add_checkpoint(parser)
    words = parse(parser, argv)
    run_dir = open_run(words.run_dir)

    which = checkpoint_of(run_dir, words.which)
    run, folder = with_all_samples(run_dir, which, words.split, words.overrides, words.trust, True)
    splits = [name for name in run.splits() if name == words.split or name.startswith(f"{words.split}/")]
    if not splits:
        raise no_split(run.splits(), words.split)
    found = {name: value for split in splits for name, value in evaluation.evaluate(run, split).items()}
    metrics = {name: value for name, value in found.items() if not name.endswith("/seconds")}
    number = sum(run.splits()[split].num_samples or 0 for split in splits)
    of_samples = f"  ({counted(number, 'sample')})" if number else ""
    values = "  ".join(f"{name} {value:.5g}" for name, value in metrics.items())
    say(f"{folder.name} ({which}): {values}{of_samples}")
    place = run_dir.root / f"evaluation-{words.split.replace('/', '-')}.json"
    try:
        write_json(place, {"checkpoint": folder.name, **metrics})
    except OSError as error:  # somebody else's folder, or a full disk; what was asked for is said
        say(f"note: {place}: not written ({error.strerror})", file=sys.stderr)
    return EXIT_DONE
