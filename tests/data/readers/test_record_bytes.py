import contextlib
import json

import numpy as np
import pytest
import safetensors.numpy
import torch
from approved import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.data.readers.records.record import (
    Facts,
    decode_facts,
    decode_sample,
    encode_facts,
    encode_sample,
    is_sample,
)


def same(a, b) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


SAMPLES = [
    np.arange(6, dtype=np.uint8).reshape(2, 3),
    torch.rand(2, 2),
    torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    torch.empty(0, 3, dtype=torch.bfloat16),
    torch.tensor(3),
    torch.arange(6).view(2, 3).T,
    (np.zeros((0, 4), np.float32), 7),
    [True, 2.5, "grün", b"\0\xff"],
    {"y": np.array([True, False]), "image": np.zeros((1, 2, 2), np.float16), "x": np.array(4)},
    {},
    "",
]


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_a_sample_comes_back_as_it_was(sample):
    content = encode_sample(sample)
    assert is_sample(content)
    assert same(decode_sample(content), sample)
    assert same(decode_sample(memoryview(content)), sample)


def test_equal_samples_give_equal_bytes():
    """A conversion that is done again writes the same files; safetensors alone writes its metadata in any order."""
    sample = {"x": np.arange(3), "deep": [torch.zeros(2), "text"]}
    assert len({encode_sample(sample) for _ in range(50)}) == 1


def test_arrays_may_be_written_to_and_lie_at_multiples_of_their_width():
    content = encode_sample((np.ones(3, np.uint8), np.arange(4.0), "abc"))
    few, wide, _ = decode_sample(content)
    few[0], wide[0] = 9, 9
    assert wide.flags.aligned
    assert decode_sample(content)[0][0] == 1


def test_other_readers_of_safetensors_open_it_and_their_files_are_samples():
    found = safetensors.numpy.load(encode_sample({"x": np.arange(3), "s": np.ones(1, np.uint8)}))
    assert found["x"].tolist() == [0, 1, 2]
    foreign = safetensors.numpy.save({"a": np.ones(2, np.float32), "b": np.zeros(1, np.int32)})
    assert same(decode_sample(foreign), {"a": np.ones(2, np.float32), "b": np.zeros(1, np.int32)})


@pytest.mark.parametrize(
    "part", [{1, 2}, object(), None, (1, (2, object())), {"a": {"b": None}}, np.array(["a"])]
)
def test_other_parts_are_refused(part):
    with refused(TypeError):
        encode_sample((1, part))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x80\x04pickle of some kind", b"\0" * 8 + b"{}", (2**40).to_bytes(8, "little") + b"{}",
        (100_000).to_bytes(8, "little") + b'{"a":' * 20_000,
        (2).to_bytes(8, "little") + b"[]", (4).to_bytes(8, "little") + b"{bad",
        (13).to_bytes(8, "little") + b'{"0":[1,2,3]}',
    ],
    ids=range(8),
)  # fmt: skip
def test_what_is_no_sample_is_refused(content):
    with pytest.raises(ValueError):
        decode_sample(content)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.data())
def test_damage_is_a_value_error_or_another_sample(data):
    content = bytearray(encode_sample((np.arange(3, dtype=np.int16), torch.ones(2), "text", 3)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    with contextlib.suppress(ValueError, OverflowError):
        decode_sample(bytes(content))


def test_facts_come_back_and_are_checked():
    facts = Facts(3, ("cat", "dog"), 2)
    assert decode_facts(encode_facts(facts)) == facts
    assert decode_facts(b'{"class_names": ["a"]}') == Facts(None, ("a",), 1)
    for wrong in (
        b"[]",
        b'{"length": -1}',
        b'{"length": 2.5}',
        b'{"class_names": [1]}',
        b'{"class_names": "ab"}',
    ):
        with pytest.raises(ValueError):
            decode_facts(wrong)


@pytest.mark.parametrize(
    "tree", ["0.1", [], {}, {"set": []}, {"dict": ["0.0"]}, {"tuple": ["no such part"]}, {"tuple": 1}]
)
def test_a_damaged_tree_is_a_fault(tree):
    metadata = {"tree": json.dumps(tree), "kinds": '{"0.0": "int"}'}
    with pytest.raises(ValueError):
        decode_sample(safetensors.numpy.save({"0.0": np.array(1)}, metadata))
