"""Every option of every group is built and trains two steps."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

import trainrun as package
from trainrun.config import conf_dir, groups, options
from trainrun.data.fashion_mnist import find_folder
from trainrun.errors import DataError

QUIET = ["trainer.max_steps=2", "trainer.limit_val_batches=1"]
EVERY_OPTION = [
    (group, option)
    for group in groups([conf_dir()])
    for option in options(group, [conf_dir()])
    if option != "custom" and (group, option) != ("parallel", "ddp")  # test_own_code.py, test_main_job.py
]


def needed_words(group: str, option: str, workdir: Path) -> list[str]:
    """What an option cannot do without."""
    if (group, option) == ("task", "regression"):
        return ["data=synthetic", "data.num_classes=null", "data.shape=[8]", "model.num_classes=1"]
    if (group, option) == ("data", "arrays"):
        random = numpy.random.default_rng(0)
        arrays = {f"x_{split}": random.random((64, 8)) for split in ("train", "val")}
        arrays |= {f"y_{split}": random.integers(0, 3, 64) for split in ("train", "val")}
        numpy.savez(workdir / "arrays.npz", **arrays)
        return ["data.path=arrays.npz"]
    return []


@pytest.mark.parametrize(("group", "option"), EVERY_OPTION, ids=[f"{g}={o}" for g, o in EVERY_OPTION])
def test_every_option_is_built_and_trains(workdir: Path, group: str, option: str) -> None:
    if option == "fashion_mnist":
        try:
            find_folder(None)
        except DataError as error:
            pytest.skip(str(error))
    quiet = QUIET if group == "monitor" else [*QUIET, "monitor.plots=false", "monitor.progress_bar=false"]
    run = package.train(f"{group}={option}", *quiet, *needed_words(group, option, workdir))
    assert run.status["state"] == "done"
    assert run.status["step"] == 2
    assert run.status["reason"] == "trainer.max_steps=2 reached"
