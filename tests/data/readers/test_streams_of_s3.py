"""Shards of a server that speaks S3 (moto), read by the workers of several ranks. Skipped without moto."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quiet_runs import QUIET, weights
from s3_bucket import s3_bucket
from things import tar_of_arrays

pytestmark = pytest.mark.process
NUM_SHARDS, SHARD_SAMPLES = 8, 40
WORDS = [
    "data=webdataset", "data.path=s3://bucket/shards/part-*.tar", "data.train.stream=shuffled", "data.num_classes=2",
    "data.train.val_path=s3://bucket/val.tar", "model=mlp",
    "model.in_shape=[1500]", "model.hidden=[3]", "parallel=ddp", "parallel.devices=2", "data.num_workers=2",
    "data.batch_size=5", "seed=5", "trainer.max_epochs=null", *QUIET,
]  # fmt: skip


def run(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainrun", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_workers_of_two_ranks_read_shards_of_their_own(workdir: Path, monkeypatch: pytest.MonkeyPatch):
    with s3_bucket(monkeypatch):
        import s3fs

        monkeypatch.setenv("XDG_CACHE_HOME", str(workdir / "cache"))
        for number in range(NUM_SHARDS):
            shard = tar_of_arrays(range(number * SHARD_SAMPLES, (number + 1) * SHARD_SAMPLES))
            s3fs.S3FileSystem().pipe_file(f"bucket/shards/part-{number}.tar", shard)
        s3fs.S3FileSystem().pipe_file("bucket/val.tar", shard)
        monkeypatch.setenv("TRAINRUN_CACHE_GB", str(6.5 * len(shard) / 1e9))
        run(*WORDS, "trainer.max_steps=40", "output_dir=whole")
        stored = [
            json.loads(path.read_text())["bytes"]
            for path in (workdir / "cache").glob("trainrun/stored/*/meta.json")
        ]
        assert len(stored) < NUM_SHARDS
        run(*WORDS, "trainer.max_steps=21", "output_dir=part")
        shutil.rmtree(workdir / "cache")
        run("resume", "part", "trainer.max_steps=40")
    whole, part = weights("whole"), weights("part")
    assert all(torch.equal(value, part[name]) for name, value in whole.items())
