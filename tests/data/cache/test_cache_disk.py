import errno
import os
import pickle
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_sources import RAGGED, SAMPLES, AtOnce, Made, child, reads_in, same

from trainrun.data.cache.cached import cached
from trainrun.data.cache.disk import draft_of, read_header
from trainrun.data.cache.fingerprint import own_fingerprint
from trainrun.data.cache.probe import NUM_PROBES
from trainrun.data.columns import columns_of
from trainrun.errors import DataError


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


def on_disk(source, folder, **more):
    return cached(source, f"disk:{folder}", "data.train", **more)


def files_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def the_file(folder):
    (path,) = Path(folder).glob("*.cache")
    return path


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("threads", [1, 3])
def test_samples_are_equal_to_the_sources(kind, threads, tmp_path):
    source = Made(kind)
    for _ in range(2):
        kept = on_disk(source, tmp_path / "c", num_threads=threads)
        assert kept.num_kept() == 40
        assert all(same(kept[index], source[index % 40]) for index in (*range(40), -3))
        assert all(same(a, source[b]) for a, b in zip(kept.__getitems__([4, 4, 39]), [4, 4, 39], strict=True))
    assert len(files_in(tmp_path / "c")) == 1


@pytest.mark.parametrize("kind", ["pair", "tokens"])
def test_it_is_decoded_once(kind, tmp_path, log):
    seen = []
    kept = on_disk(
        AtOnce(kind, log=log), tmp_path / "c", progress=lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (40, 40)
    assert "(built)" in kept.note
    counts = reads_in(log)
    again = on_disk(
        AtOnce(kind, log=log), tmp_path / "c", progress=lambda done, total: pytest.fail("built again")
    )
    assert "(found)" in again.note
    again.prefill()
    assert all(same(again[index], SAMPLES[kind](index)) for index in range(40))
    probes = sum(reads_in(log).values()) - sum(counts.values())
    assert probes == 10  # the look at a few samples
    assert all(count <= 5 for count in reads_in(log).values())


@pytest.mark.parametrize("kind", ["pair", "tokens"])
def test_a_copy_opens_the_file_anew(kind, tmp_path, log):
    kept = on_disk(Made(kind, log=log), tmp_path / "c")
    text = pickle.dumps(kept)
    assert len(text) < 3000
    counts = reads_in(log)
    other = pickle.loads(text)
    assert all(same(other[index], SAMPLES[kind](index)) for index in range(40))
    assert reads_in(log) == counts
    the_file(tmp_path / "c").unlink()
    assert same(kept[3], SAMPLES[kind](3))  # still open
    with pytest.raises(DataError, match="is gone or damaged"):
        pickle.loads(text)


def test_a_finished_cache_is_columns(tmp_path):
    kept = on_disk(Made("pair"), tmp_path)
    columns = columns_of(kept, "data.train")
    assert torch.equal(columns.values[0], torch.stack([SAMPLES["pair"](i)[0] for i in range(40)]))
    assert columns.values[1].tolist() == [i % 5 for i in range(40)]
    content = the_file(tmp_path).read_bytes()
    columns.values[0].zero_()
    assert the_file(tmp_path).read_bytes() == content
    assert on_disk(Made("tokens"), tmp_path).as_columns() is None


# --- another source, another file -------------------------------------------------------------------


def test_a_changed_source_is_built_anew(tmp_path):
    on_disk(Made(), tmp_path)
    for changed in (Made(shift=1), Made(num_samples=41), Made("named")):
        kept = on_disk(changed, tmp_path)
        assert "(built)" in kept.note
        assert all(same(kept[index], changed[index]) for index in range(40))
    assert len(files_in(tmp_path)) == 4


def test_a_source_that_says_nothing_new_but_decodes_otherwise_is_built_anew(tmp_path):
    class Silent(Made):
        def fingerprint(self):
            return "always"

    on_disk(Silent(), tmp_path)
    kept = on_disk(Silent(shift=1), tmp_path)
    assert same(kept[2], Made(shift=1)[2])


class Plain:
    """Has no fingerprint of its own."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


def test_attributes_tell_sources_apart(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"1")
    scale = 2
    makes = [
        lambda: Plain(),
        lambda: Plain(a=1),
        lambda: Plain(a=1.0),
        lambda: Plain(b=1),
        lambda: Plain(a="1"),
        lambda: Plain(a=[1, 2]),
        lambda: Plain(a=[2, 1]),
        lambda: Plain(a={"x": {1, 2}}),
        lambda: Plain(a=np.arange(3)),
        lambda: Plain(a=torch.arange(3)),
        lambda: Plain(a=torch.arange(1, 4)),
        lambda: Plain(a=Plain(b=1)),
        lambda: Plain(a=lambda x: x + 1),
        lambda: Plain(a=lambda x: x + 2),
        lambda: Plain(a=lambda x: x * scale),
        lambda: Plain(a=str(file)),
        lambda: Plain(a=b"1"),
    ]
    prints = [own_fingerprint(make()) for make in makes]
    assert prints == [own_fingerprint(make()) for make in makes]
    assert len(set(prints)) == len(prints)
    file.write_bytes(b"22")
    assert own_fingerprint(Plain(a=str(file))) not in prints
    circle = Plain()
    circle.me = circle
    assert own_fingerprint(circle) == own_fingerprint(circle)


def test_open_handles_do_not_count():
    class Handled(Plain):
        def __getstate__(self):
            return {"path": "x"}

    assert own_fingerprint(Handled(handle=1)) == own_fingerprint(Handled(handle=2))


# --- damage -----------------------------------------------------------------------------------------


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def cut_short(path):
    os.truncate(path, 10)


def overwrite(position):
    def damage(path):
        with path.open("r+b") as file:
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 255]))

    return damage


@pytest.mark.parametrize("kind", ["pair", "tokens"])
@pytest.mark.parametrize(
    ("damage", "story"),
    [
        (cut, "was cut"),
        (cut_short, "was cut"),
        (overwrite(3), "damaged header"),
        (overwrite(20), "damaged header"),
        (overwrite(34), "damaged header"),
        (overwrite(60), "damaged header"),
        (overwrite(4100), "damaged data"),
        (overwrite(4096 + 320 + 30), "damaged data"),
    ],
)
def test_damage_is_found_and_mended(damage, story, kind, tmp_path):
    on_disk(Made(kind), tmp_path)
    content = the_file(tmp_path).read_bytes()
    damage(the_file(tmp_path))
    kept = on_disk(Made(kind), tmp_path)
    assert (
        f"(built, as the old one {'has a ' if 'header' in story else 'has ' if 'data' in story else ''}{story})"
        in kept.note
    )
    assert all(same(kept[index], SAMPLES[kind](index)) for index in range(40))
    assert the_file(tmp_path).read_bytes() == content


def test_a_file_under_the_wrong_name_is_not_taken(tmp_path):
    on_disk(Made(), tmp_path)
    wrong = the_file(tmp_path)
    content = wrong.read_bytes()
    wrong.unlink()
    on_disk(Made(shift=1), tmp_path)
    the_file(tmp_path).write_bytes(content)
    assert "belongs to other data" in on_disk(Made(shift=1), tmp_path).note
    assert read_header(tmp_path / "nothing", "x") is None


def test_a_cut_while_it_is_read(tmp_path):
    kept = on_disk(Made("tokens"), tmp_path)
    cut_short(the_file(tmp_path))
    with pytest.raises(DataError, match="was cut while it was read"):
        kept[39]


# --- places that cannot be written -------------------------------------------------------------------


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match=f"data.cache=disk:{folder}: data.train: cannot write to"):
            on_disk(Made(), folder)


FULL = """
import resource, sys
from cache_sources import Made
from trainrun.data.cache.cached import cached
from trainrun.errors import DataError
resource.setrlimit(resource.RLIMIT_FSIZE, (CAP, CAP))
try:
    cached(Made(KIND, 3000), "disk:" + sys.argv[1], "data.train", num_threads=2)
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize(("kind", "limit"), [("pair", 40_000), ("tokens", 200_000)])
def test_a_full_disk_names_the_key_and_leaves_nothing(kind, limit, tmp_path):
    script = FULL.replace("CAP", str(limit)).replace("KIND", repr(kind))
    out = subprocess.run([*child(script), str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert out.startswith(
        f"data.cache=disk:{tmp_path}: data.train: no room for the cache ({os.strerror(errno.EFBIG)})"
    )
    assert "data.cache=pool:<size>" in out
    assert files_in(tmp_path) == []


def test_a_disk_with_too_little_room_is_not_filled_first(tmp_path, log):
    source = Made("tensor", 10**12, log=log)
    with pytest.raises(DataError, match="no room for the cache .too little is free.: it needs about 2"):
        on_disk(source, tmp_path / "c")
    assert sum(reads_in(log).values()) == 10
    assert files_in(tmp_path / "c") == []


# --- several processes --------------------------------------------------------------------------------

UNPROBED = 40  # of 60 samples; read by the builder alone

BUILD = """
import sys
from cache_sources import Made, SAMPLES, same
from trainrun.data.cache.cached import cached
source = Made("tokens", 60, log=sys.argv[2], delay=float(sys.argv[3]), hangs=int(sys.argv[4]))
kept = cached(source, "disk:" + sys.argv[1], "data.train")
assert all(same(kept[index], SAMPLES["tokens"](index)) for index in range(60))
print(kept.note)
"""


@pytest.fixture
def builder():
    """Starts processes that build; none of them outlives the test."""
    started = []

    def start(folder, log, delay=0.0, hangs=-1):
        arguments = [*child(BUILD), str(folder), str(log), str(delay), str(hangs)]
        started.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until(happened):
    deadline = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_processes_build_one_file(tmp_path, log, builder):
    processes = [builder(tmp_path / "c", log, 0.02) for _ in range(2)]
    notes = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("(built)" in note for note in notes) == 1
    assert len(files_in(tmp_path / "c")) == 1
    assert reads_in(log)[UNPROBED] == 1


def test_what_a_killed_builder_left_is_taken_over(tmp_path, log, builder):
    folder = tmp_path / "c"
    process = builder(folder, log, hangs=UNPROBED)
    waiting = builder(folder, log, hangs=UNPROBED)
    wait_until(lambda: UNPROBED in reads_in(log))
    assert any("unfinished" in name for name in files_in(folder))
    for one in (process, waiting):
        one.send_signal(signal.SIGKILL)
        one.communicate()
    assert [name for name in files_in(folder) if not name.endswith(".unfinished")] == []
    kept = on_disk(Made("tokens", 60), folder)
    assert "(built)" in kept.note
    assert all(same(kept[index], SAMPLES["tokens"](index)) for index in range(60))
    assert len(files_in(folder)) == 1


def test_who_waits_goes_on_when_the_builder_is_killed(tmp_path, log, builder):
    folder, others_log = tmp_path / "c", tmp_path / "other"
    others_log.mkdir()
    first = builder(folder, log, hangs=UNPROBED)
    wait_until(lambda: UNPROBED in reads_in(log))
    second = builder(folder, others_log)
    wait_until(lambda: len(reads_in(others_log)) >= NUM_PROBES)
    time.sleep(0.5)  # until it waits
    assert len(reads_in(others_log)) == NUM_PROBES
    first.send_signal(signal.SIGKILL)
    first.communicate()
    note = second.communicate(timeout=300)[0]
    assert second.returncode == 0
    assert "(built)" in note
    assert len(files_in(folder)) == 1


def test_a_failed_builder_leaves_nothing(tmp_path):
    class Stops(Made):
        def __getitem__(self, index):
            if index == 21:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        on_disk(Stops(), tmp_path)
    assert files_in(tmp_path) == []


def test_both_layouts_are_there(tmp_path):
    ragged = {kind for kind in SAMPLES if not on_disk(Made(kind), tmp_path).slots.layout.starts}
    assert ragged == set(RAGGED)


def test_who_waited_for_a_builder_that_failed_does_not_write_to_its_lost_file(tmp_path):
    path, sound = tmp_path / "x.cache", []

    def wait():
        with draft_of(path) as opened:
            sound.append(opened is None or os.path.samestat(os.fstat(opened[0]), os.stat(opened[1])))

    with draft_of(path):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        assert sound == []
    thread.join()
    assert sound == [True]
    assert files_in(tmp_path) == []
