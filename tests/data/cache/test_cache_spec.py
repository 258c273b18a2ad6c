from pathlib import Path

import pytest
from approved import refused

from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError
from trainrun.limits import parse_cache


@pytest.mark.parametrize(
    ("text", "mode", "num_bytes", "folder"),
    [
        ("none", "none", None, None),
        (" Memory ", "memory", None, None),
        ("pool:500MB", "pool", 500_000_000, None),
        ("pool:2GiB", "pool", 2 * 2**30, None),
        ("pool: 1.5 kib", "pool", 1536, None),
        ("pool:3k", "pool", 3000, None),
        ("pool:700b", "pool", 700, None),
        ("pool:1T", "pool", 10**12, None),
        ("disk:/a/b:c", "disk", None, Path("/a/b:c")),
        ("disk:~/c", "disk", None, Path.home() / "c"),
    ],
)
def test_what_is_allowed(text, mode, num_bytes, folder):
    spec = parse_cache(text)
    assert (spec.mode, spec.num_bytes, spec.folder) == (mode, num_bytes, folder)


@pytest.mark.parametrize(
    "text",
    ["memmory", "pool", "pool:3x", "pool:500", "pool:3ib", "pool:0MB", "pool:-1MB", "disk:", "memory:2GB"],
)
def test_what_is_refused(text):
    with refused(ValueError):
        parse_cache(text)


def test_a_wrong_word_is_found_with_the_other_faults_of_a_config():
    with pytest.raises(ConfigError) as caught:
        compose_run(["data=digits", "data.cache=pool:3x", "data.batch_size=0"])
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["data.batch_size=0", "data.cache=pool"]
