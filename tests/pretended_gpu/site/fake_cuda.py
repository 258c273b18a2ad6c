"""`torch.cuda` over the pretended GPU, and a process group for its tensors in NCCL's place."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import torch

TOTAL = 1 << 33
MODES = {"default": 0, "warn": 1, "error": 2, 0: 0, 1: 1, 2: 2}
NAME = "Pretended GPU"
PROPERTIES = SimpleNamespace(name=NAME, major=8, minor=0, total_memory=TOTAL, multi_processor_count=108)

gpu: Any = torch.ops.pretended_gpu
started = False


def start() -> None:
    global started
    started = torch.cuda._initialized = True


def is_available() -> bool:
    gpu.count()  # from then on no forked process can use it
    return True


def index_of(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(gpu.device()) if index is None else index


class Stream(torch.Stream):
    """which: an existing one; None makes another."""

    def __new__(cls, device: Any = None, priority: int = 0, which: int | None = None) -> Any:
        start()
        place = index_of(device)
        if which is None:
            return super().__new__(cls, device=torch.device("cuda", place))
        return super().__new__(cls, stream_id=which, device_index=place, device_type=1)

    def __init__(self, *given: Any, **more: Any) -> None: ...

    @property
    def place(self) -> tuple[int, int]:
        return self.device.index, self.stream_id

    def wait_stream(self, other: Any) -> None:
        gpu.wait_stream(*self.place, *other.place)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        gpu.may_wait()  # torch asks of streams, not of events
        self.record_event().synchronize()

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, **more: Any) -> None:
        self._timed, self._number, self._at = enable_timing, 0, 0.0

    def record(self, stream: Any = None) -> None:
        self._forget()
        self._number = gpu.record_event(*(stream or current_stream()).place)
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        if self._number:
            gpu.wait_event(self._number, *(stream or current_stream()).place)

    def query(self) -> bool:
        return not self._number or gpu.query_event(self._number)

    def synchronize(self) -> None:
        if self._number:
            gpu.sync_event(self._number)

    def elapsed_time(self, other: Any) -> float:
        if not (self._timed and other._timed and self._number and other._number):
            raise RuntimeError("both events must be made with enable_timing=True and be recorded")
        return max(other._at - self._at, 1e-9) * 1e3

    def _forget(self) -> None:
        if self._number:
            gpu.forget_event(self._number)

    def __del__(self) -> None:
        self._forget()


class CUDAGraph:
    alive: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()
    pools: set[tuple[int, int]] = set()

    def __init__(self, keep_graph: bool = False) -> None:
        self._which, self._pool = 0, (0, 0)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **more: Any) -> None:
        if pool in self.pools and all(pool != graph._pool for graph in self.alive):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: the pool ended with its last graph")
        self._pool = pool or (0, len(self.pools) + 1)
        self.pools.add(self._pool)
        self.alive.add(self)
        gpu.begin_capture()

    def capture_end(self) -> None:
        self._which = gpu.end_capture()

    def replay(self) -> None:
        gpu.replay(self._which)

    def reset(self) -> None:
        gpu.forget_graph(self._which)

    def pool(self) -> tuple[int, int]:
        return self._pool


def current_stream(device: Any = None) -> Stream:
    return Stream(device, which=gpu.stream())


def set_stream(stream: Any) -> None:
    if stream is not None:
        gpu.set_stream(stream.stream_id)


def set_device(device: Any) -> None:
    start()
    if isinstance(device, torch.device) and device.index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
    gpu.set_device(index_of(device))


def exchange_device(index: int) -> int:
    was = int(gpu.device())
    if index >= 0:
        gpu.set_device(index)
    return was


def memory(place: int) -> Any:
    return lambda device=None: gpu.memory()[place]


def functions() -> dict[str, Any]:
    """What takes the place of torch's functions of the same names."""
    count = gpu.num_devices()
    generators = tuple(gpu.default_generator(i) for i in range(count))
    return {
        "is_available": is_available, "_is_compiled": lambda: True, "device_count": lambda: count,
        "is_initialized": lambda: started, "_lazy_init": start, "init": start, "_is_in_bad_fork": lambda: False,
        "current_device": gpu.device, "set_device": set_device, "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device, "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (8, 0), "get_device_name": lambda device=None: NAME,
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(device, which=0), "set_stream": set_stream,
        "is_current_stream_capturing": gpu.is_capturing, "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda device=None: gpu.sync_all(), "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: gpu.sync_mode(MODES[mode]), "get_sync_debug_mode": gpu.get_sync_mode,
        "mem_get_info": lambda device=None: (gpu.memory()[2] - gpu.memory()[0], TOTAL),
        "memory_allocated": memory(0), "memory_reserved": memory(0), "device_memory_used": memory(0),
        "max_memory_allocated": memory(1), "max_memory_reserved": memory(1),
        "reset_peak_memory_stats": lambda device=None: gpu.reset_peak(),
        "memory_stats": lambda device=None: {"num_alloc_retries": gpu.memory()[3]},
        "set_per_process_memory_fraction": lambda share, device=None: gpu.set_limit(int(share * TOTAL)),
        "utilization": lambda device=None: 50, "default_generators": generators,
        "manual_seed": lambda seed: generators[gpu.device()].manual_seed(seed),
        "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in generators],
    }  # fmt: skip


def clone_storage(storage: Any) -> Any:
    """`UntypedStorage.clone`, which a build without CUDA refuses."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.clone().untyped_storage()


def install() -> None:
    for name, value in functions().items():
        for module in (
            torch.cuda,
            torch.cuda.memory,
            torch.cuda.random,
            torch.cuda.streams,
            torch.cuda.graphs,
        ):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    core: Any = torch._C
    core._host_emptyCache = lambda: None
    core._cuda_getCurrentRawStream = lambda index: gpu.stream()
    torch.storage._StorageBase.clone = clone_storage  # type: ignore[method-assign]
    if torch.distributed.is_available():
        with_group()


def with_group() -> None:
    import torch.distributed as dist

    make = dist.init_process_group

    def init_process_group(backend: Any = None, *given: Any, **more: Any) -> None:
        if backend == "nccl":
            import fake_nccl

            backend = fake_nccl.registered()
        make(backend, *given, **more)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
