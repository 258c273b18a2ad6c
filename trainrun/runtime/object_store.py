"""Files in object stores, by fsspec: `s3://bucket/folder`, `gs://`, `hf://`, `memory://` and others.

fsspec is the extra `stores`. fsspec imports the packages of single stores (`s3fs`, `gcsfs`).
"""

from __future__ import annotations

from typing import Any

from trainrun.errors import ConfigError


def open_object_store(url: str, key: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL and the path in it. Nothing is connected yet.

    key: the setting that gives the URL, for the messages. Raise ConfigError for a package that is missing, or a
    protocol that fsspec does not have.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"{key}={url}: needs fsspec; pip install 'trainrun[stores]'") from error
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # no s3fs; no such protocol
        raise ConfigError(f"{key}={url}: {error}; pip install 'trainrun[stores]' has those of S3") from error
    return files, str(path).rstrip("/")
