"""What one rank of test_ddp.py does: `ddp_ranks.py RUN_DIR SIZES`. It writes down all it sees."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainrun.config.schema import ParallelConfig
from trainrun.errors import PluginError
from trainrun.folder.run_folder import RunDir, write_json
from trainrun.interfaces import Parallel
from trainrun.monitor.rank_times import RankTimes
from trainrun.parallel.ddp import Ddp
from trainrun.parallel.flight_recorder import read_last_exchanges
from trainrun.parallel.group import Group
from trainrun.parallel.worker import run_as_rank
from trainrun.precision.update import Update
from trainrun.runtime.signals import StopFlag
from trainrun.timing.phases import DATA, OTHER, PhaseTimer

OPTIONS = ParallelConfig(mode="ddp", accelerator="cpu", timeout_seconds=600.0)


def another(parallel: Ddp, **options: Any) -> Ddp:
    """A second `Ddp` of the same ranks."""
    return Ddp(
        Group(parallel.device, parallel.rank, parallel.world_size, parallel._host, parallel.local_world_size),
        **options,
    )


def train_unevenly(parallel: Parallel, sizes: list[list[list[int]]], seen: dict[str, Any]) -> None:
    torch.manual_seed(3 + parallel.rank)  # rank 0's weights count
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    wrapped = parallel.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1000, 6, dtype=torch.float64, generator=generator)
    y = torch.randn(1000, 2, dtype=torch.float64, generator=generator)
    first = 0
    for number, step in enumerate(sizes):
        start = first + sum(sum(mine) for mine in step[: parallel.rank])
        first += sum(sum(mine) for mine in step)
        own = step[parallel.rank]
        agreed = parallel.agree(sum(own), 0, 0)
        for i, count in enumerate(own):
            rows = slice(start, start + count)
            start += count
            with parallel.sync_gradients(last=i == len(own) - 1):
                loss_sum = (wrapped(x[rows]) - y[rows]).square().sum()
                (loss_sum / agreed.items).backward()
            if number == 0:
                moment = "last" if i == len(own) - 1 else "first"
                seen[f"gradient_after_{moment}"] = model[0].weight.grad.tolist()
        optimizer.step()
        optimizer.zero_grad()
    seen["weights"] = {name: value.tolist() for name, value in model.state_dict().items()}


def talk(parallel: Parallel, seen: dict[str, Any]) -> None:
    rank, last = parallel.rank, parallel.world_size - 1
    seen["agreed"] = [
        parallel.agree(10 + 3 * rank, 0, 0),
        parallel.agree(10 + 3 * rank, 2 if rank == last else 1, 1 if rank == 0 else 0),
        parallel.agree(0, 0, 3 if rank == last else 0),
    ]
    seen["sums"] = parallel.sum_over_ranks([0.1 * (rank + 1), float(rank), 2.0**40])
    seen["sums_of_nothing"] = parallel.sum_over_ranks([])
    seen["ranks_here"] = parallel.local_world_size
    seen["gathered"] = parallel.gather({"rank": rank, "words": ["a"] * rank})
    clock = iter([0.0, float(rank + 1)])  # of data: one second on rank 0, two on rank 1, ...
    phases = PhaseTimer(0.0, clock=lambda: next(clock))
    phases.open(DATA)
    phases.open(OTHER)
    seen["times"] = RankTimes(phases, parallel).measure(1)[0]
    parallel.barrier()


def follow_buffers(parallel: Parallel, seen: dict[str, Any]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    norm = model[0]
    norm.running_mean.fill_(1.0 + parallel.rank)
    wrapped = parallel.wrap(model)
    buffers: dict[str, Any] = {"at_start": norm.running_mean.tolist()}
    batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(parallel.rank))
    for last in (False, True):
        with parallel.sync_gradients(last=last):
            wrapped(batch).sum().backward()
    buffers["own_batch_mean"] = batch.mean(0).tolist()
    buffers["running_mean"] = norm.running_mean.tolist()
    buffers["running_var"] = norm.running_var.tolist()
    buffers["num_batches_tracked"] = int(norm.num_batches_tracked)
    seen["buffers"] = buffers


class Crossed(nn.Module):
    """Uses its layers in another order than it names them, so gradients come in another order too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(61, 61) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (3, 0, 5, 1, 4, 2):
            x = torch.tanh(self.layers[i](x)) * 2
        return x


def resume(parallel: Ddp, seen: dict[str, Any]) -> None:
    """Three steps at once, and one step, a new wrap, two steps: float32, in many small buckets."""
    torch.manual_seed(11)
    first = Crossed()
    bits: dict[str, Any] = {}
    for name, stops in (("never_stopped", (3,)), ("stopped_and_resumed", (1, 2))):
        model = copy.deepcopy(first)
        data = torch.Generator().manual_seed(parallel.rank)
        for num_steps in stops:
            model = copy.deepcopy(model)
            wrapped = (again := another(parallel, bucket_cap_mb=0.02)).wrap(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            for _ in range(num_steps):
                with again.sync_gradients(last=True):
                    wrapped(torch.randn(16, 61, generator=data)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        bits[name] = [value.double().sum().item() for value in model.state_dict().values()]
    seen.update(bits)


def wrap_quietly(parallel: Ddp, seen: dict[str, Any]) -> None:
    model = nn.Linear(3, 3)
    before = torch.get_rng_state()
    another(parallel).wrap(model)
    seen["random_state_kept"] = bool(torch.equal(before, torch.get_rng_state()))
    seen["no_gradient_after_wrap"] = all(parameter.grad is None for parameter in model.parameters())


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def leave_parameters_unused(parallel: Ddp, seen: dict[str, Any]) -> None:
    for allowed in (True, False):
        again = another(parallel, find_unused_parameters=allowed)
        wrapped = again.wrap(HalfUsed())
        finished = 0
        try:
            for _ in range(2):
                with again.sync_gradients(last=True):
                    wrapped(torch.ones(1, 2)).sum().backward()
                finished += 1
            seen["unused_allowed"] = allowed
        except Exception as error:
            seen["unused"] = [type(error).__name__, str(error), finished]


def look_up_sparsely(parallel: Ddp, seen: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Flatten(), nn.Linear(4, 1))
    wrapped = (again := another(parallel)).wrap(model)
    with again.sync_gradients(last=True):
        wrapped(torch.tensor([[1, 2 + parallel.rank]])).sum().backward()
    seen["sparse"] = model[0].weight.grad.to_dense().tolist()


def train_what_was_frozen(parallel: Ddp, seen: dict[str, Any]) -> None:
    """Unfreeze a layer, as a hook between two steps does and then as a forward does."""
    torch.manual_seed(11)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    model[:2].requires_grad_(False)
    (again := another(parallel)).wrap(model)
    assert again._ddp is not None
    wrapped, optimizer = again._ddp, torch.optim.SGD(model.parameters(), lr=0.1)
    update = Update(model, parallel.device, parallel=again)
    for number in range(4):
        if number == 1:
            model[1].requires_grad_(True)
            update.reload_optimizer_state()
        if number == 2:
            model[0].requires_grad_(True)
        with again.sync_gradients(last=True):
            loss = wrapped(torch.full((1, 2), 1.0 + parallel.rank)).square().sum()
            update.backward(loss, 1.0)
        update.optimizer_step(optimizer, want_norm=False)
        seen[f"thawed after {number}"] = [value.tolist() for value in model.parameters()]


def call_a_part(parallel: Ddp, seen: dict[str, Any]) -> None:
    wrapped = (again := another(parallel)).wrap(HalfUsed())
    try:
        with again.sync_gradients(last=True):
            wrapped.used(torch.ones(1, 2))
    except PluginError as error:
        seen["part"] = str(error)


def count_exchanges(parallel: Ddp, seen: dict[str, Any]) -> None:
    """Of one step with two micro-batches, by group."""
    counted = another(parallel)
    wrapped = counted.wrap(nn.Linear(3, 2))
    before = read_last_exchanges()
    counted.agree(2, 0, 0)
    for last in (False, True):
        with counted.sync_gradients(last=last):
            wrapped(torch.ones(1, 3)).sum().backward()
    seen["exchanges"] = {
        group: number - before.get(group, [0])[0] for group, (number, _) in read_last_exchanges().items()
    }


def compress(parallel: Ddp, seen: dict[str, Any]) -> None:
    compressed = another(parallel, compress="bf16")
    model = nn.Linear(2, 1, bias=False)
    wrapped = compressed.wrap(model)
    with compressed.sync_gradients(last=True):
        wrapped(torch.tensor([[1 + 2**-12, 3.0 + parallel.rank]])).sum().backward()
    seen["compressed"] = model.weight.grad.tolist()


def work(parallel: Parallel, flag: StopFlag) -> int:
    assert isinstance(parallel, Ddp)
    seen: dict[str, Any] = {}
    train_unevenly(parallel, json.loads(sys.argv[2]), seen)
    static = another(parallel, static_graph=True, gradient_as_bucket_view=False)
    train_unevenly(static, json.loads(sys.argv[2]), seen_static := {})
    seen["weights_of_static_graph"] = seen_static["weights"]
    talk(parallel, seen)
    follow_buffers(parallel, seen)
    resume(parallel, seen)
    wrap_quietly(parallel, seen)
    leave_parameters_unused(parallel, seen)
    look_up_sparsely(parallel, seen)
    train_what_was_frozen(parallel, seen)
    call_a_part(parallel, seen)
    count_exchanges(parallel, seen)
    compress(parallel, seen)
    write_json(Path(sys.argv[1], f"seen{parallel.rank}.json"), seen)
    return 0


if __name__ == "__main__":
    sys.exit(run_as_rank(RunDir(Path(sys.argv[1])), OPTIONS, work))
