"""What a run imports, imported once: by the parent, for all the runs that it forks."""

# ruff: noqa: F401
from __future__ import annotations

import numpy
import psutil
import rich.progress
import torch
import torch.distributed.algorithms.join
import torch.nn.parallel
import torch.utils.data

import trainrun.cli.resume_command
import trainrun.parallel.worker
import trainrun.runs.rank
import trainrun.runs.run

torch.set_num_threads(1)


def for_ranks() -> None:
    """DistributedDataParallel loads the compiler, which takes seconds."""
    import torch._dynamo
