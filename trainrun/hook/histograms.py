"""Histograms of every weight and gradient, as rows of kind `histogram` for trackers.

When: to find layers that do not learn, weights that grow, gradients that vanish. When not: small steps of large
    models without a tracker that shows them. How: `monitor.histograms_every_n_steps=N`. They are computed on the
    device, from at most 2^20 evenly spaced values per tensor, and fetched together, so the host waits for the device
    once. Ranks that hold shards gather one tensor at a time. Gradients are those that the optimizer uses: averaged
    over ranks, unscaled, clipped; for a sparse one its existing rows, for a complex tensor real and imaginary parts.
Source: TensorBoard's histogram dashboard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainrun.interfaces import runs_rank_zero_forwards

if TYPE_CHECKING:
    from trainrun.train_state import TrainState
    from trainrun.training.components import Components

BINS = 64
MOST_VALUES = 2**20


class Histograms:
    """A hook that writes histograms. every_n_steps: steps between rows."""

    def __init__(self, every_n_steps: int) -> None:
        self._every = every_n_steps
        self._gradients: dict[str, Tensor] = {}

    def on_gradients(self, run: Components) -> None:
        """Keep the gradients until the end of the step, because the update clears them."""
        if (run.monitors.step + 1) % self._every == 0 and runs_rank_zero_forwards(run.parallel):
            gradients = {name: param.grad for name, param in run.model.named_parameters()}
            self._gradients |= {
                f"gradients/{name}": grad for name, grad in gradients.items() if grad is not None
            }

    def on_step_end(self, run: Components, state: TrainState) -> None:
        if state.step % self._every or not runs_rank_zero_forwards(run.parallel):
            return
        weights = {f"weights/{name}": param.detach() for name, param in run.model.named_parameters()}
        parts, self._gradients = weights | self._gradients, {}
        tensors = ((name, run.parallel.gather_tensor(part)) for name, part in parts.items())
        row = {"histograms": compute_histograms(tensors)}
        if run.parallel.rank == 0:
            run.monitors.write_row("histogram", state.step, row)


@torch.no_grad()
def compute_histograms(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return `[low, high, counts]` of the finite values of each named tensor that has any."""
    counted: dict[str, Tensor] = {}
    for name, tensor in tensors:
        values = _view_as_real_values(tensor)
        if values.numel():
            counted[name] = _count_in_bins(values)
    if not counted:
        return {}
    numbers = torch.stack(list(counted.values())).tolist()  # the host waits for the device here
    rows = {
        name: (low, high, [int(count) for count in counts])
        for name, (low, high, *counts) in zip(counted, numbers, strict=True)
    }
    return {name: [low, high, counts] for name, (low, high, counts) in rows.items() if sum(counts)}


def _view_as_real_values(tensor: Tensor) -> Tensor:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _count_in_bins(tensor: Tensor) -> Tensor:
    """Return (2 + BINS,) float64: the lowest and highest value, and the number of values in each equal bin between."""
    values = tensor.flatten()[:: -(-tensor.numel() // MOST_VALUES)].double()
    finite = values.isfinite()
    low, high = values.where(finite, torch.inf).amin(), values.where(finite, -torch.inf).amax()
    low, high = torch.where(low == high, low - 0.5, low), torch.where(low == high, high + 0.5, high)
    bins = ((values - low) / (high - low) * BINS).where(finite, BINS).clamp(0, BINS).long()
    bins = bins.where(~finite | (bins < BINS), BINS - 1)  # the highest value belongs to the last bin
    counts = torch.zeros(BINS + 1, dtype=torch.float64, device=values.device)
    counts.scatter_add_(0, bins, torch.ones_like(values))
    return torch.cat((low[None], high[None], counts[:BINS]))
