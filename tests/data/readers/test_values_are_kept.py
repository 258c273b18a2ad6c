"""Values keep their identity: 16 bits of a picture, and whole numbers that float32 cannot tell apart."""

from __future__ import annotations

import io
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from approved import refused
from PIL import Image

from trainrun.data import batch
from trainrun.data.batch import Preparation, convert_numbers, mask_changed_integers
from trainrun.data.readers.pictures.decode import PictureForm, decode_16_bits, decode_picture
from trainrun.data.readers.pictures.image_folder import load as load_pictures
from trainrun.data.readers.tables.csv_files import load as load_csv
from trainrun.data.readers.tables.parquet import load as load_parquet
from trainrun.data.sequences.collate import stack_samples
from trainrun.errors import DataError

pytestmark = pytest.mark.usefixtures("read_here")

COLORS = {1: 0, 3: 2, 2: 4, 4: 6}  # PNG's number of a kind of pixels, by their channels


def png_of(values: np.ndarray[Any, Any], filters: bool = True) -> bytes:
    """A PNG file of 16 bits a channel, (H, W, C); its lines use all filters of the format in turn."""
    height, width, channels = values.shape
    step, lines = 2 * channels, values.astype(">u2").view(np.uint8).reshape(height, -1).astype(int)
    before, content = np.zeros_like(lines[0]), b""
    for number, line in enumerate(lines):
        left = np.concatenate([np.zeros(step, int), line[:-step]])
        corner = np.concatenate([np.zeros(step, int), before[:-step]])
        kind = number % 5 if filters else 0
        estimate = left + before - corner
        far = [abs(estimate - part) for part in (left, before, corner)]
        paeth = np.where(
            (far[0] <= far[1]) & (far[0] <= far[2]), left, np.where(far[1] <= far[2], before, corner)
        )
        guess = [0, left, before, (left + before) // 2, paeth][kind]
        content += bytes([kind]) + ((line - guess) % 256).astype(np.uint8).tobytes()
        before = line
    out = io.BytesIO()
    out.write(b"\x89PNG\r\n\x1a\n")
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, COLORS[channels], 0, 0, 0])
    for kind_of_chunk, data in ((b"IHDR", header), (b"IDAT", zlib.compress(content)), (b"IEND", b"")):
        checksum = zlib.crc32(kind_of_chunk + data).to_bytes(4, "big")
        out.write(len(data).to_bytes(4, "big") + kind_of_chunk + data + checksum)
    return out.getvalue()


def values_of(channels: int, height: int = 7, width: int = 5, largest: int = 65536) -> np.ndarray[Any, Any]:
    return np.random.default_rng(channels).integers(0, largest, (height, width, channels), np.uint16)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_all_16_bits_of_every_kind_of_pixel_are_read(channels: int) -> None:
    values = values_of(channels)
    content = png_of(values)
    assert np.array_equal(decode_16_bits(content), values)
    found = PictureForm(None, dtype="float32").decode(content)
    colors = values[..., [0] * 3] if channels < 3 else values[..., :3]
    expected = torch.from_numpy(colors.astype(np.float32)).movedim(2, 0) / 65535
    assert torch.equal(found, expected)


def test_a_picture_that_pillow_wrote_and_one_of_a_single_grey() -> None:
    values = values_of(1)[..., 0]
    out = io.BytesIO()
    Image.fromarray(values).save(out, "PNG")
    found = PictureForm((1, 7, 5), dtype="float32").decode(out.getvalue())
    assert torch.equal(found[0], torch.from_numpy(values.astype(np.float32)) / 65535)
    small = PictureForm((1, 3, 3), "stretch", "float32").decode(png_of(np.full((7, 5, 1), 200, np.uint16)))
    assert torch.allclose(small, torch.tensor(200 / 65535))
    grey = PictureForm((1, 7, 5), dtype="float32").decode(png_of(np.full((7, 5, 3), 300, np.uint16)))
    assert torch.allclose(grey, torch.tensor(300 / 65535))


def test_a_folder_of_dark_16_bit_pictures_keeps_them_apart(tmp_path: Path) -> None:
    for name, level in (("a", 10), ("b", 250)):
        (tmp_path / name).mkdir()
        for number in range(3):
            content = png_of(np.full((4, 4, 1), level + number, np.uint16))
            (tmp_path / name / f"{number}.png").write_bytes(content)
    source = load_pictures(str(tmp_path), shape=(1, 4, 4), dtype="float32", val_fraction=0)["train"]
    assert source.find_byte_pictures() is None, "bytes would hold half of them"
    assert source.read_batch([0, 1]) is None
    found = sorted(float(source[index][0].mean()) * 65535 for index in range(6))
    assert found == pytest.approx([10, 11, 12, 250, 251, 252])


def test_a_16_bit_picture_among_8_bit_ones_is_refused_by_name() -> None:
    form = PictureForm((1, 4, 4), only_bytes=True)
    with refused(DataError, "x.png", "data.train.dtype=uint8"):
        decode_picture(png_of(values_of(1, 4, 4)), form, lambda: "x.png", np.empty((1, 4, 4), np.uint8))


@pytest.mark.parametrize("size", [20, 60, 90])
def test_a_damaged_16_bit_picture_is_a_fault_of_its_file(size: int) -> None:
    content = png_of(values_of(3))[:size]
    with refused(DataError, "x.png"):
        decode_picture(content, PictureForm(None, dtype="float32"), lambda: "x.png")


IDS = 2**24 + np.arange(71)


def test_ids_in_a_table_are_refused_where_float32_makes_them_one(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("id,label\n" + "".join(f"{number},{number % 2}\n" for number in IDS))
    words: dict[str, Any] = {"path": str(table), "target": "label", "val_fraction": 0.0}
    with refused(DataError, "data.train.dtype=int64"):
        load_csv(**words)["train"]
    kept = load_csv(**words, dtype="int64")["train"]
    assert np.unique(np.asarray(kept.tensors[0])).tolist() == IDS.tolist()


def test_ids_in_a_parquet_table_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": IDS, "label": IDS % 2}), tmp_path / "t.parquet")
    with refused(DataError, "data.train.dtype=int64"):
        load_parquet(str(tmp_path / "t.parquet"), target="label", val_fraction=0.0)["train"]


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ([1.0, 2.0**24], False),
        ([2.0**24 + 1, 3.0], True),
        ([2.0**24 + 1, 0.5], False),  # a measurement
        ([-(2.0**24) - 1, np.nan], True),
        ([1e20 + 2**20, 3e20], False),
        ([[0.5, 2.0**24 + 1], [0.25, 3.0]], True),
        ([2**24 + 1, 5], True),
        ([2**24 + 2, -(2**63)], False),
        (np.array([2**64 - 1], np.uint64), True),
        ([], False),
    ],
)
def test_which_numbers_count_as_whole(values: Any, changed: bool) -> None:
    wide = np.asarray(values)
    assert bool(mask_changed_integers(wide, wide.astype(np.float32)).any()) == changed


@pytest.mark.parametrize("as_batch", [False, True])
def test_ids_in_arrays_of_doubles_are_told_once(
    as_batch: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch, "_told", set())
    preparation, ids = Preparation(), torch.from_numpy(IDS).double()
    with caplog.at_level(logging.WARNING):
        for values in (ids / 2**10, ids, ids):
            found = (
                preparation.convert_batch((values, 0))[0] if as_batch else preparation.convert_column(values)
            )
            assert found.dtype is torch.float32
    assert len(caplog.records) == 1
    assert "16777217" in caplog.text


def test_whole_numbers_stay_whole_in_lists_and_in_64_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch, "_told", set())
    assert convert_numbers(IDS.tolist()).tolist() == IDS.tolist()
    assert torch.equal(
        Preparation(torch.float64).convert_column(torch.from_numpy(IDS).double()).long(),
        torch.from_numpy(IDS),
    )
    assert Preparation(torch.float64).convert_batch(stack_samples([([0.1],), ([1],)]))[0].tolist() == [
        [0.1],
        [1.0],
    ]
    assert not caplog.records
    Preparation().convert_batch(convert_numbers([2**24 + 1, 0.0]))
    assert "16777217" in caplog.text
