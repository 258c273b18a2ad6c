"""A bucket of a server on this machine that speaks S3 (moto)."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve an empty `s3://bucket`, to which the variables of AWS lead. Skip the test without moto or s3fs."""
    moto = pytest.importorskip("moto.server", reason="no moto[server]")
    s3fs = pytest.importorskip("s3fs", reason="no s3fs, which the extra stores brings")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    address = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")
    for name, value in zip(names, ("name", "word", "us-east-1", address), strict=True):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield
    urllib.request.urlopen(urllib.request.Request(f"{address}/moto-api/reset", method="POST")).close()
    server.stop()
