"""Sources that the tests of the cache read; and processes that they start."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch

FORK = multiprocessing.get_context("fork")
Pair = namedtuple("Pair", "image label")


def image_of(index):
    return torch.arange(12, dtype=torch.uint8).reshape(3, 4) + index % 200


def tokens_of(index):
    return torch.arange(index * 7 % 23, dtype=torch.int64) * index


SAMPLES = {
    "tensor": lambda i: image_of(i),
    "pair": lambda i: (image_of(i), i % 5),
    "named": lambda i: Pair(image_of(i), np.int64(i)),
    "list": lambda i: [np.full((2, 3), i, np.float32), i / 3, i % 2 == 0],
    "dict": lambda i: {"x": np.arange(4, dtype=">i2") + i, "half": torch.full((2,), i, dtype=torch.bfloat16)},
    "nested": lambda i: {"a": (i, [torch.tensor(float(i))]), "b": {"c": np.float32(i), "none": None}},
    "flipped": lambda i: np.arange(12).reshape(3, 4).T[::-1] + i,
    "empty": lambda i: (torch.zeros(0, 3), torch.tensor(1j * i), i),
    "tokens": lambda i: (tokens_of(i), i),
    "texts": lambda i: (f"text {'é' * (i % 7)}", b"x" * (i % 3), i),
    "ragged_images": lambda i: torch.full((1 + i % 3, 2 + i % 4, 3), i, dtype=torch.float64),
}
RAGGED = ("tokens", "texts", "ragged_images")


class Made:
    """Samples of one of the kinds above; every read is written down in the folder `log` as one byte.

    hangs: the sample whose read does not end.
    """

    class_names = ("cat", "dog")
    thread_safe = True

    def __init__(self, kind="pair", num_samples=40, log=None, delay=0.0, shift=0, hangs=None):
        self.kind, self.num_samples, self.log, self.delay, self.shift = kind, num_samples, log, delay, shift
        self.hangs = hangs

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        if self.log:
            fd = os.open(Path(self.log) / str(index), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.write(fd, b".")
            os.close(fd)
        time.sleep(600 if index == self.hangs else self.delay)
        return SAMPLES[self.kind](index + self.shift)

    def fingerprint(self):
        return f"{self.kind} {self.num_samples} {self.shift}"

    def describe(self, index):
        return f"made sample {index}"


class AtOnce(Made):
    """Also reads many at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def reads_in(log):
    """How often each sample was read."""
    return {int(path.name): path.stat().st_size for path in Path(log).iterdir()}


def same(left, right):
    """Equal in type, shape and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return left == right


def start(work, *arguments):
    """A forked process, and the end of a pipe that gets what `work` returns."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: there.send(work(*arguments)))
    process.start()
    there.close()
    return process, here


def in_child(work, *arguments):
    """What `work` returns in a process of its own."""
    process, end = start(work, *arguments)
    try:
        return end.recv()
    finally:
        process.join()
