"""From the section `data` to data sets: what the task says of targets that may be classes or numbers."""

import pytest
import torch
from approved import refused
from PIL import Image

from trainrun.assemble.data_pipeline import build_sources
from trainrun.config.compose import compose_run
from trainrun.errors import DataError


@pytest.fixture
def table(tmp_path):
    rows = [f"{i}.5,{i % 3},{'cat' if i % 2 else 'dog'}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["a,price,kind", *rows]) + "\n")
    return ["data=csv", f"data.path={tmp_path}/t.csv", "data.train.inputs=[a]"]


def targets(words):
    sources, _ = build_sources(compose_run(words).config, [])
    return [sources[name].tensors[1] for name in ("train", "val")]


def test_whole_numbers_are_real_ones_in_a_regression(table):
    for target in targets([*table, "data.train.target=price", "task=regression", "model.num_classes=1"]):
        assert target.dtype is torch.float32
        assert target.shape[1:] == (1,)
    for target in targets([*table, "data.train.target=price"]):
        assert target.dtype is torch.int64
        assert target.ndim == 1


def test_a_type_that_was_asked_for_stays(table):
    words = [*table, "data.train.target=price", "task=regression", "model.num_classes=1"]
    assert {target.dtype for target in targets([*words, "data.train.target_dtype=int64"])} == {torch.int64}
    assert {target.dtype for target in targets([*words, "data.train.target_dtype=float64"])} == {
        torch.float64
    }


def test_words_are_no_target_of_a_regression(table):
    with refused(DataError, "'dog'"):
        targets([*table, "data.train.target=kind", "task=regression", "model.num_classes=1"])


def test_pictures_that_are_left_out_are_told(tmp_path):
    for i in range(4):
        folder = tmp_path / "cat" if i % 2 else tmp_path / "dog"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(folder / f"{i}.png")
        Image.new("RGB", (4, 4)).save(folder / f"{i}.bmp")
    notes: list[str] = []
    words = ["data=image_folder", f"data.path={tmp_path}", "data.train.val_fraction=0.5"]
    build_sources(compose_run(words).config, notes)
    assert notes == ["data.train: 4 pictures are no JPEG or PNG and are left out, as cat/1.bmp"]
