"""A cache on disk is built once, by one process, is sound or built again, and is that of its source alone."""

import errno
import os
import pickle
import resource
import shutil
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from approved import refused
from cache_sources import SAMPLES, AtOnce, Made, in_child, reads_in, same

from trainrun.data.cache import fingerprint
from trainrun.data.cache.cached import open_cache
from trainrun.data.cache.fingerprint import fingerprint_source
from trainrun.data.cache.probe import NUM_PROBES
from trainrun.errors import DataError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("read_here")]


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def on_disk(source, folder, **more):
    return open_cache(source, f"disk:{folder}", "data.train", **more)


def files_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def the_folder(folder):
    (path,) = Path(folder).iterdir()
    return path


def the_file(folder):
    return the_folder(folder) / "leaf.0.npy"


@pytest.mark.parametrize("kind", ["pair", "tokens"])
def test_it_is_decoded_once(kind, tmp_path, log):
    kept = on_disk(AtOnce(kind, log=log), tmp_path / "c")
    assert "(built)" in kept.note
    counts = reads_in(log)
    again = on_disk(AtOnce(kind, log=log), tmp_path / "c")
    assert "(found)" in again.note
    assert all(same(again[index], SAMPLES[kind](index)) for index in range(40))
    assert sum(reads_in(log).values()) - sum(counts.values()) == 2 * NUM_PROBES


@pytest.mark.parametrize("kind", ["pair", "tokens"])
def test_a_copy_opens_the_file_again(kind, tmp_path, log):
    kept = on_disk(Made(kind, log=log), tmp_path / "c")
    text = pickle.dumps(kept)
    assert len(text) < 3000
    counts = reads_in(log)
    other = pickle.loads(text)
    assert all(same(other[index], SAMPLES[kind](index)) for index in range(40))
    assert reads_in(log) == counts
    shutil.rmtree(the_folder(tmp_path / "c"))
    assert same(kept[3], SAMPLES[kind](3))  # still open
    with refused(DataError):
        pickle.loads(text)


# --- another source, another file -------------------------------------------------------------------


class Silent(Made):
    def fingerprint(self):
        return "always"


@pytest.mark.parametrize("root", [Path("pictures"), ["./pictures"] * 3, "pictures"])
def test_a_file_below_a_folder_that_the_source_names_is_seen(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "pictures" / "cats" / "1.bin"
    inside.parent.mkdir(parents=True)
    inside.write_bytes(b"1")
    (tmp_path / "pictures" / "again").symlink_to(tmp_path / "pictures")

    def story():
        source = Plain(root=root, kind="none")
        return open_cache(source, "disk:pictures/kept", "data.train", said.append).note.split(" (")[1]

    said = []
    assert [story(), story()] == ["built)", "found)"]  # the cache lies below it, too
    times = inside.stat().st_atime_ns, inside.stat().st_mtime_ns
    inside.write_bytes(b"2")
    os.utime(inside, ns=times)
    assert [story(), story(), said] == ["built)", "found)", []]
    monkeypatch.setattr(fingerprint, "MOST_FILES", 1)
    story()
    assert "has more than 1 files" in said[0]


def test_what_runs_write_builds_no_cache_again(tmp_path, monkeypatch):
    project, said = tmp_path / "project", []
    (project / "train" / "data").mkdir(parents=True)
    monkeypatch.chdir(project)
    makes = [
        lambda: Plain(root=project),
        lambda: Plain(root=project.parent),
        lambda: Plain(root=project / "train"),
        lambda: Plain(word="train"),  # which may be the folder
    ]
    prints = [fingerprint_source(make(), say=said.append) for make in makes]
    for run in ("outputs/1", "outputs/2", "data/__pycache__"):
        (project / "train" / run).mkdir(parents=True)
        (project / "train" / run / "RUN.json").touch()
    (project / "train" / "outputs" / "2" / "metrics.jsonl").touch()
    assert prints == [fingerprint_source(make()) for make in makes]
    assert [line.partition(" holds the working directory")[0] for line in said] == [
        str(project),
        str(tmp_path),
    ]
    fingerprint_source(Plain(root=project / "train" / "outputs"), say=said.append)
    assert "outputs holds runs alone, so a change inside one of its files is not seen" in said[2]
    (project / "train" / "data" / "1.bin").touch()
    again = [fingerprint_source(make()) for make in makes]
    assert [a == b for a, b in zip(prints, again, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        (Made(), Made(shift=1)),
        (Made(), Made(num_samples=41)),
        (Made(), Made("named")),
        (Silent(), Silent(shift=1)),  # says nothing new, but decodes otherwise
    ],
)
def test_a_changed_source_is_built_again(source, changed, tmp_path):
    on_disk(source, tmp_path)
    kept = on_disk(changed, tmp_path)
    assert "(built)" in kept.note
    assert all(same(kept[index], changed[index]) for index in range(len(changed)))
    assert len(files_in(tmp_path)) == 2


class Plain:
    """Has no fingerprint of its own."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


class Other(Plain):
    def __getitem__(self, index):
        return index + 0


def test_attributes_and_code_tell_sources_apart(tmp_path):
    file, scale = tmp_path / "a.bin", 2
    file.write_bytes(b"1")
    makes = [
        lambda: Plain(),
        lambda: Other(),
        lambda: Plain(a=1),
        lambda: Plain(a=1.0),
        lambda: Plain(b=1),
        lambda: Plain(a="1"),
        lambda: Plain(a=b"1"),
        lambda: Plain(a=[1, 2]),
        lambda: Plain(a=[2, 1]),
        lambda: Plain(a={"x": {1, 2}}),
        lambda: Plain(a=np.arange(3)),
        lambda: Plain(a=torch.arange(3)),
        lambda: Plain(a=torch.arange(1, 4)),
        lambda: Plain(a=Plain(b=1)),
        lambda: Plain(a=threading.Lock()),
        lambda: Plain(a=Plain),
        lambda: Plain(a=Plain().__getitem__),
        lambda: Plain(a=lambda x: x + 1),
        lambda: Plain(a=lambda x: x + 2),
        lambda: Plain(a=lambda x: x * scale),
        lambda: Plain(a=lambda x: x in {"left", "right"}),
        lambda: Plain(a=str(file)),
        lambda: Plain(a=file),
    ]
    prints = [fingerprint_source(make()) for make in makes]
    assert prints == [fingerprint_source(make()) for make in makes]
    assert len(set(prints)) == len(prints)
    file.write_bytes(b"22")
    assert fingerprint_source(Plain(a=str(file))) not in prints
    circle = Plain()
    circle.me = circle
    assert fingerprint_source(circle) == fingerprint_source(circle)
    assert fingerprint_source(Plain(a="ab", b="ab")) == fingerprint_source(Plain(a="ab", b="".join("ab")))


NAMED = """
import functools
import named_helper

SCALE, CLASSES, UNUSED = 1, {"cat": 0}, 0

def scale(x):
    return x * SCALE

@functools.lru_cache
def look_up(name):
    return CLASSES[name]

class Part:
    def read(self):
        return "part", named_helper.double(1)

class Source:
    @staticmethod
    def decode(x):
        return x + 0

    @property
    def offset(self):
        return 5

    def __getitem__(self, index):
        return self.decode(scale(index)) + (lambda: look_up("cat"))() + self.offset, Part().read()
"""


HELPER = "def double(x): return 2 * x"


def fingerprint_of_module(changed, path, monkeypatch):
    for name, text in (("named_helper", HELPER), ("named_source", NAMED)):
        module = types.ModuleType(name)
        module.__file__ = str(path / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(text.replace(*changed), module.__file__, "exec"), vars(module))
    return fingerprint_source(module.Source())


@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("SCALE, CLASSES, UNUSED = 1", "SCALE, CLASSES, UNUSED = 2", True),
        ('"cat": 0', '"cat": 1', True),
        ("x * SCALE", "x / SCALE", True),
        ("CLASSES[name]", "CLASSES[name] + 1", True),
        ('return "part"', 'return "other"', True),
        ("2 * x", "3 * x", True),
        ("x + 0", "x + 1", True),
        ("return 5", "return 6", True),
        ('{"cat": 0}, 0', '{"cat": 0}, 1', False),
        ("import functools", "import functools\n\n# a comment", False),
    ],
)
def test_code_and_values_that_a_method_names_count(old, new, differs, tmp_path, monkeypatch):
    before = fingerprint_of_module(("", ""), tmp_path, monkeypatch)
    after = fingerprint_of_module((old, new), tmp_path, monkeypatch)
    assert old in NAMED + HELPER
    assert (before != after) == differs


# --- damage -----------------------------------------------------------------------------------------


def cut(size):
    return lambda path: os.truncate(path, size if size > 0 else path.stat().st_size + size)


def overwrite(position):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[position] ^= 255
        path.write_bytes(content)

    return damage


@pytest.mark.parametrize("kind", ["pair", "tokens"])
@pytest.mark.parametrize("damage", [cut(-1), cut(10), *map(overwrite, (0, 20, 130, -1))])
def test_damage_is_found_and_mended(damage, kind, tmp_path):
    on_disk(Made(kind), tmp_path)
    content = the_file(tmp_path).read_bytes()
    damage(the_file(tmp_path))
    lines = []
    kept = on_disk(Made(kind), tmp_path, say=lines.append)
    assert kept.note.endswith("(built)")
    assert "stored again" in lines[0]
    assert all(same(kept[index], SAMPLES[kind](index)) for index in range(40))
    assert the_file(tmp_path).read_bytes() == content


def test_a_cut_while_it_is_read(tmp_path):
    kept = on_disk(Made("tokens"), tmp_path)
    cut(200)(the_file(tmp_path))
    with refused(DataError):
        kept[39]


# --- places that cannot be written -------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "limit"), [("pair", 20_000), ("tokens", 200_000)])
def test_a_full_disk_names_the_key_and_leaves_nothing(kind, limit, tmp_path):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(DataError) as caught:
            on_disk(Made(kind, 3000), tmp_path)
        return str(caught.value)

    told = in_child(work)
    where = f"data.cache=disk:{tmp_path}: data.train"
    assert told.startswith(f"{where}: no room for the cache in {tmp_path} ({os.strerror(errno.EFBIG)})")
    assert "data.cache=pool:<size>" in told
    assert files_in(tmp_path) == []


def test_a_failed_builder_leaves_nothing(tmp_path):
    class Stops(Made):
        def __getitem__(self, index):
            if index == 21:
                os._exit(1)
            return super().__getitem__(index)

    with pytest.raises(DataError):
        on_disk(Stops(), tmp_path)
    assert files_in(tmp_path) == []
