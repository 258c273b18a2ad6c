from pathlib import Path

import pytest

from trainrun.data.cache.places import Places
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
        ("disk:/a/b:c", "disk", None, Path("/a/b:c")),
    ],
)
def test_what_is_allowed(text, mode, num_bytes, folder):
    spec = parse_cache(text)
    assert (spec.mode, spec.num_bytes, spec.folder) == (mode, num_bytes, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memmory", "data.cache=memmory: no such cache; did you mean memory?"),
        ("pol:3MB", "did you mean pool?"),
        ("ram", "allowed: none, memory"),
        ("pool", "pool:500MB"),
        ("pool:3x", "data.cache=pool:3x: the size must be"),
        ("pool:500", "with a unit"),
        ("pool:0MB", "above 0"),
        ("pool:-1MB", "above 0"),
        ("disk:", "name the folder"),
        ("disk", "name the folder"),
        ("memory:2GB", "memory takes nothing after it"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(DataError) as caught:
        parse_cache(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_home_folder_is_found():
    assert parse_cache("disk:~/c").folder == Path.home() / "c"


def test_sizes_can_be_read():
    assert [readable(n) for n in (12, 3400, 1_200_000_000)] == ["12 B", "3.4 kB", "1.2 GB"]


@pytest.mark.parametrize(("number", "kept"), [(1, 1), (2, 1), (10, 3), (1000, 137), (1025, 1024), (4096, 9)])
def test_places_are_one_to_one(number, kept):
    slots = [Places(number, kept).slot(index) for index in range(number)]
    assert sorted(slot for slot in slots if slot is not None) == list(range(kept))


def test_the_kept_part_is_spread_evenly():
    kept = [index for index in range(100_000) if Places(100_000, 20_000).slot(index) is not None]
    for part in range(10):
        inside = sum(part * 10_000 <= index < (part + 1) * 10_000 for index in kept)
        assert 1850 <= inside <= 2150
    for step in (2, 7, 10, 64):
        counts = [sum(index % step == rest for index in kept) * step / len(kept) for rest in range(step)]
        assert max(counts) < 1.35
        assert min(counts) > 0.7


def test_a_wrong_word_is_found_with_the_other_faults_of_a_config():
    with pytest.raises(ConfigError) as caught:
        compose_run(["data=digits", "data.cache=pool:3x", "data.batch_size=0"])
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["data.batch_size=0", "data.cache=pool"]
