import struct

import numpy as np
import pytest
from approved import refused

from trainrun.data.readers.records.record import Facts, encode_facts, encode_sample
from trainrun.data.readers.records.tfrecord import (
    compute_masked_crc,
    encode_example,
    frame_record,
    load,
    parse_example,
)
from trainrun.errors import DataError


def write(path, contents) -> None:
    path.write_bytes(b"".join(frame_record(content) for content in contents))


def samples(number: int, start: int = 0) -> list[bytes]:
    return [
        encode_example({"sample": encode_sample((np.full((2,), i, np.float32), i))})
        for i in range(start, start + number)
    ]


def whole(path, **options):
    return load(str(path), val_fraction=0.0, **options)["train"]


# --- checksums and protobuf ---------------------------------------------------------------------


def test_a_record_is_framed_as_tensorflow_does():
    assert frame_record(b"") == bytes.fromhex("000000000000000029039807d8ea82a2")


def test_examples_are_parsed():
    content = encode_example({"a": np.array([1, -1]), "b": [b"xy"], "c": np.array([0.5])})
    found = parse_example(content)
    assert list(found) == ["a", "b", "c"]
    assert found["a"].tolist() == [1, -1]
    assert found["b"] == [b"xy"]
    assert (found["c"].dtype, found["c"].tolist()) == (np.float32, [0.5])


@pytest.mark.parametrize(
    "content", [b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xff" * 20, b"\x0b", b"\x0a\x05ab"]
)
def test_lengths_that_lie_are_refused(content):
    with refused(ValueError):
        parse_example(content)


# --- files ---------------------------------------------------------------------------------------


def test_samples_of_several_files_in_order(tmp_path):
    write(tmp_path / "a-0.tfrecord", samples(3))
    write(tmp_path / "a-1.tfrecord", samples(2, start=3))
    (tmp_path / "meta.json").write_bytes(encode_facts(Facts(5, ("x", "y"))))
    data = whole(tmp_path / "a-{0..1}.tfrecord")
    assert [label for _, label in (data[i] for i in range(len(data)))] == [0, 1, 2, 3, 4]
    assert data[4][0].tolist() == [4, 4]
    assert data.class_names == ("x", "y")
    assert data.num_classes == 2
    assert data.describe(4).startswith(f"{tmp_path / 'a-1.tfrecord'}, record 1 at byte ")


def test_named_features_become_tuples_or_dicts(tmp_path):
    features = {
        "x": np.array([0.5, 1.5]),
        "label": np.array([3]),
        "tokens": np.array([7]),
        "raw": b"\x01\x02",
    }
    write(tmp_path / "a.tfrecord", [encode_example(features)])
    x, label = whole(tmp_path / "a.tfrecord", columns=["x", "label"])[0]
    assert (x.tolist(), label.shape, int(label)) == ([0.5, 1.5], (), 3)
    found = whole(tmp_path / "a.tfrecord", sequences=["tokens"])[0]
    assert list(found) == ["label", "raw", "tokens", "x"]
    assert found["tokens"].tolist() == [7]
    assert found["raw"].tolist() == [1, 2]
    with refused(DataError):
        whole(tmp_path / "a.tfrecord", columns=["y"])[0]


@pytest.mark.parametrize("cut", [1, 4, 20, -10])
def test_a_file_that_is_cut_short_is_refused(tmp_path, cut):
    write(tmp_path / "a.tfrecord", samples(2))
    content = (tmp_path / "a.tfrecord").read_bytes()
    (tmp_path / "a.tfrecord").write_bytes(content[:cut])
    with refused(DataError, "a.tfrecord"):
        whole(tmp_path / "a.tfrecord")


def test_a_huge_length_with_a_right_checksum_is_refused(tmp_path):
    length = struct.pack("<Q", 2**63)
    content = length + compute_masked_crc(length) + b"\0" * 8
    (tmp_path / "a.tfrecord").write_bytes(content)
    with refused(DataError):
        whole(tmp_path / "a.tfrecord")


def test_checksums_are_verified(tmp_path):
    write(tmp_path / "a.tfrecord", samples(2))
    content = bytearray(frame_record(encode_example({"x": np.ones(2)})))
    content[-6] ^= 1
    (tmp_path / "b.tfrecord").write_bytes(content)
    with refused(DataError, "b.tfrecord"):
        whole(tmp_path / "b.tfrecord")[0]
    assert whole(tmp_path / "a.tfrecord")[1][1] == 1


def test_compressed_and_empty_and_missing_files(tmp_path):
    import gzip

    (tmp_path / "a.tfrecord").write_bytes(gzip.compress(frame_record(b"x")))
    with refused(DataError):
        whole(tmp_path / "a.tfrecord")
    (tmp_path / "b.tfrecord").write_bytes(b"")
    with refused(DataError):
        whole(tmp_path / "b.tfrecord")
    (tmp_path / "a-1.tfrecord").write_bytes(b"")
    with refused(DataError):
        whole(tmp_path / "a-{0..2}.tfrecord")
    with refused(DataError):
        whole(tmp_path / "a-{0..9999999}.tfrecord")
    with refused(DataError, "data.path"):
        load(None)["train"]


def test_a_file_that_shrinks_is_named(tmp_path):
    write(tmp_path / "a.tfrecord", samples(2))
    data = whole(tmp_path / "a.tfrecord")
    (tmp_path / "a.tfrecord").write_bytes(b"")
    with refused(DataError, "a.tfrecord"):
        data[1]
