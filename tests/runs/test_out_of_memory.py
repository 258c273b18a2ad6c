"""Whole runs in which memory ends: nothing is lost, nothing is done twice, and the choice is remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused
from exact_parts import Recorder, fitted, parts_of, result

import trainrun as package
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.cli.main import main
from trainrun.errors import TrainingError
from trainrun.folder.run_folder import read_json

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
CAPPED = ("model=exact_parts.Capped", "data.train.count=29", "data.batch_size=8", "precision=64-true")
WINDOWS = ("trainer.accumulate_grad_batches=2",)


def close(left: dict[str, Any], right: dict[str, Any], tolerance: float = 1e-12) -> None:
    for key in ("weights", "averaged"):
        for one, other in zip(left[key], right[key], strict=True):
            assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    rows = [[row["train/loss"] for row in run["train"]] for run in (left, right)]
    assert rows[0] == pytest.approx(rows[1], rel=tolerance)


def test_off_and_on_are_the_same_bits_where_memory_suffices() -> None:
    words = (*CAPPED, *WINDOWS, "model.limit=100", "model.dropout=0.5")
    on, off = (result((*words, f"trainer.out_of_memory={mode}")) for mode in ("split", "stop"))
    assert on == off
    assert on["train"]


@pytest.mark.parametrize(("limit", "accumulate"), [(1, 2), (2, 1), (3, 1), (4, 2), (7, 1)])
def test_a_run_that_is_split_computes_what_the_whole_batches_would(limit: int, accumulate: int) -> None:
    words = (*CAPPED, f"trainer.accumulate_grad_batches={accumulate}")
    recorder = Recorder()
    run = parts_of((*words, f"model.limit={limit}"), recorder)
    state = fitted(run)
    whole = result((*words, "model.limit=100"))
    close({**whole, "weights": [p.flatten().tolist() for p in run.model.parameters()]}, whole)
    assert [row["train/loss"] for row in recorder.train] == pytest.approx(
        [row["train/loss"] for row in whole["train"]], rel=1e-12
    )
    assert run.retry.pieces == {1: 8, 2: 4, 3: 4, 4: 2, 7: 2}[limit]
    assert max(run.model.seen) <= limit
    assert sum(run.model.seen) >= 29  # what failed later in its window was counted before
    assert (state.epoch, state.items) == (1, 29.0)


def test_the_choice_is_told_once_and_a_resume_begins_with_it(workdir: Path) -> None:
    words = [*CAPPED, *WINDOWS, "data.train._target_=exact_parts.samples", "task.class_dim=-1", "model.limit=3",
             "model.dropout=0.3", "trainer.max_epochs=4", "checkpoint.every_n_train_steps=1", "checkpoint.keep_last=9",
             "monitor.plots=false", "monitor.hardware=false", "trainer.num_threads=1"]  # fmt: skip
    whole = package.train(*words)
    half = package.train(*words, "trainer.max_steps=3")  # in the midst of the second epoch
    loaded = read_checkpoint(resolve_checkpoint(half.files.checkpoints, "last"))
    assert loaded.shared["retry"] == {"pieces": 4}
    assert loaded.shared["train"]["batches"] == 2  # whole ones, whatever they were cut in
    assert main(["resume", str(half.folder), "trainer.max_steps=null"]) == 0
    notes = [[row["text"] for row in run.metrics if row["kind"] == "note"] for run in (whole, half)]
    for texts in notes:
        (told,) = [text for text in texts if "out of memory" in text]
        assert "every micro-batch is split into 4, 2 samples at a time, with the same global batch" in told
    ends = [
        read_checkpoint(resolve_checkpoint(run.files.checkpoints, "last")).shared for run in (whole, half)
    ]
    assert ends[0]["train"]["step"] == ends[1]["train"]["step"] == 8
    for name, value in ends[0]["model"].items():
        assert torch.equal(value, ends[1]["model"][name])


def test_stop_ends_the_run_with_advice_and_begins_whole_again() -> None:
    run = parts_of((*CAPPED, "model.limit=4", "trainer.out_of_memory=stop"))
    run.retry.load_state_dict({"pieces": 4})
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        fitted(run)
    assert run.retry.pieces == 1


def test_where_one_sample_is_too_much_the_message_says_so(workdir: Path) -> None:
    with refused(TrainingError):
        package.train(
            *CAPPED,
            "model.limit=0",
            "data.train._target_=exact_parts.samples",
            "task.class_dim=-1",
            "output_dir=run",
        )


def test_where_memory_ends_on_one_rank_the_run_ends_with_what_to_type(workdir: Path) -> None:
    words = [*CAPPED[:2], *WINDOWS, "data.train._target_=exact_parts.samples", "task.class_dim=-1",
             "trainer.max_epochs=2", "monitor.plots=false", "precision=64-true"]  # fmt: skip
    ranks = ["parallel=ddp", "parallel.devices=2", "data.batch_size=4", "model.limit=2", "model.only_rank=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests/runs'}")
        assert main([*words, *ranks, "output_dir=ranks"]) == 1
        advice = "data.batch_size=2 trainer.accumulate_grad_batches=4"
        message = read_json(Path("ranks/status.json"))["message"]
        assert advice in message
        assert str(Path("ranks/memory-rank1.json").resolve()) in message
        assert Path("ranks/memory-rank1.json").is_file()
        assert main(["resume", "ranks", *advice.split()]) == 0
    one = package.train(*words, "model.limit=99", "data.batch_size=8")
    ends = [
        read_checkpoint(resolve_checkpoint(folder / "checkpoints", "last")).shared
        for folder in (Path("ranks"), one.folder)
    ]
    for name, value in ends[0]["model"].items():
        torch.testing.assert_close(value, ends[1]["model"][name], rtol=1e-12, atol=1e-12)


WIDE = """
    import torch
    from torch import nn

    class Wide(nn.Module):  # 3 MB of activations a sample
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 10)
        def forward(self, x):
            x = self.first(x.flatten(1))[:, None, :] * torch.linspace(0.9, 1.1, 2048)[:, None]
            for _ in range(2):
                x = x.tanh()
            return self.last(x.mean(1))
"""
REAL_WORDS = [
    "model=wide.Wide", "data.batch_size=64", "data.val_batch_size=4", "trainer.max_steps=2", "optimizer=sgd",
    "trainer.limit_val_batches=1", "monitor.hardware=false", "monitor.plots=false", "checkpoint.enabled=false",
]  # fmt: skip
REAL = """
    import json, resource, sys
    import trainrun
    from trainrun.runs import rank

    build_components = rank.build_components
    def limited(config, site):
        built = build_components(config, site)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 2**20, -1))
        return built
    rank.build_components = limited
    run = trainrun.train(*sys.argv[2:])
    notes = [row["text"] for row in run.metrics if row["kind"] == "note"]
    losses = [row["train/loss"] for row in run.metrics if row["kind"] == "train"]
    print(json.dumps([notes, losses]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited as on Linux")
def test_a_real_limit_of_memory(workdir: Path) -> None:
    """64 samples need 200 MB and more; 120 MB are left."""
    Path("wide.py").write_text(textwrap.dedent(WIDE))
    Path("real.py").write_text(textwrap.dedent(REAL))
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    limited = subprocess.run(
        [sys.executable, "real.py", "120", *REAL_WORDS], env=env, capture_output=True, text=True, timeout=300
    )
    assert limited.returncode == 0, limited.stderr
    notes, losses = json.loads(limited.stdout.splitlines()[-1])
    assert any("out of memory" in note for note in notes)
    free = package.train(*REAL_WORDS, "output_dir=free")
    assert not [row for row in free.metrics if row["kind"] == "note"]
    assert losses == pytest.approx(
        [row["train/loss"] for row in free.metrics if row["kind"] == "train"], rel=1e-5
    )
