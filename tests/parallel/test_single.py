"""One process: every exchange is the identity, and costs next to nothing."""

from __future__ import annotations

import torch
from torch import nn

from trainrun.interfaces import Agreed, Parallel
from trainrun.parallel.single import Single


def test_single_talks_to_itself() -> None:
    parallel: Parallel = Single(torch.device("cpu"))
    model = nn.Identity()
    assert (parallel.rank, parallel.world_size, parallel.device) == (0, 1, torch.device("cpu"))
    assert parallel.wrap(model) is model
    agreed = parallel.agree(7, 2, 1)
    assert agreed == Agreed(7.0, 2, 1)
    assert isinstance(agreed.items, float)
    assert parallel.sum_over_ranks([0.5, 2.0]) == [0.5, 2.0]
    assert parallel.gather({"a": 1}) == [{"a": 1}]
    assert parallel.sync_gradients(last=True) is parallel.sync_gradients(last=False)
    with parallel.sync_gradients(last=True), parallel.sync_gradients(last=False):
        pass
    parallel.barrier()
    parallel.close()
