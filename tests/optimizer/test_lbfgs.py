"""LBFGS of one iteration a step: torch's own weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import LBFGS

from trainrun.optimizer.plain_step import build_plain_step


def test_the_weights_are_those_of_a_closure_that_computes_the_loss() -> None:
    x, y = torch.randn(20, 5), torch.randn(20, 1)
    weights = []
    for own in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=1)

        def loss(model: nn.Module = model, optimizer: LBFGS = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            error = (model(x) - y).square().mean()
            error.backward()
            return error

        step = build_plain_step(optimizer)
        for _ in range(6):
            if own:
                loss()
                step()
            else:
                optimizer.step(loss)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
