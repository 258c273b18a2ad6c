"""A format of the user's own is a reader and a `load`: held out, skipped, cached and resumed like any other."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from approved import refused

import trainrun
from trainrun.cli.main import main
from trainrun.data.readers.reader_protocol import ReaderDataset
from trainrun.errors import DataError

MODULE = '''
import json
import torch
from trainrun.data.readers.parts import SplitRequest
from trainrun.data.readers.reader_protocol import Info, ReadFiles, build_splits

class JsonLines:
    """Samples `(x, y)` of .jsonl files."""

    def __init__(self, files):
        self.lines = [line for file in files for line in file.read_bytes().splitlines()]
        labels = torch.tensor([json.loads(line)["y"] for line in self.lines])
        self.info = Info(tuple(files), labels=labels, num_classes=2)

    def __len__(self):
        return len(self.lines)

    def read(self, indices):
        rows = [json.loads(self.lines[index]) for index in indices]
        return [(torch.tensor(list(map(float, row["x"]))), row["y"]) for row in rows]

def load(path, val_path=None, test_path=None, val_fraction=0.25, seed=0):
    found = SplitRequest(path, val_path, test_path, val_fraction, seed).find_files((".jsonl",))
    return build_splits(found, lambda files: ReadFiles(JsonLines(files)))
'''
NODES = ["data.train._target_=my_format.load", "data.train.path=rows.jsonl", "data.val=${data.train}"]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_format.py").write_text(MODULE)
    rows = [{"x": [i, -i, i % 2], "y": i % 2} for i in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import my_format

    return my_format.load


def test_parts_places_and_pickling_are_done_around_it(load):
    train, val = (load("rows.jsonl")[split] for split in ("train", "val"))
    assert isinstance(train, ReaderDataset)
    assert (len(train), len(val)) == (24, 8)
    assert val.labels.tolist().count(1) == 4, "each class in proportion"
    numbers = [int(sample[0][0]) for part in (train, val) for sample in part.__getitems__(range(len(part)))]
    assert sorted(numbers) == list(range(32))
    assert pickle.loads(pickle.dumps(val))[3][0].tolist() == val[3][0].tolist()
    assert train.fingerprint() != val.fingerprint()
    assert not hasattr(train, "lengths")


def test_a_damaged_sample_is_named_among_many(load):
    lines = Path("rows.jsonl").read_text().replace("[5, -5", '["five", -5')
    Path("rows.jsonl").write_text(lines)
    data = load("rows.jsonl", val_fraction=0.0)["train"]
    with refused(DataError, "rows.jsonl"):
        data.__getitems__([3, 5, 7])


@pytest.mark.process
def test_it_trains_from_a_cache_and_goes_on(load):
    words = ["data=custom", *NODES, "data.shape=[3]", "data.num_classes=2", "model=mlp", "data.batch_size=8",
             "monitor.plots=false", "monitor.hardware=false", "data.cache=memory", "data.num_workers=0"]  # fmt: skip
    run = trainrun.train(*words, "trainer.max_steps=4", "output_dir=out")
    assert run.metrics[-1]["step"] == 4
    assert main(["resume", "out", "trainer.max_steps=6"]) == 0
    assert trainrun.load_run("out").metrics[-1]["step"] == 6
