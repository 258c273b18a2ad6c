"""Pictures that are bytes until the batch is on the device: the numbers are those of the data set, bit for bit."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, default_collate

from trainrun.data.facts import describe_source
from trainrun.data.pipeline import open_batches
from trainrun.data.readers.pictures import image_folder
from trainrun.data.scale import Scale, ScaledBatches
from trainrun.data.stream_options import StreamOptions
from trainrun.data.tensor_dataset import Arrays

pytestmark = pytest.mark.usefixtures("read_here")

N = 22
ENGINES = {
    "main": {"engine": "workers", "num_workers": 0},
    "workers": {"engine": "workers", "num_workers": 2},
    "threads": {"engine": "threads", "num_threads": 3},
    "cache": {"engine": "auto", "num_workers": 0, "cache": "memory"},
    "pool": {"engine": "workers", "num_workers": 0, "cache": "pool:6kB"},
}


class Plain:
    """Hides that a data set could give bytes."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source[index]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for index in range(N):
        place = root / "ab"[index % 2]
        place.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(place / f"{index}.png")
    return str(root)


def pictures(folder, **words):
    return image_folder.load(folder, val_fraction=0.0, shape=[3, 8, 8], dtype="float32", **words)["train"]


def arrays():
    images = torch.randint(
        0, 256, (N, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Arrays((images, torch.arange(N)), scale=Scale(0.286, 0.353))


def floats_of(source):
    numbers = (source.tensors[0].float() / 255 - source.scale.mean) / source.scale.std
    return Arrays((numbers, source.tensors[1]))


def opened(source, **changes):
    options = {"training": True, "batch_size": 4, "seed": 3, "engine": "workers", "num_workers": 0} | changes
    return open_batches(source, StreamOptions("data.train", **options))[0]


def epochs(source, **changes):
    stream = opened(source, **changes)
    try:
        return [batch for epoch in range(3) for batch in stream.epoch(epoch)]
    finally:
        stream.close()


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert type(one.data) is type(other.data) is tuple
        for a, b in zip(one.data, other.data, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        assert torch.equal(one.indices, other.indices)


@pytest.mark.process
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("training", [True, False])
def test_a_folder_gives_the_same_numbers_through_every_engine(name, training, folder):
    expected = epochs(Plain(pictures(folder)), training=training)
    assert expected[0].data[0].dtype is torch.float32
    assert_same(expected, epochs(pictures(folder), training=training, **ENGINES[name]))


@pytest.mark.process
@pytest.mark.parametrize("changes", [{"engine": "resident"}, {"num_workers": 1}, {"engine": "threads"}])
def test_arrays_give_the_same_numbers_through_every_engine(changes):
    assert_same(epochs(floats_of(arrays())), epochs(arrays(), **changes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_in_the_type_of_the_run(dtype, folder):
    expected = epochs(Plain(pictures(folder)), float_dtype=dtype)
    assert expected[0].data[0].dtype is dtype
    assert_same(expected, epochs(pictures(folder), float_dtype=dtype))


@pytest.mark.process
def test_what_is_kept_and_sent_is_bytes(folder):
    for source in (pictures(folder), arrays()):
        stream = opened(source)
        assert isinstance(stream._batches, ScaledBatches)
        assert next(stream._batches._batches.epoch(0)).data[0].dtype is torch.uint8
    assert (
        next(opened(pictures(folder), cache="memory")._batches._batches.epoch(0)).data[0].dtype is torch.uint8
    )


def doubled(sample):
    assert sample[0].dtype is torch.float32
    return sample[0] * 2, sample[1]


def stacked(samples):
    assert all(sample[0].dtype is torch.float32 for sample in samples)
    return tuple(default_collate(samples))


@pytest.mark.process
@pytest.mark.parametrize("changes", [{"transform": doubled}, {"collate_fn": stacked}])
@pytest.mark.parametrize("cache", ["none", "memory"])
def test_code_of_the_users_sees_the_numbers(changes, cache, folder):
    assert_same(epochs(Plain(pictures(folder)), **changes), epochs(pictures(folder), cache=cache, **changes))
    assert_same(epochs(floats_of(arrays()), **changes), epochs(arrays(), cache=cache, **changes))
    if cache == "memory" and "transform" in changes:
        kept = opened(pictures(folder), cache=cache, **changes)
        assert not isinstance(kept._batches, ScaledBatches)
    transformed = StreamOptions("data.train", True, 1, 0, transform=doubled)
    assert describe_source(arrays(), options=transformed).shape == (1, 4, 4)
    assert describe_source(pictures(folder), options=transformed).shape == (3, 8, 8)


def test_a_part_of_it_and_bytes_that_were_asked_for(folder):
    part = Subset(pictures(folder), [5, 3, 8, 1])
    assert isinstance(opened(part)._batches, ScaledBatches)
    assert_same(epochs(Plain(part)), epochs(part))
    whole = image_folder.load(folder, val_fraction=0.0, shape=[3, 8, 8], dtype="uint8")["train"]
    assert not isinstance(opened(whole), ScaledBatches)
    assert epochs(whole)[0].data[0].dtype is torch.uint8
