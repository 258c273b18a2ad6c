import contextlib
import gzip
import io
import json
import tarfile

import numpy as np
import pytest
from approved import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainrun.data.readers.paths import expand_braces
from trainrun.data.readers.records.record import Facts, encode_facts, encode_sample
from trainrun.data.readers.records.webdataset import iterate_members, load
from trainrun.errors import DataError


def png(value: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), (value, 0, 0)).save(out, "PNG")
    return out.getvalue()


def npy(array) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def tar_of(entries, form=tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def pairs(numbers) -> list[tuple[str, bytes]]:
    return [
        item for i in numbers for item in ((f"d/{i:03d}.png", png(i)), (f"d/{i:03d}.cls", str(i).encode()))
    ]


def whole(path, **options):
    return load(str(path), val_fraction=0.0, **options)["train"]


def found_in(tmp_path, content: bytes, begin: int = 0):
    (tmp_path / "x.tar").write_bytes(content)
    return list(iterate_members(tmp_path / "x.tar", begin))


# --- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_every_form_and_one_from_its_place_on(tmp_path, form):
    long = "l" * 60 + "/" + "m" * 90 + ".txt"
    names = ["a.txt", "é.txt", long] + ([] if form == tarfile.USTAR_FORMAT else ["x" * 300 + "/y.txt"])
    content = tar_of([(name, name.encode() * 7) for name in names], form)
    found = found_in(tmp_path, content)
    assert [member.name for member in found] == names
    for member in found:
        assert content[member.offset_data :][: member.size] == member.name.encode() * 7
        assert found_in(tmp_path, content, member.offset)[0].name == member.name


def test_links_and_folders_are_passed_over(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (("d", tarfile.DIRTYPE), ("l", tarfile.SYMTYPE), ("h", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        info = tarfile.TarInfo("a.cls")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"1"))
    assert [member.name for member in found_in(tmp_path, out.getvalue())] == ["a.cls"]


def with_size(field: bytes) -> bytes:
    header = bytearray(tar_of([("a.cls", b"1")], tarfile.USTAR_FORMAT))
    header[124:136] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


@pytest.mark.parametrize(
    "field",
    [b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"\x80" + b"\0" * 5 + b"\x01" + b"\0" * 5, b"-0000000010\0",
     b"00000000019\0", b"77777777777\0"],
    ids=range(6),
)  # fmt: skip
def test_sizes_that_lie_are_refused(tmp_path, field):
    with refused(DataError, "x.tar"):
        found_in(tmp_path, with_size(field))


def test_a_damaged_header_in_the_middle_is_not_the_end(tmp_path):
    content = bytearray(tar_of([("a.cls", b"1"), ("b.cls", b"2")], tarfile.USTAR_FORMAT))
    content[1024 + 5] ^= 1
    with refused(DataError):
        found_in(tmp_path, bytes(content))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_damage_is_a_fault_or_another_archive(tmp_path_factory, data):
    content = bytearray(tar_of([("a" * 120 + ".txt", b"x" * 600), ("b.cls", b"1")], tarfile.PAX_FORMAT))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 3000))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        found_in(tmp_path_factory.getbasetemp(), bytes(content[: data.draw(st.integers(0, len(content)))]))


# --- samples -------------------------------------------------------------------------------------


def test_pictures_and_classes_of_several_shards(tmp_path):
    (tmp_path / "s-08.tar").write_bytes(tar_of(pairs(range(3))))
    (tmp_path / "s-09.tar").write_bytes(tar_of(pairs(range(3, 5))))
    (tmp_path / "meta.json").write_bytes(encode_facts(Facts(5, tuple("abcde"))))
    data = whole(tmp_path / "s-{08..09}.tar")
    assert [data[i][1] for i in range(len(data))] == [0, 1, 2, 3, 4]
    assert data[4][0].shape == (3, 3, 4)
    assert int(data[4][0][0, 0, 0]) == 4
    assert data.describe(3) == f"{tmp_path / 's-09.tar'}, sample 'd/003'"
    assert data.num_classes == 5


def test_every_known_end_is_decoded(tmp_path):
    entries = [("k.txt", "grün".encode()), ("k.json", b'{"a": [1]}'), ("k.x.NPY", npy(np.arange(3)))]
    (tmp_path / "a.tar").write_bytes(tar_of([*entries, ("k.raw", b"\x07"), (".hidden", b""), ("noend", b"")]))
    found = whole(tmp_path / "a.tar")[0]
    assert found["txt"] == "grün"
    assert found["json"] == {"a": [1]}
    assert found["x.npy"].tolist() == [0, 1, 2]
    assert found["raw"].tolist() == [7]
    assert list(found) == ["txt", "json", "x.npy", "raw"]
    assert whole(tmp_path / "a.tar", columns=["txt", "json"])[0] == ("grün", {"a": [1]})


def test_a_whole_sample_is_a_sample(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of([("0.safetensors", encode_sample({"x": np.ones(2), "y": 3}))]))
    found = whole(tmp_path / "a.tar")[0]
    assert found["x"].tolist() == [1, 1]
    assert found["y"] == 3


def test_damaged_content_is_named(tmp_path):
    entries = [("0.npy", npy(np.ones(3))[:-1]), ("1.npy", npy(np.ones(1)).replace(b"(1,)", b"(9,)"))]
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    entries += [("2.npy", pickled.getvalue()), ("3.npy", b"\x93NUMPY\x01\0\xff\xff{")]
    (tmp_path / "a.tar").write_bytes(tar_of(entries))
    data = whole(tmp_path / "a.tar")
    for index in range(4):
        with refused(DataError, "a.tar", f"'{index}'", "npy"):
            data[index]
    entries = [("0.png", png(1)[:40]), ("0.cls", b"1"), ("1.png", png(1)), ("1.cls", b"one")]
    entries += [("2.png", png(1)), ("2.cls", b"9" * 5000)]
    (tmp_path / "b.tar").write_bytes(tar_of(entries))
    data = whole(tmp_path / "b.tar")
    for index, member in enumerate(("png", "cls", "cls")):
        with refused(DataError, "b.tar", f"'{index}'", member):
            data[index]
    (tmp_path / "c.tar").write_bytes(tar_of([("0.json", b"[" * 200_000)]))
    with refused(DataError):
        whole(tmp_path / "c.tar")[0]


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (gzip.compress(tar_of(pairs([1]))), ""),
        (b"", ""),
        (b"text" * 300, ""),
        (tar_of(pairs([1]))[:700], ""),
        (tar_of([("a.cls", b"1"), ("a.cls", b"2")]), "'a'"),
        (tar_of([("noend", b"1")]), ""),
    ],
    ids=range(6),
)
def test_wrong_shards_are_refused(tmp_path, content, key):
    (tmp_path / "a.tar").write_bytes(content)
    with refused(DataError, key):
        whole(tmp_path / "a.tar")


def test_braces():
    assert list(expand_braces("s-{008..011}.tar")) == ["s-008.tar", "s-009.tar", "s-010.tar", "s-011.tar"]
    assert list(expand_braces("{a,b}/{2..1}")) == ["a/2", "a/1", "b/2", "b/1"]
    assert list(expand_braces("plain")) == ["plain"]


def test_facts_that_are_damaged_are_named(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of(pairs([1])))
    (tmp_path / "meta.json").write_text(json.dumps({"class_names": 3}))
    with refused(DataError, "meta.json"):
        whole(tmp_path / "a.tar")
