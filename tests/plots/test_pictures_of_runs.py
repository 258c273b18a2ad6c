"""Which pictures a run gets, and what is on them."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import matplotlib.colors
import numpy as np
from approved import refused

from trainrun.errors import DataError
from trainrun.folder.run_folder import RunDir
from trainrun.monitor.bus import Bus
from trainrun.plots.history import read_history
from trainrun.plots.prediction_grids import confusion_picture, predictions_picture
from trainrun.plots.run_curves import (
    draw_run,
    loss_picture,
    memory_picture,
)

ALL = [
    "loss.png",
    "metrics.png",
    "lr.png",
    "throughput.png",
    "memory.png",
    "time.png",
    "confusion.png",
    "predictions.png",
]
OpenRun = tuple[RunDir, Bus]


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def texts_of(ax: Any) -> list[str]:
    legend = ax.get_legend()
    shown = [text.get_text() for text in ax.texts]
    return shown + ([text.get_text() for text in legend.get_texts()] if legend else [])


def test_a_whole_run_has_all_pictures(make_run: Any, tmp_path: Path) -> None:
    before = str(dict(matplotlib.rcParams))
    run = make_run(tmp_path / "run")
    paths = draw_run(run)
    assert sorted(paths) == sorted(run.plots / name for name in ALL)
    assert sorted(path.name for path in run.plots.iterdir()) == sorted(ALL)  # no temporary file is left
    for path in paths:
        width, height = size_of(path)
        assert 300 <= width <= 1300
        assert 250 <= height <= 1300
        assert path.stat().st_size > 5000
    assert str(dict(matplotlib.rcParams)) == before  # a user's own plots look as they did


def test_a_single_point_and_values_that_are_not_finite_can_be_drawn(open_run: OpenRun) -> None:
    run, file = open_run
    row = {
        "train/loss": math.nan,
        "lr": 0.0,
        "samples_per_second": math.inf,
        "step_seconds": 0.0,
        "grad_norm": math.inf,
    }
    file.on_step(1, 0.1, row)
    file.on_eval(1, 0.1, {"val/loss": math.inf, "val/acc": math.nan})
    file.write({"kind": "hardware", "step": 0, "memory_bytes": 12})
    file.write(
        {"kind": "confusion", "step": 1, "split": "val", "class_names": [], "matrix": [[0, 0], [0, 0]]}
    )
    file.close()
    assert len(draw_run(run)) == 6


def test_loss_shows_values_the_best_step_and_resumes(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with run.metrics.open("a") as file:
        file.write('{"kind": "start", "step": 50, "facts": {"name": "x", "steps_per_epoch": 10}}\n')
    picture = loss_picture(read_history(run), 5)
    assert picture is not None
    ax = picture.axes[0]
    assert texts_of(ax) == ["train", "val", "best val/acc 0.98 (step 100)", "resumed"]
    raw, val, best, resumed = ax.get_lines()
    assert list(raw.get_xdata()) == list(range(2, 101, 2))
    assert list(raw.get_ydata()) == [1000.0 / step**1.5 for step in range(2, 101, 2)]
    assert raw.get_alpha() == 1.0
    assert list(val.get_xdata()) == list(range(10, 101, 10))
    assert list(best.get_xdata()) == [100, 100]
    assert list(resumed.get_xdata()) == [50, 50]
    assert ax.get_yscale() == "log"
    assert ax.get_xlabel() == "step (10 an epoch)"


def test_every_gpu_and_rank_has_its_curve(open_run: OpenRun) -> None:
    run, file = open_run
    row = {"memory_bytes": 2**30, "rank0_memory_bytes": 2**29, "rank0_cpu_percent": 90.0, "gpu_percent": 10.0}
    sensors = {"percent": 10.0, "memory_bytes": 2**29, "watts": 300.0, "celsius": 60.0, "throttled": 0}
    row |= {f"gpu{number}_{name}": value for number in range(8) for name, value in sensors.items()}
    row |= {"gpu9_throttled": 1, "disk_read_bytes_per_second": 2**21}
    for step in (1, 2):
        file.write({"kind": "hardware", "step": step, **row})
    file.close()
    picture = memory_picture(read_history(run))
    assert picture is not None
    curves = {ax.get_ylabel(): len(ax.get_lines()) for ax in picture.axes}
    assert curves == {
        "memory (GiB)": 10,
        "load (%)": 9,
        "power (W)": 8,
        "temperature (°C)": 8,
        "throttled": 1,
        "disk (MiB/s)": 1,
    }


def test_confusion_is_normalised_by_row_and_says_the_accuracy(make_run: Any, tmp_path: Path) -> None:
    picture = confusion_picture(read_history(make_run(tmp_path / "run")))
    assert picture is not None
    ax = picture.axes[0]
    np.testing.assert_allclose(ax.get_images()[0].get_array(), [[5 / 6, 1 / 6], [0, 1]])
    cells = {(int(text.get_position()[0]), int(text.get_position()[1])): text.get_text() for text in ax.texts}
    assert cells == {(0, 0): "5", (1, 0): "1", (1, 1): "4"}  # x is the prediction; an empty cell says nothing
    assert ax.get_title() == "val accuracy 90.0 % of 10 samples (step 100)"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("predicted", "true")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cat", "$dog_"]


def test_wrong_predictions_are_red_and_right_ones_are_not(make_run: Any, tmp_path: Path) -> None:
    picture = predictions_picture(make_run(tmp_path / "run"))
    assert picture is not None
    ax = picture.axes[0]
    titles = {text.get_text(): text.get_color() for text in ax.texts}
    assert titles == {"cat (cat)": "#333333", "cat ($dog_)": "#C00000", "$dog_ ($dog_)": "#333333"}
    assert picture.get_suptitle() == "predicted (true): 1 of 3 wrong"
    (image,) = ax.get_images()
    board = np.asarray(image.get_array())
    (red,) = [frame for frame in ax.patches if matplotlib.colors.to_hex(frame.get_edgecolor()) == "#c00000"]
    assert (red.get_width(), red.get_height()) == (6, 8)
    assert red.get_x() > board.shape[1] / 2  # the second of two columns
    left, top = round(red.get_x() + 0.5), round(red.get_y() + 0.5)
    shown = np.linspace(0, 1, 3 * 8 * 6, dtype=np.float32).reshape(3, 8, 6)[1]  # as `write_run` kept it
    assert (board[top : top + 8, left : left + 6, 0] == (255 * shown).round()).all()


def test_a_damaged_samples_file_is_named(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.samples.write_bytes(b"not safetensors")
    with refused(DataError, "samples.safetensors"):
        draw_run(run)
