"""`trainrun convert` as a command: what it prints to people and to files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from trainrun.convert.part_samples import Samples
from trainrun.convert.usage import target_of
from trainrun.convert.write import write_parts


def test_quiet_lines_where_no_terminal_is(trainrun, workdir: Path):
    done = trainrun("convert", "digits", "out", "--to", "npy", "data.train.val_fraction=0.5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" samples")[0] for line in lines[:2]] == ["train: 899", "val: 898"]
    assert lines[-2].endswith("32 samples read back are the same")
    assert lines[-1] == "use it with: data=arrays data.path=out data.num_classes=10"
    assert len(lines) == 4
    assert "\x1b" not in done.stdout


def test_a_bar_on_a_terminal_alone(workdir: Path):
    samples = Samples((np.zeros((20, 3)),), "data.train")
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
        target, _ = target_of("tfrecord", workdir / str(is_terminal), "train", samples, 5)
        write_parts(workdir, {"train": target}, {"train": samples}, 0, console, lambda line: None)
        assert ("20/20" in console.file.getvalue()) is is_terminal
