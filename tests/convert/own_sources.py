"""Data sets as users write them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Points(Dataset):
    """delay: seconds a sample takes while a file `slow` is in the working directory."""

    def __init__(self, count: int, bad: int = -1, delay: float = 0.0):
        self.count, self.bad, self.delay = count, bad, delay

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("this one is broken")
        if self.delay and any(Path().glob("slow*")):  # the name of a file would be in the fingerprint
            time.sleep(self.delay)
        x = torch.from_numpy(np.random.default_rng(index).standard_normal((2, 4)))
        return x.float(), index % 3


class Random(Points):
    def __getitem__(self, index):
        return torch.rand(4), index % 3


class Uneven(Points):
    """One sample is longer, which nobody sees before it is read."""

    def __getitem__(self, index):
        return torch.zeros(2, 4 + (index == self.bad)), 0


class Stream(IterableDataset):
    def __init__(self, count: int):
        self.count = count

    def __iter__(self):
        for index in range(self.count):
            yield np.full((2, 2), index, np.float32), index


class Dicts(Points):
    def __getitem__(self, index):
        return {"ids": torch.arange(index % 4 + 1), "weight": float(index), "deep": torch.zeros(2, 2)}


class BFloat(Points):
    def __getitem__(self, index):
        return torch.full((3,), index, dtype=torch.bfloat16), index


class Triples(Points):
    def __getitem__(self, index):
        return torch.zeros(2), torch.ones(3), index
