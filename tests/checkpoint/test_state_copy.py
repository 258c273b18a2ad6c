from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainrun.checkpoint import save
from trainrun.checkpoint.save import CopyMemory, iterate_safetensors_bytes


def state() -> dict[str, Tensor]:
    return {
        "step": torch.tensor(3.0),
        "short": torch.arange(5, dtype=torch.int64),
        "long": torch.randn(300, 1000),
        "picture": torch.randn(8, 64, 30, 30).to(memory_format=torch.channels_last),
        "half": torch.randn(999).bfloat16(),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.parametrize("large", [False, True])
def test_a_copy_holds_the_values_of_now_and_is_the_same_file(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, keep = state(), CopyMemory(lambda: 2**40)
    if large:
        monkeypatch.setattr(save, "LARGE_BYTES", 2**16)
    keep.prepare(tensors)
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    taken = keep.take(tensors).tensors
    assert len({tensor.untyped_storage().data_ptr() for tensor in taken.values()}) == 1
    assert b"".join(iterate_safetensors_bytes(taken)) == b"".join(iterate_safetensors_bytes(tensors))
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(taken[name], tensor) for name, tensor in wanted.items())
    keep.release_tensors(taken)
    assert all(not tensor.any() for tensor in keep.take(tensors).tensors.values())
