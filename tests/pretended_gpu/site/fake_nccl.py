"""NCCL's place: gloo, on copies in the host's memory. A tensor that lies on the host is refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

NAME = "pretended"


class Done(dist._Work):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._found = result
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._found

    def get_future(self) -> Any:
        return self._future


def down(tree: Any) -> Any:
    if not isinstance(tree, Tensor):
        return [down(part) for part in tree]
    if not tree.is_cuda:
        raise RuntimeError("No backend type associated with device type cpu")
    return tree.detach().cpu()


@torch.no_grad()
def up(places: Any, values: Any) -> None:
    if isinstance(places, Tensor):
        places.detach().copy_(values)
        return
    for place, value in zip(places, values, strict=True):
        up(place, value)


class Group(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "nccl"

    def _do(self, name: str, trees: list[Any], options: Any) -> Done:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")  # NCCL would not wait
        host = [down(tree) for tree in trees]
        getattr(self._gloo, name)(*host, options).wait()
        for tree, values in zip(trees, host, strict=True):
            up(tree, values)
        torch.cuda.set_sync_debug_mode(mode)
        return Done(trees[0])

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:
        return self._do("allreduce", [tensors], opts or c10d.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None) -> Done:
        return self._do("broadcast", [tensors], opts or c10d.BroadcastOptions())

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Done:
        return self._do("allgather", [outputs, tensors], opts or c10d.AllgatherOptions())

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Done:
        parts = list(output.view(-1).chunk(self.size()))
        return self.allgather([parts], [input.reshape(-1)], opts)

    _allgather_base = all_gather_single  # its name until torch 2.12

    def reduce(self, tensors: Any, opts: Any = None) -> Done:
        return self._do("reduce", [tensors], opts or c10d.ReduceOptions())

    def barrier(self, opts: Any = None) -> Done:
        self._gloo.barrier(opts or c10d.BarrierOptions()).wait()
        return Done([])


def registered() -> str:
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, Group, devices=["cuda"])
    return NAME
