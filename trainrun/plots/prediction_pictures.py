"""Predictions of a run as HTML for the report: confusion matrix, sample images, regression, images of the task."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from trainrun.errors import DataError
from trainrun.folder.run_folder import RunDir
from trainrun.monitor.metric_rows import Row
from trainrun.plots import page
from trainrun.plots.chart import Chart, Curve, charts_html
from trainrun.plots.history import History
from trainrun.plots.series import Floats

MOST_CELLS = 40  # classes of a matrix in the page; plots/confusion.png has all
MOST_DOTS = 132  # of the longer side of a sample, about


def confusion_html(history: History) -> str:
    """Return the newest confusion matrix, with recall, precision and the number of samples of each class."""
    rows = history.find_rows("confusion")
    if not rows:
        return ""
    row = rows[-1]
    counts = np.asarray(row["matrix"], dtype=np.float64)
    class_names = row.get("class_names", [])
    names = [str(class_names[i]) if i < len(class_names) else str(i) for i in range(len(counts))]
    totals, hits = counts.sum(axis=1), counts.diagonal()
    recall, precision = (divide_or_nan(hits, counts.sum(axis=axis)) for axis in (1, 0))
    with_cells = len(counts) <= MOST_CELLS
    columns = names if with_cells else []
    head = "".join(f'<th class="up"><span>{escape(name)}</span></th>' for name in columns)
    head = f"<th>true \\ predicted</th><th>recall</th><th>precision</th><th>samples</th>{head}"
    body = ""
    for i, name in enumerate(names):
        numbers = (format_share(recall[i]), format_share(precision[i]), f"{int(totals[i]):,}")
        cells = "".join(f"<td>{number}</td>" for number in numbers)
        for j in range(len(columns)):
            kind = "hit" if i == j else "miss" if counts[i, j] else ""
            share = counts[i, j] / max(totals[i], 1)
            cells += f'<td class="cell {kind}" style="--share:{share:.2f}">{int(counts[i, j]) or ""}</td>'
        body += f"<tr><th><span>{escape(name)}</span></th>{cells}</tr>\n"
    title = f"Confusion matrix of {describe_weights(row)}"
    total = counts.sum()
    split = escape(str(row.get("split", "val")))
    note = f"{split}: {format_share(hits.sum() / max(total, 1))} of {int(total):,} samples are right"
    note += "" if with_cells else "; plots/confusion.png shows the matrix"
    table = f'<div class="wide"><table class="matrix">\n<tr>{head}</tr>\n{body}</table></div>'
    return f"{page.heading(title)}\n{page.paragraph(note)}\n{table}"


def describe_weights(row: Row) -> str:
    """Return which weights made the predictions: `the best checkpoint (step 400)` or `the last step (500)`."""
    step, last = row.get("weights_step", row["step"]), row["step"]
    return f"the last step ({last:,})" if step == last else f"the best checkpoint (step {step:,})"


def divide_or_nan(parts: Floats, totals: Floats) -> Floats:
    """Return parts divided by totals; NaN where the total is 0."""
    return np.divide(parts, totals, out=np.full_like(parts, np.nan), where=totals > 0)


def format_share(share: float) -> str:
    return "" if np.isnan(share) else f"{100 * share:.1f} %"


def regression_html(history: History) -> str:
    """Return charts of predictions against targets and of residuals, two for each output."""
    rows = history.find_rows("regression")
    if not rows:
        return ""
    row = rows[-1]
    charts = []
    several = len(row["target"]) > 1
    for number, (true, predicted) in enumerate(zip(row["target"], row["prediction"], strict=True)):
        target, prediction = (np.asarray(values, dtype=np.float64) for values in (true, predicted))
        order = np.argsort(target, kind="stable")
        target, prediction = target[order], prediction[order]
        ends = target[[0, -1]]
        name = f"output {number}: " if several else ""
        samples = Curve("samples", {"target": target}, prediction, is_dots=True)
        exact = Curve("exact", {"target": ends}, ends)
        residuals = Curve("samples", {"target": target}, prediction - target, is_dots=True)
        none = Curve("exact", {"target": ends}, 0 * ends)
        charts.append(Chart(f"{name}prediction against target", [samples, exact], log=False))
        charts.append(Chart(f"{name}residual (prediction - target)", [residuals, none], log=False))
    return f"{page.heading(f'Predictions of {describe_weights(row)}')}\n{charts_html(charts)}"


@dataclass(frozen=True)
class SamplePredictions:
    """Images (B, 1 or 3, H, W) with classes (B,). The first `num_worst` have the worst predictions."""

    images: npt.NDArray[np.uint8]
    target: npt.NDArray[np.int64]
    prediction: npt.NDArray[np.int64]
    confidence: Floats | None
    class_names: list[str]
    num_worst: int

    @property
    def captions(self) -> list[tuple[str, bool]]:
        """The caption of each sample, and whether the prediction is wrong.

        A caption has the predicted class and its confidence. The caption of a wrong prediction also has the true class.
        """
        captions = []
        for i, (target, prediction) in enumerate(zip(self.target, self.prediction, strict=True)):
            text = self._class_name(prediction)
            text += "" if self.confidence is None else f" {self.confidence[i]:.2f}"
            wrong = bool(target != prediction)
            captions.append((f"{text}, is {self._class_name(target)}" if wrong else text, wrong))
        return captions

    def _class_name(self, number: int) -> str:
        return self.class_names[number] if 0 <= number < len(self.class_names) else str(number)


def read_sample_predictions(run: RunDir) -> SamplePredictions | None:
    """Return the sample predictions of a run; None without any. Raise DataError for a damaged file."""
    if not run.samples.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    damaged = name_damaged_file(run.samples, SafetensorError, ValueError, KeyError)
    with damaged, safe_open(run.samples, framework="numpy") as file:
        about = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        arrays = tensors["images"], tensors["target"], tensors["prediction"], tensors.get("confidence")
        return SamplePredictions(*arrays, json.loads(about["class_names"]), int(about["num_worst"]))


def read_task_pictures(run: RunDir) -> dict[str, tuple[npt.NDArray[np.uint8], list[str]]]:
    """Return the images of the task at the newest validation, with captions, by name. Raise DataError if damaged."""
    if not run.pictures.is_file():
        return {}
    from safetensors import SafetensorError, safe_open

    damaged = name_damaged_file(run.pictures, SafetensorError, ValueError, IndexError)
    with damaged, safe_open(run.pictures, framework="numpy") as file:
        about = file.metadata() or {}
        names = sorted(file.keys())
        return {name: (file.get_tensor(name), json.loads(about.get(name, "[]"))) for name in names}
    return {}


def sample_predictions_html(run: RunDir) -> str:
    """Return the worst and a few random samples with their predictions; "" without any."""
    samples = read_sample_predictions(run)
    if samples is None:
        return ""
    parts = {"Worst samples": slice(samples.num_worst), "Random samples": slice(samples.num_worst, None)}
    return "\n".join(
        page.heading(title) + image_tiles_html(samples.images[part], samples.captions[part])
        for title, part in parts.items()
    )


def task_pictures_html(run: RunDir) -> str:
    """Return the images of the task at the newest validation, under their names."""
    groups = []
    for name, (pictures, texts) in read_task_pictures(run).items():
        captions = [(text, False) for text in texts or [""] * len(pictures)]
        groups.append(f"<h3>{escape(name)}</h3>\n{image_tiles_html(pictures, captions, name.split(' | '))}")
    return "\n".join([page.heading("Pictures of the task"), *groups]) if groups else ""


@contextlib.contextmanager
def name_damaged_file(path: Path, *faults: type[Exception]) -> Iterator[None]:
    """Turn a read error of the block into a DataError that names the file."""
    try:
        yield
    except faults as error:
        raise DataError(f"{path}: cannot be read ({error}); delete it to draw the other plots") from error


def image_tiles_html(
    pictures: npt.NDArray[np.uint8], captions: Sequence[tuple[str, bool]], parts: Sequence[str] = ()
) -> str:
    """Return images (B, 1 or 3, H, W) with captions; True marks a mistake.

    parts: the headings of the sub-images, if each image consists of several side by side.
    """
    step = max(1, min(pictures.shape[2:]) // MOST_DOTS)
    heads = "".join(f"<span>{escape(part)}</span>" for part in parts if len(parts) > 1)
    tiles = ""
    for picture, (text, wrong) in zip(pictures[:, :, ::step, ::step], captions, strict=True):
        image = f'<img alt="{escape(text)}" src="{image_data_url(picture)}">'
        caption = f"<figcaption>{escape(text)}</figcaption>"
        tiles += f"<figure{' class=wrong' * wrong}><div>{heads}</div>{image}{caption}</figure>\n"
    wide = max(min(pictures.shape[3] / pictures.shape[2], max(len(parts), 1)), 1)
    return f'<div class="tiles" style="--wide:{wide:.2f}">\n{tiles}</div>'


def image_data_url(picture: npt.NDArray[np.uint8]) -> str:
    """Return an image, (1 or 3, H, W) uint8, as a PNG in a data URL."""
    file = io.BytesIO()
    pixels = picture[0] if len(picture) == 1 else np.moveaxis(picture, 0, 2)
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
