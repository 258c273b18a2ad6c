"""Which pictures a run gets, and what is on them."""

from __future__ import annotations

import json
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
from trainrun.plots.run_curves import (
    GAP,
    WRONG,
    draw_charts,
    draw_confusion_matrix,
    draw_run_plots,
    hardware_charts,
    latent_charts,
    run_charts,
    sample_image_grids,
    shorten_middle,
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
    paths = draw_run_plots(run)
    assert sorted(paths) == sorted(run.plots / name for name in ALL)
    assert sorted(path.name for path in run.plots.iterdir()) == sorted(ALL)  # no temporary file is left
    for path in paths:
        width, height = size_of(path)
        assert 150 <= width <= 1300
        assert 150 <= height <= 1300
        assert path.stat().st_size > 500
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
    assert len(draw_run_plots(run)) == 6


def test_loss_shows_values_the_best_step_and_resumes(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with run.metrics.open("a") as file:
        for step in (50, 70, 70):
            facts = {"name": "x", "steps_per_epoch": 10}
            file.write(json.dumps({"kind": "start", "step": step, "facts": facts}) + "\n")
    history = read_history(run)
    ax = draw_charts("loss", run_charts(history)["loss"], history).axes[0]
    assert texts_of(ax) == ["train", "val", "best val/acc 0.98 (step 100)", "resumed"]
    raw, val, best, *resumes = ax.get_lines()
    assert list(raw.get_xdata()) == list(range(2, 101, 2))
    assert list(raw.get_ydata()) == [1000.0 / step**1.5 for step in range(2, 101, 2)]
    assert raw.get_alpha() == 1.0
    assert list(val.get_xdata()) == list(range(10, 101, 10))
    assert list(best.get_xdata()) == [100, 100]
    assert [list(line.get_xdata()) for line in resumes] == [[50, 50], [70, 70]]
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
    curves = {chart.title: len(chart.curves) for chart in hardware_charts(read_history(run))}
    assert curves == {
        "memory (GiB)": 10,
        "load (%)": 9,
        "power (W)": 8,
        "temperature (°C)": 8,
        "throttled": 1,
        "disk (MiB/s)": 1,
    }


def test_a_latent_code_has_kl_and_activity_by_dimension_the_largest_kl_first(open_run: OpenRun) -> None:
    run, file = open_run
    for step, kl in ((1, [0.0, 0.1]), (2, [0.5, 3.0])):
        row = {"kl": sum(kl), "beta": 0.5, "mutual_information": 0.1, "marginal_kl": 0.2, "active_units": 1}
        file.write({"kind": "vae", "step": step, "kl_of_dimensions": kl, "activity": [0.001, 0.9], **row})
    file.close()
    charts = {chart.title: chart for chart in latent_charts(read_history(run))}
    assert charts["KL by dimension"].curves[0].values.tolist() == [3.0, 0.5]
    assert charts["activity by dimension"].curves[0].values.tolist() == [0.9, 0.001]
    ways = charts["KL of the largest dimensions"].curves
    assert [(curve.name, curve.values.tolist()) for curve in ways] == [
        ("dimension 1", [0.1, 3.0]), ("dimension 0", [0.0, 0.5]),
    ]  # fmt: skip
    assert (run.plots / "latents.png") in draw_run_plots(run)


def test_confusion_is_normalised_by_row_and_says_the_accuracy(make_run: Any, tmp_path: Path) -> None:
    picture = draw_confusion_matrix(read_history(make_run(tmp_path / "run")))
    assert picture is not None
    ax = picture.axes[0]
    np.testing.assert_allclose(ax.get_images()[0].get_array(), [[5 / 6, 1 / 6], [0, 1]])
    cells = {(int(text.get_position()[0]), int(text.get_position()[1])): text.get_text() for text in ax.texts}
    assert cells == {(0, 0): "5", (1, 0): "1", (1, 1): "4"}  # x is the prediction; an empty cell says nothing
    assert ax.get_title() == "val accuracy 90.0 % of 10 samples\nthe best checkpoint (step 80)"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("predicted", "true")
    assert [label.get_text() for label in ax.get_yticklabels()] == ["cat", "$dog_"]


def test_wrong_predictions_have_a_red_frame_on_the_board(make_run: Any, tmp_path: Path) -> None:
    pixels = np.asarray(sample_image_grids(make_run(tmp_path / "run"))["predictions.png"])
    high, wide = 8 * 12, 6 * 12  # twelve pixels for each of a sample
    assert pixels.shape == (2 * (high + GAP) + GAP, 2 * (wide + GAP) + GAP, 3)
    first = pixels[GAP : GAP + high, GAP : GAP + wide]
    assert (first[::12, ::12, 0] == np.arange(48).reshape(8, 6)).all()
    red = (pixels == WRONG).all(axis=2)
    assert red[GAP - 1, GAP]
    assert not red[:, GAP + wide + GAP // 2 :].any()  # the second and the third are right


def test_long_names_keep_what_differs() -> None:
    names = [f"a quite long class name of species {number}" for number in range(30)]
    assert len(set(map(shorten_middle, names))) == 30
    assert shorten_middle("cat") == "cat"


def test_a_damaged_samples_file_is_named(make_run: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.samples.write_bytes(b"not safetensors")
    with refused(DataError, "samples.safetensors"):
        draw_run_plots(run)
