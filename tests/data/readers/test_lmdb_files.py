import lmdb
import numpy as np
import pytest
from approved import refused

from trainrun.data.readers.records.lmdb_file import build_key, load
from trainrun.data.readers.records.record import META_KEY, Facts, encode_facts, encode_sample
from trainrun.errors import DataError


def write(path, values, subdir=False) -> None:
    with (
        lmdb.open(str(path), subdir=subdir, map_size=2**24, lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in values.items():
            transaction.put(key, value)


def samples(number: int, facts: bool = True, start: int = 0) -> dict[bytes, bytes]:
    found = {build_key(i): encode_sample((np.full(3, i + start, np.uint8), i + start)) for i in range(number)}
    return found | ({META_KEY: encode_facts(Facts(number, ("a", "b")))} if facts else {})


def whole(path):
    return load(str(path), val_fraction=0.0)["train"]


@pytest.mark.parametrize("subdir", [True, False], ids=["folder", "file"])
def test_samples_by_number(tmp_path, subdir):
    write(tmp_path / "a.lmdb", samples(12), subdir)
    data = whole(tmp_path / "a.lmdb")
    assert [data[i][1] for i in range(len(data))] == list(range(12))
    assert data[11][0].tolist() == [11, 11, 11]
    assert (data.class_names, data.num_classes) == (("a", "b"), 2)
    assert data.describe(3).endswith("key b'00000003'")


def test_any_keys_count_in_their_order_where_nothing_is_said(tmp_path):
    import io

    from PIL import Image

    npy, png = io.BytesIO(), io.BytesIO()
    np.save(npy, np.arange(3.0))
    Image.new("RGB", (5, 4), (1, 2, 3)).save(png, "PNG")
    write(tmp_path / "a.lmdb", {b"zebra": npy.getvalue(), b"ape": png.getvalue(), b"bad": b"\x80\x04pickle"})
    data = whole(tmp_path / "a.lmdb")
    assert data[0].shape == (3, 4, 5)
    assert data[2].tolist() == [0, 1, 2]
    with refused(DataError):
        data[1]


def test_parts_of_one_file_or_a_file_each(tmp_path):
    write(tmp_path / "all.lmdb", samples(20))
    train, val = (load(str(tmp_path / "all.lmdb"), val_fraction=0.2)[split] for split in ("train", "val"))
    labels = [[part[i][1] for i in range(len(part))] for part in (train, val)]
    assert sorted(labels[0] + labels[1]) == list(range(20))
    assert len(labels[1]) == 4
    write(tmp_path / "train.lmdb", samples(3))
    write(tmp_path / "val.lmdb", samples(2, start=50))
    train, val = (load(str(tmp_path))[split] for split in ("train", "val"))
    assert [len(train), len(val), val[0][1]] == [3, 2, 50]
    assert load(str(tmp_path))["test"] is None


def test_damage_is_named(tmp_path):
    write(tmp_path / "a.lmdb", samples(200))
    content = (tmp_path / "a.lmdb").read_bytes()
    (tmp_path / "cut.lmdb").write_bytes(content[: 3 * 4096])
    with refused(DataError, "cut.lmdb"):
        whole(tmp_path / "cut.lmdb")
    (tmp_path / "text.lmdb").write_bytes(b"no pages here" * 1000)
    with refused(DataError, "text.lmdb"):
        whole(tmp_path / "text.lmdb")
    write(tmp_path / "short.lmdb", samples(3) | {META_KEY: encode_facts(Facts(4))})
    with refused(DataError, "short.lmdb"):
        whole(tmp_path / "short.lmdb")
    write(tmp_path / "meta.lmdb", {META_KEY: b"[]"})
    with refused(DataError, "meta.lmdb"):
        whole(tmp_path / "meta.lmdb")
    write(tmp_path / "one.lmdb", {b"0": encode_sample(np.ones(9))[:-8]})
    with refused(DataError, "one.lmdb"):
        whole(tmp_path / "one.lmdb")[0]


def test_places_that_are_none(tmp_path):
    with refused(DataError, "data.path"):
        load(None)["train"]
    with refused(DataError):
        whole(tmp_path / "none.lmdb")
    with refused(DataError, "data.mdb"):
        whole(tmp_path)
    write(tmp_path / "empty.lmdb", {})
    with refused(DataError):
        whole(tmp_path / "empty.lmdb")
