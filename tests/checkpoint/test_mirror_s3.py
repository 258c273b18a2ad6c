"""The mirror with a server that speaks S3 (moto): a whole run, a bucket that is not there, an upload that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quiet_runs import QUIET, weights
from s3_bucket import s3_bucket

import trainrun
from trainrun.mirror.object_store_mirror import fetch_run, list_stored_steps
from trainrun.runtime.object_store import open_object_store

pytestmark = pytest.mark.process

WORDS = ["data=digits", "model.hidden=[4]", "seed=3", "checkpoint.every_n_train_steps=1", *QUIET]
URL = "s3://bucket/run"
KILLED = f"""
import os, trainrun
from trainrun.mirror.object_store_mirror import ObjectStoreMirror
copy_file = ObjectStoreMirror._copy
def copy(self, path, source):
    if "step-00000002" in path and "shared" in path:
        os.kill(os.getpid(), 9)
    return copy_file(self, path, source)
ObjectStoreMirror._copy = copy
trainrun.train(*{WORDS!r}, "trainer.max_steps=2", "checkpoint.mirror={URL}", "output_dir=killed")
"""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with s3_bucket(monkeypatch):
        yield


@pytest.mark.usefixtures("bucket")
def test_a_run_comes_back_with_the_same_bits():
    trainrun.train(*WORDS, "trainer.max_steps=3", f"checkpoint.mirror={URL}", "output_dir=run")
    here, there = weights(str(fetch_run(URL, print))), weights("run")
    assert all((here[name] == value).all() for name, value in there.items())


@pytest.mark.usefixtures("bucket")
def test_a_bucket_that_is_not_there_is_noted_once(capsys: pytest.CaptureFixture[str]):
    run = trainrun.train(*WORDS, "trainer.max_steps=3", "checkpoint.mirror=s3://none/run", "output_dir=run")
    assert run.status["state"] == "done"
    assert capsys.readouterr().out.count("checkpoint.mirror=s3://none/run") == 1


@pytest.mark.usefixtures("bucket")
def test_a_killed_upload_is_never_taken():
    done = subprocess.run([sys.executable, "-c", KILLED], env=os.environ)
    assert done.returncode == -9
    store, root = open_object_store(URL, "checkpoint.mirror")
    assert "step-00000002" not in list_stored_steps(store, root)
    assert store.find(f"{root}/step-00000002")  # a part of it is there
