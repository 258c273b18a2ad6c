from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from approved import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainrun.checkpoint.load import parse_json, read_tensors, unflatten_tree
from trainrun.checkpoint.save import DTYPES, flatten_tree, format_json, iterate_safetensors_bytes
from trainrun.errors import CheckpointError


def there_and_back(tree: Any) -> Any:
    """Through JSON text, and through contiguous copies as a file makes them."""
    plain, tensors = flatten_tree(tree)
    stored = {
        name: tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
        for name, tensor in tensors.items()
    }
    return unflatten_tree(parse_json(format_json(plain), "test"), stored, "test")


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(x) is type(y) for x, y in zip(a, b, strict=True))
            and all(same(a[k], b[k]) for k in a)
        )
    return bool(a == b)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=8),
    st.text(max_size=6),
)  # fmt: skip
keys = st.one_of(st.text(max_size=4), st.sampled_from(["$int", "$", "a/b"]), st.integers())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=20,
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(trees)
def test_any_plain_tree_comes_back_exactly(tree: Any) -> None:
    assert same(there_and_back(tree), tree)


def test_nasty_values() -> None:
    tree = {
        "ints": [0, -1, 2**53, 2**53 + 1, -(2**64), 10**6000],
        "floats": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1 + 0.2, 1e308],
        "surrogate": "\udc80",
        "the same as one": "\U0001f600",
        1: "an int key",
        "1": "a str key",
        "$tensor": ["looks like a tag"],
        "nested": {"$dict": [[1, 2]]},
        "bytes": bytes(range(256)),
        "empty": [(), [], {}, b"", ""],
    }
    assert same(there_and_back(tree), tree)
    nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert same(there_and_back([nan]), [nan])


def test_containers_of_torch_and_numpy() -> None:
    back = there_and_back({"milestones": Counter({30: 1, 80: 2}), "state": OrderedDict(b=1, a=2)})
    assert same(back, {"milestones": Counter({30: 1, 80: 2}), "state": {"b": 1, "a": 2}})
    numbers = [np.float32(0.1), np.float64(0.5), np.int64(-3), np.uint8(7), np.bool_(True), np.str_("x")]
    assert same(there_and_back(torch.__version__), str(torch.__version__))
    assert same(there_and_back(numbers), [float(np.float32(0.1)), 0.5, -3, 7, True, "x"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    count = 24
    data = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    tensor = (data % 2).bool() if dtype == torch.bool else data.view(dtype)
    for one in (tensor, tensor[3], tensor[:0], tensor.reshape(2, 3, 4)):
        back = there_and_back({"x": one})["x"]
        assert (back.dtype, back.shape) == (dtype, one.shape)
        assert bits(back) == bits(one)


def bits(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize("channels", [1, 3])
def test_memory_formats_come_back(channels: int) -> None:
    image = torch.rand(2, channels, 4, 5).to(memory_format=torch.channels_last)
    tree = {
        "channels_last": image,
        "transposed": torch.rand(3, 4).t(),
        "permuted": torch.rand(2, 3, 4).permute(2, 0, 1),
    }
    back = there_and_back(tree)
    for name, tensor in tree.items():
        assert torch.equal(back[name], tensor)
        assert back[name].stride() == tensor.stride()
    assert back["channels_last"].is_contiguous(memory_format=torch.channels_last)


def test_gaps_and_expansions_become_dense() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    back = there_and_back([base[:, ::2], torch.ones(1).expand(5), base[:, 1]])
    assert torch.equal(back[0], base[:, ::2])
    assert back[0].is_contiguous()
    assert back[1].stride() == (1,)
    assert torch.equal(back[2], base[:, 1])


def test_complex_numbers_of_two_doubles() -> None:
    table = torch.complex(torch.rand(2, 3, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64))
    values = [table, table.t(), table.conj(), table[:, ::2], table[:0], table[0, 0]]
    back = there_and_back(values)
    for value, again in zip(values, back, strict=True):
        assert again.dtype == torch.complex128
        assert torch.equal(again, value)
    assert back[1].stride() == table.t().stride()
    tied = there_and_back([nn.Parameter(table), table])
    tied[0].fill_(7)
    assert tied[1].eq(7).all()


def test_tied_tensors_stay_tied() -> None:
    weight = nn.Parameter(torch.rand(3, 2))
    _, tensors = flatten_tree(
        {"embed": weight, "head": weight.detach(), "other": weight.t(), "copy": weight.clone()}
    )
    assert list(tensors) == ["embed", "other", "copy"]
    back = there_and_back({"embed": weight, "head": weight.detach(), "copy": weight.clone()})
    back["embed"].fill_(7)
    assert back["head"].eq(7).all()
    assert not back["copy"].eq(7).any()
    assert type(back["embed"]) is Tensor


def test_names_that_would_collide() -> None:
    tree = {
        "a/b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.full((1,), 2.0),
        5: torch.full((1,), 3.0),
    }
    tree["5"] = torch.full((1,), 4.0)
    back = there_and_back(tree)
    assert [back["a/b"], back["a"]["b"], back["__metadata__"], back[5], back["5"]] == [0, 1, 2, 3, 4]
    assert "__metadata__" not in flatten_tree(tree)[1]


class Strange(Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, object(), 1j, defaultdict(int), torch.float32, torch.device("cpu"), np.zeros(2),
        torch.Size([1]),
        np.longdouble(1), torch.zeros(2).to_sparse(),
        torch.empty(1, device="meta"), torch.zeros(1).as_subclass(Strange),
        {True: 1}, {1.5: 1}, {None: 1}, {(1,): 1},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_saved_is_named_with_its_path(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot save scheduler/items/1[:/]"):
        flatten_tree({"scheduler": {"items": [0, value]}})


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(TypeError, match="nested deeper"):
        flatten_tree(tree)
    deep: Any = 1
    for _ in range(64):
        deep = {1: deep}
    assert same(there_and_back(deep), deep)


@pytest.mark.parametrize(
    "plain",
    [
        {"$pickle": "x"},
        {"$int": "0x1", "more": 1},
        {"a": 1, "$b": 2},
        {"$int": "zz"},
        {"$float": "7ff8"},
        {"$bytes": "ABC"},
        {"$tuple": {"a": 1}},
        {"$dict": [[1]]},
        {"$dict": [[1, 1], [1, 2]]},
        {"$dict": [[[1], 1]]},
        {"$counter": [["a", "b"], 1]},
        {"$tensor": "x"},
        {"$tensor": ["y"]},
        {"$tensor": ["x", [1]]},
        {"$tensor": ["x", [0, 0]]},
        {"$tensor": ["x", [-3, 1]]},
        {"$tensor": ["x", [3.0, 1]]},
        [{"$tensor": ["x"]}, {"$tensor": ["x", [1, 2]]}],
        {"$complex": [1, 2]},
        {"$complex": {"$tensor": ["x"]}},
        [],
    ],
)
def test_hostile_trees_are_refused(plain: Any) -> None:
    with refused(CheckpointError):
        unflatten_tree(plain, {"x": torch.zeros(2, 3)}, "state.json")
    if "$complex" in plain:
        with refused(CheckpointError):
            unflatten_tree(plain, {"x": torch.zeros(2, 3, dtype=torch.float64)}, "state.json")


def test_deep_trees_are_refused() -> None:
    tagged: Any = 1
    for _ in range(500):
        tagged = {"$complex": tagged}
    for deep in (parse_json(b"[" * 200 + b"]" * 200, "x"), tagged):
        with pytest.raises(
            CheckpointError, match="nested deeper|no complex"
        ):  # as deep as the process may go
            unflatten_tree(deep, {}, "state.json")
    for text in (b"[" * 100_000, b"\xff", b"\xef\xbb\xbf1", b"[1,]", b"1 2", b"", b"1" * 5000):
        with pytest.raises(CheckpointError, match="not valid JSON"):
            parse_json(text, "state.json")


TENSORS = {
    "a": torch.arange(5, dtype=torch.int8),
    "b": torch.rand(2, 3),
    "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "double": torch.rand((), dtype=torch.float64),
    "half": torch.rand(3).bfloat16(),
    "none": torch.empty(0, 4),
    "yes": torch.tensor([True, False]),
}


def file_of(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, stop: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


def test_the_library_reads_what_we_write_and_we_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    for data in (
        b"".join(iterate_safetensors_bytes(TENSORS)),
        safetensors.torch.save(contiguous, {"by": "the library"}),
    ):
        path.write_bytes(data)
        for found in (safetensors.torch.load_file(path), read_tensors(path)):
            assert found.keys() == TENSORS.keys()
            assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
            assert all(found[name].dtype == TENSORS[name].dtype for name in TENSORS)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}) == 6
    path.write_bytes(bytes(len(data)))
    assert torch.equal(found["b"], TENSORS["b"])  # no view of the file


def test_lazy_bits_are_settled(tmp_path: Path) -> None:
    base = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64)
    (tmp_path / "x").write_bytes(
        b"".join(iterate_safetensors_bytes({"conjugate": base.conj(), "negative": base.conj().imag}))
    )
    found = read_tensors(tmp_path / "x")
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 1j]
    assert found["negative"].tolist() == [-2, 1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        (2**63).to_bytes(8, "little") + b"{}",
        file_of({"a": entry(0, 4)}, b"1234")[:-10],
        file_of(b'{"a": NaN}', b""),
        file_of(b'{"a":' * 1000, b""),
        file_of({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"),
        file_of({"a": entry(0, 4)}, b"12345"),
        file_of({"a": entry(0, 10**12, "U8")}, b"1234"),
        file_of({"a": entry(0, 4, "F32", [2])}, b"1234"),
        file_of({"a": entry(0, 4, "F31", [1])}, b"1234"),
        file_of({"a": entry(0, 4, "U8", [-4])}, b"1234"),
        file_of({"a": entry(0, 2, "BOOL")}, b"\x01\x02"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with refused(CheckpointError, "x.safetensors: "):
        read_tensors(tmp_path / "x.safetensors")
