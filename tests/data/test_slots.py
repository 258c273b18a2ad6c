"""Batches that workers hand over in shared memory: the same as those that are read here, however they look."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainrun.data import slots
from trainrun.data.open import open_batches
from trainrun.data.options import StreamOptions
from trainrun.data.slots import Slots, bytes_of, is_plain, is_whole
from trainrun.errors import DataError
from trainrun.interfaces import MicroBatch

pytestmark = pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="workers are no copies of this process"
)
COUNT = 40


class Counted(Tensor):
    """What torch's way keeps and a copy of bytes would not."""


class Strict(dict[str, Any]):
    """A mapping that looks at what is put into it, here and where it arrives."""

    def __setitem__(self, key: str, value: Any) -> None:
        assert isinstance(value, Tensor)
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return rebuilt, (dict(self), sum(value.numel() for value in self.values()))


def rebuilt(values: dict[str, Tensor], numel: int) -> Strict:
    assert sum(value.numel() for value in values.values()) == numel
    return Strict(values)


class Odd(Dataset[Any]):
    """Batches of all kinds, as a collate_fn may make them."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        return index


class Late:
    """Makes its tensor when it is pickled, out of memory that may just have been given back."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return list, (torch.full((1000,), self.number),)


def all_kinds(indices: list[int]) -> dict[str, Any]:
    number = float(sum(indices))
    row = torch.arange(24, dtype=torch.float32).add(number)
    types = (
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.complex64,
    )
    pair = torch.full((3,), number)
    return {
        "types": [row.to(kind) for kind in types],
        "bools": row > number + 5,
        "scalar": torch.tensor(number),
        "empty": torch.empty(0, 4),
        "columns": row.view(4, 6).t(),
        "channels_last": row.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "channel": row[:16].clone().view(4, 1, 2, 2).to(memory_format=torch.channels_last),
        "part": row[3:7],
        "whole": row,
        "before": pair[1:],
        "strict": Strict(x=torch.full((2,), number)),
        "twice": (pair, pair),
        "conj": torch.tensor([1j * number]).conj(),
        "grows": torch.nn.Parameter(torch.full((2,), number)),
        "own": torch.full((2,), number).as_subclass(Counted),
        "array": np.full(3, number),
        "name": f"batch {indices[0]}",
    }


def stream_of(source: Any, **changes: Any) -> Any:
    fields = {"key": "data.train", "training": True, "batch_size": 4, "seed": 1, "engine": "workers"}
    return open_batches(source, StreamOptions(**fields | changes))[0]  # type: ignore[arg-type]


def flat(data: Any) -> Iterator[Any]:
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list | tuple):
        for part in data:
            yield from flat(part)
    else:
        yield data


def as_seen(batch: MicroBatch) -> list[Any]:
    seen = []
    for leaf in flat(batch.data):
        if isinstance(leaf, Tensor):
            about = (type(leaf), leaf.dtype, leaf.shape, leaf.requires_grad, leaf.layout)
            strides = leaf.stride() if leaf.layout is torch.strided else ()
            seen.append((*about, strides, leaf.to_dense().detach().resolve_conj().tolist()))
        else:
            seen.append(np.asarray(leaf).tolist())
    return seen


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of all that is copied out of slots from here on, the number of its batch."""
    found: list[int] = []
    real = Slots.copy_out

    def copy_out(self: Slots, slot: int, number: int, place: int, target: Any) -> None:
        found.append(number)
        real(self, slot, number, place, target)

    monkeypatch.setattr(Slots, "copy_out", copy_out)
    return found


def read(workers: int) -> list[MicroBatch]:
    stream = stream_of(Odd(), num_workers=workers, collate_fn=all_kinds)
    batches = [batch for epoch in (0, 1) for batch in stream.epoch(epoch)]
    stream.close()
    return batches


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_of_all_kinds_are_those_that_come_torchs_way(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = counting(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("trainrun.data.workers.slots_for", lambda *numbers: None)
        usual = read(workers)
    assert not copied
    there = read(workers)
    assert [as_seen(batch) for batch in there] == [as_seen(batch) for batch in usual]
    assert len(copied) >= 10 * len(there)
    assert all(part.data_ptr() % 64 == 0 for part in there[0].data["types"])


def test_what_shares_its_memory_still_does() -> None:
    for data in (batch.data for batch in read(1)):
        first, second = data["twice"]
        assert first.data_ptr() == second.data_ptr()
        data["whole"].add_(100)
        assert data["part"].tolist() == data["whole"][3:7].tolist()


@pytest.mark.parametrize("slots_there", [True, False])
def test_the_order_of_memory_is_kept(slots_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also along a dimension of one, by which kernels are chosen."""
    if not slots_there:
        monkeypatch.setattr("trainrun.data.workers.slots_for", lambda *numbers: None)
    batch = read(1)[0].data
    assert batch["channel"].stride() == (4, 1, 2, 1)
    assert batch["channels_last"].stride() == (24, 1, 8, 2)
    assert batch["columns"].stride() == (1, 6)


def odd_memory(indices: list[int]) -> Any:
    row, array = torch.zeros(1000), np.arange(10.0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    alias = [row, torch.nn.Parameter(row), *(Late(float(number)) for number in (1, 2, 3))]
    return {"alias": alias, "two": (torch.from_numpy(array[:5]), torch.from_numpy(array)), "nested": nested,
            "parts": (row[3:7], row)}  # fmt: skip


def test_memory_is_not_told_apart_by_its_address() -> None:
    stream = stream_of(Odd(), num_workers=1, collate_fn=odd_memory)
    for batch in stream.epoch(0):
        data = batch.data
        assert [one[0].item() for one in data["alias"][2:]] == [1, 2, 3]
        assert [len(part) for part in data["two"]] == [5, 10]
        assert [part.sum().item() for part in data["nested"].unbind()] == [2, 3]
        data["parts"][1].add_(1)
        assert data["parts"][0].tolist() == [1.0] * 4
    stream.close()


class Unsendable:
    def __reduce__(self) -> Any:
        raise ValueError("not this one")


def test_what_cannot_be_sent_is_told_and_not_waited_for() -> None:
    stream = stream_of(Odd(), num_workers=1, collate_fn=lambda indices: [torch.ones(2), Unsendable()])
    with pytest.raises(
        DataError, match=r"data\.train: a batch cannot be sent by its worker \(ValueError: not this"
    ):
        next(stream.epoch(0))
    stream.close()


class Numbers(Dataset[Any]):
    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return COUNT * 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((self.width,), float(index)), torch.tensor(index)


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("slow", [0.0, 0.002])
def test_what_is_not_taken_yet_is_not_written_over(prefetch: int, slow: float) -> None:
    """Slots are used many times; every other epoch is left in its middle."""
    stream = stream_of(Numbers(50), num_workers=2, prefetch_factor=prefetch, shuffle=False)
    for epoch in range(4):
        at = 0
        for batch in stream.epoch(epoch):
            time.sleep(slow)
            values, numbers = batch.data
            assert numbers.tolist() == list(range(at, at + 4))
            assert values.tolist() == [[float(number)] * 50 for number in numbers.tolist()]
            at += 4
            if epoch % 2 == 0 and at == 40:
                break
    stream.close()


@pytest.mark.parametrize(("width", "number"), [(100, 80), (slots.SLOT_BYTES // 16, 40)])
def test_what_a_slot_cannot_hold_goes_another_way(
    width: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = counting(monkeypatch)
    stream = stream_of(Numbers(width), num_workers=1, shuffle=False)
    sums = [float(batch.data[0][:, -1].sum()) for batch in stream.epoch(0)]
    stream.close()
    assert sums == [float(4 * first + 6) for first in range(0, 4 * COUNT, 4)]
    assert len(copied) == number


def test_a_batch_that_was_written_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "get_worker_info", lambda: SimpleNamespace(id=0))
    found = Slots(1, 1)
    sent = [pickle.dumps(found.lend([torch.full((3,), float(number))])) for number in range(4)]
    with pytest.raises(RuntimeError, match="written over"):
        pickle.loads(sent[0])
    assert [pickle.loads(one)[0].tolist() for one in sent[1:]] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_the_memory_goes_with_the_loader() -> None:
    before = len(slots.all_slots)
    for _ in range(3):
        stream = stream_of(Numbers(5), num_workers=2)
        next(stream.epoch(0))
        stream.close()
    gc.collect()
    assert len(slots.all_slots) <= before


def test_what_is_more_than_its_memory_and_what_does_not_fill_it() -> None:
    plain = torch.arange(4.0)
    for whole in (plain, plain.view(2, 2).t(), torch.tensor(True), torch.ones(4, 1, 2, 2)[:, :, :2]):
        assert is_plain(whole)
        assert is_whole(whole)
        assert bytes_of(whole).nbytes == whole.nbytes
    for more in (plain.to_sparse(), torch.nn.Parameter(plain), torch.ones(2, device="meta"),
                 torch.tensor([1j]).conj()):  # fmt: skip
        assert not is_plain(more)
    for part in (plain[1:], plain[::2], plain[:3], plain.expand(2, 4), torch.empty(0)):
        assert is_plain(part)
        assert not is_whole(part)


def test_without_memory_or_copies_of_the_process_there_are_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slots.slots_for(1, 2) is not None
    monkeypatch.setattr(slots.multiprocessing, "get_start_method", lambda: "spawn")
    assert slots.slots_for(1, 2) is None
    monkeypatch.undo()

    def full(*given: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(slots.mmap, "mmap", full)
    assert slots.slots_for(1, 2) is None
