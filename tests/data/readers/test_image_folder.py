"""Folders of pictures: what is read, in which form, and what is refused."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
import torch
from approved import refused
from PIL import Image
from torch.utils.data import default_collate

from trainrun.data.batch import Preparation
from trainrun.data.engines.batch_reader import BatchReader, BatchRequest, SampleSteps
from trainrun.data.readers.pictures.decode import PictureForm
from trainrun.data.readers.pictures.image_folder import load
from trainrun.errors import DataError

COLOURS = {"cat": (200, 30, 60), "dog": (10, 220, 90)}


def picture(size=(12, 8), colour=(200, 30, 60), mode="RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def bytes_of(image: Image.Image, kind="PNG", **options) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def written(root, per_class=5, names=("cat", "dog"), ending="png"):
    for name in names:
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            picture(colour=COLOURS.get(name, (i, i, i))).save(root / name / f"{i}.{ending}")
    return root


def gradient(width, height) -> Image.Image:
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 2], -1).astype(np.uint8))


def fault(path, split="train", **arguments) -> str:
    with pytest.raises(DataError) as caught:
        load(str(path), **arguments)[split][0]
    return str(caught.value)


def test_a_folder_for_each_class(tmp_path):
    (written(tmp_path) / "notes.txt").write_text("not a picture")
    (tmp_path / "cat" / "deep").mkdir()
    picture(colour=(1, 2, 3)).save(tmp_path / "cat" / "deep" / "x.PNG")
    train, val = (load(str(tmp_path), val_fraction=0.2)[split] for split in ("train", "val"))
    assert (train.class_names, train.num_classes) == (("cat", "dog"), 2)
    assert sorted(int(train[i][1]) for i in range(len(train))) == [0] * 5 + [1] * 4
    assert sorted(int(val[i][1]) for i in range(len(val))) == [0, 1]
    files = [source.describe(i) for source in (train, val) for i in range(len(source))]
    assert len(set(files)) == 11
    assert str(tmp_path / "cat" / "deep" / "x.PNG") in files
    image, label = train[len(train) - 1]
    assert (image.dtype, image.shape, label.dtype) == (torch.uint8, (3, 8, 12), torch.int64)
    assert image[:, 3, 3].tolist() == list(COLOURS["dog"])


def test_folders_for_train_val_and_test(tmp_path):
    written(tmp_path / "train", names=("cat", "dog", "zebra"))
    written(tmp_path / "val", per_class=2, names=("dog",))
    written(tmp_path / "test", per_class=1)
    assert len(load(str(tmp_path))["train"]) == 15
    val = load(str(tmp_path))["val"]
    assert [int(val[i][1]) for i in range(len(val))] == [1, 1], "numbered as in the training data"
    assert val.num_classes == 3
    assert len(load(str(tmp_path))["test"]) == 2
    other = written(tmp_path / "other", per_class=3)
    assert len(load(str(tmp_path), val_path=str(other))["val"]) == 6
    written(tmp_path / "cows", names=("cow",))
    message = fault(tmp_path, "val", val_path=str(tmp_path / "cows"))
    assert "0.png: its class is 'cow', which is no class of the training data" in message


@pytest.mark.parametrize(("train", "val"), [("train", "valid"), ("train", "dev"), ("training", "validation")])
def test_other_names_of_the_parts(tmp_path, train, val):
    written(tmp_path / train)
    written(tmp_path / val, per_class=2)
    for split, count in (("train", 10), ("val", 4)):
        source = load(str(tmp_path))[split]
        assert (len(source), source.class_names) == (count, ("cat", "dog"))


def test_a_class_is_the_same_in_both_forms_of_unicode(tmp_path):
    written(tmp_path / "train", names=("chat", normalize("NFC", "été")))
    written(tmp_path / "val", names=("chat", normalize("NFD", "été")))
    assert load(str(tmp_path))["val"].labels.tolist() == [0] * 5 + [1] * 5


def test_folders_of_parts_are_no_classes(tmp_path):
    written(tmp_path / "Training")
    written(tmp_path / "Testing")
    train, test = (load(str(tmp_path), val_fraction=0.0)[split] for split in ("train", "test"))
    assert train.class_names == test.class_names == ("cat", "dog")


def test_a_table_of_labels(tmp_path):
    for i in range(10):
        picture(colour=(i, 0, 0)).save(tmp_path / f"{i}.png")
    table = tmp_path / "labels.csv"
    table.write_text("file,label,more\n" + "".join(f"{i}.png,{'ab'[i % 2]},-\n" for i in range(10)))
    train = load(str(tmp_path), labels="labels.csv", val_fraction=0.2)["train"]
    assert train.class_names == ("a", "b")
    assert len(train) == 8
    for image, label in (train[i] for i in range(8)):
        assert int(image[0, 0, 0]) % 2 == int(label)
    table.write_text("file,label\n" + "".join(f"{i}.png,{i / 2}\n" for i in range(10)))
    assert load(str(tmp_path), labels="labels.csv", val_fraction=0.2)["train"][0][1].shape == (1,)
    table.write_text("file,label\n0.png,a\n77.png,b\n")
    assert "labels.csv line 3: there is no file" in fault(tmp_path, labels="labels.csv")
    table.write_text("0.png,a\n1.png,b\n")
    assert "its first line must name the columns" in fault(tmp_path, labels="labels.csv")
    table.write_text("file,label\n0.png,\n")
    assert "labels.csv line 2: the label is missing" in fault(tmp_path, labels="labels.csv")
    assert "data.train.labels=none.csv: no such file in" in fault(tmp_path, labels="none.csv")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_every_picture_has_the_shape_that_is_asked_for(channels, kind):
    for image in (gradient(40, 30), gradient(30, 40).convert("L"), gradient(16, 16), gradient(7, 5)):
        for fit in ("crop", "stretch"):
            pixels = PictureForm((channels, 16, 16), fit).decode(bytes_of(image, kind))
            assert (pixels.shape, pixels.dtype) == ((channels, 16, 16), torch.uint8)
            assert pixels.is_contiguous()


def test_crop_keeps_the_proportion_and_the_middle_and_stretch_keeps_all():
    content = bytes_of(gradient(64, 32))
    crop, stretch = (
        PictureForm((3, 16, 16), fit).decode(content)[0, 8].float() for fit in ("crop", "stretch")
    )
    assert (crop[0], crop[-1]) == pytest.approx((255 / 4, 255 * 3 / 4), abs=4)
    assert (stretch[0], stretch[-1]) == pytest.approx((0, 255), abs=10)


def test_pixels_are_those_of_the_file_and_floats_are_scaled():
    image = gradient(9, 5)
    content = bytes_of(image)
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(PictureForm().decode(content), expected)
    assert torch.equal(PictureForm((3, 5, 9)).decode(content), expected)
    assert torch.equal(PictureForm(dtype="float32").decode(content), expected / 255)


@pytest.mark.parametrize("shape", [[3, 8, 12], [1, 5, 5]])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_whole_batch_has_the_bits_of_collated_samples(tmp_path, shape, dtype):
    source = load(str(written(tmp_path)), shape=shape, dtype=dtype, val_fraction=0.0)["train"]
    recipe = SampleSteps(Preparation(), seed=0, key="data.train")
    key = BatchRequest(0, [3, 0, 7, 3], True, False)
    whole = BatchReader(source, recipe).read(key)
    one_by_one = BatchReader(source, replace(recipe, collate=default_collate)).read(key)
    assert source.read_batch(key.indices) is not None
    assert type(whole.data) is tuple
    for a, b in zip(whole.data, one_by_one.data, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert a.is_contiguous()
    assert whole[1:] == one_by_one[1:]


def test_a_damaged_picture_of_a_whole_batch_is_named_and_can_be_skipped(tmp_path):
    source = load(str(written(tmp_path)), shape=[3, 8, 12], val_fraction=0.0)["train"]
    bad = source.describe(4)
    Path(bad).write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    recipe, key = (
        SampleSteps(Preparation(), seed=0, key="data.train"),
        BatchRequest(0, [3, 4, 5], True, False),
    )
    with refused(DataError, bad):
        BatchReader(source, recipe).read(key)
    found = BatchReader(source, replace(recipe, skips=True)).read(key)
    assert found.indices == [3, 5]
    assert len(found.data[0]) == 2
    assert bad in found.faults[0]


@pytest.mark.parametrize("fit", ["crop", "stretch"])
@pytest.mark.parametrize("size", [(512, 512), (700, 400)])
def test_a_large_jpeg_decoded_at_a_part_of_its_size_differs_little(fit, size):
    content = bytes_of(gradient(*size), "JPEG", quality=95)
    fast, slow = (PictureForm((3, 32, 32), fit, draft=draft).decode(content) for draft in (True, False))
    assert not torch.equal(fast, slow)
    assert (fast.int() - slow.int()).abs().max() <= 4
    near = bytes_of(gradient(60, 60), "JPEG")
    same = [PictureForm((3, 32, 32), draft=draft).decode(near) for draft in (True, False)]
    assert torch.equal(*same), "less than twice the size: decoded whole"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("shape", [None, (3, 10, 14)])
def test_pictures_stand_upright(orientation, kind, shape):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    content = bytes_of(gradient(28, 20), kind, exif=exif.tobytes())
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    got = PictureForm(shape, "stretch", draft=False).decode(content)
    if shape is not None:
        upright = upright.resize((14, 10), Image.Resampling.BILINEAR)
    difference = got.int() - torch.from_numpy(np.array(upright)).permute(2, 0, 1).int()
    assert difference.abs().max() <= 1


def test_other_modes():
    wide = Image.fromarray((np.arange(64).reshape(8, 8) * 1000).astype(np.uint16))
    assert torch.equal(
        PictureForm((1, 8, 8)).decode(bytes_of(wide))[0], torch.arange(64).reshape(8, 8) * 1000 // 256
    )
    clear = picture(colour=(9, 8, 7, 0), mode="RGBA")
    assert PictureForm().decode(bytes_of(clear))[:, 0, 0].tolist() == [9, 8, 7]
    palette = gradient(8, 8).quantize(4)
    expected = torch.from_numpy(np.array(palette.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(PictureForm().decode(bytes_of(palette)), expected)
    inks = Image.new("CMYK", (8, 8), (0, 0, 0, 0))
    assert PictureForm().decode(bytes_of(inks, "JPEG")).min() > 250


def test_damaged_pictures_name_the_file(tmp_path):
    written(tmp_path)
    file = tmp_path / "cat" / "0.png"
    whole = bytes_of(gradient(64, 64), "JPEG")
    for content, message in (
        (b"", "not a JPEG or PNG picture"),
        (b"hello", "not a JPEG or PNG picture"),
        (bytes_of(gradient(64, 64), "GIF"), "not a JPEG or PNG picture"),
        (whole[: len(whole) // 2], "damaged or cut short"),
        (bytes_of(gradient(64, 64))[:200], "damaged or cut short"),
    ):
        file.write_bytes(content)
        assert fault(tmp_path, val_path=str(tmp_path)).startswith(f"{file}: {message}")
    source = load(str(tmp_path), val_path=str(tmp_path))["train"]
    file.unlink()
    with refused(DataError, str(file)):
        source[0]


def test_wrong_folders_and_words(tmp_path):
    assert "data.path=/no/where: no such folder" in fault("/no/where")
    assert "no folders with pictures in it; put pictures into a folder per class" in fault(tmp_path)
    (tmp_path / "cat").mkdir()
    assert "/cat has no picture (.jpg, .jpeg, .png)" in fault(tmp_path)
    assert "data.shape=[8]: of pictures it is [3,height,width]" in fault(tmp_path, shape=[8])
    assert "data.shape=[2, 8, 8]" in fault(tmp_path, shape=[2, 8, 8])


def test_the_fingerprint_follows_files_and_form(tmp_path):
    def printed(**arguments):
        return load(str(tmp_path), **arguments)["train"].fingerprint()

    written(tmp_path)
    first = printed()
    assert first == printed() == pickle.loads(pickle.dumps(load(str(tmp_path))["train"])).fingerprint()
    assert first != printed(shape=[3, 4, 4])
    assert first != printed(seed=1)
    picture((30, 30)).save(tmp_path / "cat" / "0.png")
    picture((30, 30)).save(tmp_path / "cat" / "1.png")
    assert first != printed()
