"""What all formats share: processes and threads of any kind, missing extras, parts and patterns."""

from __future__ import annotations

import multiprocessing
import os
import sys

import numpy as np
import pytest
import torch
from approved import refused

from trainrun.data.readers.arrays import hdf5
from trainrun.data.readers.open_files import ProcessLocalCache
from trainrun.data.readers.parts import divide_rows
from trainrun.data.readers.tables import parquet
from trainrun.errors import DataError

# --- what is kept in a process ------------------------------------------------------------------


def test_the_least_recently_used_value_is_dropped_and_closed():
    made, closed = [], []
    kept = ProcessLocalCache(lambda key: made.append(key) or key, 2, close=closed.append)
    for key in (1, 2, 1, 3, 1, 2):
        assert kept[key] == key
    assert (made, closed) == ([1, 2, 3, 2], [2, 3])


def owner_in_child(kept, queue) -> None:
    queue.put((kept[0], os.getpid()))


@pytest.mark.process
@pytest.mark.parametrize("per_thread", [True, False])
def test_a_forked_child_makes_its_own_values(per_thread):
    kept = ProcessLocalCache(lambda key: os.getpid(), 4, per_thread)
    assert kept[0] == os.getpid()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=owner_in_child, args=(kept, queue))
    child.start()
    value, owner = queue.get(timeout=60)
    child.join(60)
    assert value == owner != os.getpid()


# --- extras, parts, places ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "load", "file", "message"),
    [
        (
            "pyarrow",
            parquet.load,
            "a.parquet",
            "data=parquet or data=datasets needs pyarrow: pip install 'trainrun[parquet]'",
        ),
        ("h5py", hdf5.load, "a.h5", "data=hdf5 needs h5py: pip install 'trainrun[hdf5]'"),
    ],
)
def test_a_missing_extra_names_itself(tmp_path, monkeypatch, module, load, file, message):
    (tmp_path / file).write_bytes(b"")
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == module:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(DataError) as caught:
        load(str(tmp_path / file))["train"]
    assert str(caught.value) == message


def test_numbers_are_divided_at_random_and_classes_in_proportion():
    labels = torch.tensor([0] * 90 + [1] * 10)
    assert labels[divide_rows(labels, 0.2, 0)[1]].sum() == 2
    assert divide_rows(torch.arange(30) % 4, 0.25, 5)[1].tolist() == [1, 7, 10, 15, 17, 20, 26, 28], "as ever"
    train, val = divide_rows(np.linspace(0, 1, 50), 0.2, 0)
    assert (len(train), len(val)) == (40, 10)
    assert val.tolist() != [*range(10)]
    assert len(divide_rows(np.arange(50), 0.2, 0)[1]) == 10, "too many different numbers to be classes"
    assert len(divide_rows(np.zeros((50, 2), np.int64), 0.2, 0)[1]) == 10
    assert len(divide_rows(np.arange(50, dtype=np.uint64) % 2, 0.2, 0)[1]) == 10
    for fraction in (0.001, 0.999):
        with refused(DataError, f"val_fraction={fraction}"):
            divide_rows(np.zeros(50), fraction, 0)
    with refused(DataError, "val_fraction=1.5"):
        divide_rows(np.zeros(50), 1.5, 0)
