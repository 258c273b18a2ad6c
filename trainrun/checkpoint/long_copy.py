"""Long tensors of the host copied by threads that take the next piece when they are free.

Those of torch wait for each other at every tensor, and where others use the cores too, that takes many times longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import torch
from torch import Tensor

PIECE_BYTES = 32 * 2**20  # 1.2 GB in 94 ms; of 4 MiB 103 ms, of 1 MiB 124 (Intel Xeon, two threads)
Bytes = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


def copy_by_pieces(copies: Mapping[str, Tensor], tensors: Mapping[str, Tensor], least_bytes: int) -> set[str]:
    """The values of tensors into those of the same names; returns the names, of those that lie here in one piece."""
    long = {
        name
        for name, tensor in tensors.items()
        if tensor.nbytes >= least_bytes and _is_plain(tensor) and _is_plain(copies[name])
    }
    pairs = [(_bytes(copies[name]), _bytes(tensors[name])) for name in long]
    places = [(pair, start) for pair in pairs for start in range(0, len(pair[0]), PIECE_BYTES)]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(_copy_piece, places))
    return long


def _copy_piece(place: tuple[tuple[Bytes, Bytes], int]) -> None:
    (copy, tensor), start = place
    numpy.copyto(copy[start : start + PIECE_BYTES], tensor[start : start + PIECE_BYTES])


def _is_plain(tensor: Tensor) -> bool:
    """Whether its memory is its values, one after the other."""
    return (
        tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
