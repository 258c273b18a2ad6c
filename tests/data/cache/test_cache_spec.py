from pathlib import Path

import pytest

from trainrun.data.cache.spec import parse_cache, readable
from trainrun.errors import ConfigError, DataError
from trainrun.words.compose import compose_run


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
    ("text", "message"),
    [
        ("memmory", "data.cache=memmory: no such cache; did you mean memory?"),
        ("ram", "allowed: none, memory"),
        ("pool", "pool:500MB"),
        ("pool:3x", "data.cache=pool:3x: the size must be"),
        ("pool:500", "with a unit"),
        ("pool:3ib", "with a unit"),
        ("pool:0MB", "above 0"),
        ("pool:-1MB", "above 0"),
        ("disk:", "name the folder"),
        ("memory:2GB", "memory takes nothing after it"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(DataError) as caught:
        parse_cache(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_can_be_read():
    assert [readable(n) for n in (12, 3400, 1_200_000_000)] == ["12 B", "3.4 kB", "1.2 GB"]


def test_a_wrong_word_is_found_with_the_other_faults_of_a_config():
    with pytest.raises(ConfigError) as caught:
        compose_run(["data=digits", "data.cache=pool:3x", "data.batch_size=0"])
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["data.batch_size=0", "data.cache=pool"]
