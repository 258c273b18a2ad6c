"""Assign GPUs and groups of cores to jobs that run side by side. All sweeps of a user share the locks of devices.

The lock (flock) of each GPU or core is a file in the user's state folder. The job inherits the open file, so its device
stays locked until the job ends, even if the sweep is killed.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trainrun.errors import ConfigError
from trainrun.folder.lock import open_locked_file
from trainrun.folder.seal import find_key_path
from trainrun.output import format_count
from trainrun.parallel.devices import count_gpus
from trainrun.runtime.machine import read_host_memory
from trainrun.sweep.options import SweepOptions

JOB_BYTES = 2**30  # of host memory that a job is assumed to need, where nobody said how many run


@dataclass(frozen=True)
class DevicePlace:
    """A part of the machine for one job: a share of a GPU, or cores. locks: the names of its lock files."""

    locks: tuple[str, ...]
    gpu: str = ""
    cores: tuple[int, ...] = ()


@dataclass
class Lease:
    """Places that are locked for a job. files: the open lock files, which the job inherits."""

    places: list[DevicePlace]
    files: list[int]

    @property
    def cores(self) -> list[int]:
        return sorted({core for place in self.places for core in place.cores})

    def environment(self) -> dict[str, str]:
        gpus = [place.gpu for place in self.places if place.gpu]
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}

    def settings(self, words: Sequence[str]) -> list[str]:
        """Return the number of threads as a setting, unless the overrides of the job give one."""
        if not self.cores or any(word.lstrip("+").startswith("trainer.num_threads=") for word in words):
            return []
        return [f"trainer.num_threads={len(self.cores)}"]

    def release(self) -> None:
        while self.files:
            os.close(self.files.pop())


class Leases:
    """The places of a sweep, which jobs lock and release. folder: the folder of the lock files."""

    def __init__(self, places: list[DevicePlace], folder: Path | None = None) -> None:
        self.places = places
        self._folder = folder or find_key_path().with_name("leases") / platform.node()  # homes may be shared
        self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, count: int) -> Lease | None:
        """Lock `count` places on different GPUs for a job. Return None if they are not all free now.

        All places are locked or none, so no two jobs wait for each other.
        """
        lease = Lease([], [])
        for place in self.places:
            if len(lease.places) == count:
                break
            on_same_gpu = bool(place.gpu) and any(place.gpu == other.gpu for other in lease.places)
            files = [] if on_same_gpu else self._lock(place)
            if files:
                lease.places.append(place)
                lease.files += files
        if len(lease.places) == count:
            return lease
        lease.release()
        return None

    def _lock(self, place: DevicePlace) -> list[int]:
        """Return the open files of all locks of a place; none if one of them is taken."""
        files: list[int] = []
        for name in place.locks:
            descriptor = open_locked_file(self._folder / name, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if descriptor is None:
                while files:
                    os.close(files.pop())
                return []
            files.append(descriptor)
        return files


def find_places(
    options: SweepOptions,
    num_jobs: int | None,
    uses_gpus: bool,
    measure_gain: Callable[[Sequence[int]], float | None] | None = None,
) -> tuple[list[DevicePlace], str]:
    """Choose places for jobs that run side by side. Return them and the reason; none to run one job at a time.

    num_jobs: None if only the time ends the sweep. uses_gpus: whether jobs may use GPUs. measure_gain: returns how much
    two jobs of one thread train, relative to one of two threads; None if the number of threads is set.
    """
    if options.jobs == 1 and options.per_device == 1:
        return [], ""
    gpus = gpu_names() if uses_gpus else []
    if gpus:
        places = gpu_places(gpus, options.per_device)[: options.jobs]
        about = f"on {format_count(len(gpus), 'GPU')}"
        return places, f"{format_count(len(places), 'job')} side by side {about}"
    if options.per_device > 1:
        raise ConfigError(
            f"sweep.per_device={options.per_device}: no GPU is used here; set sweep.jobs instead"
        )
    cores = core_numbers()
    count, reason = options.jobs or 0, ""
    if options.jobs is None:
        count = min(len(cores), max(read_host_memory().free // JOB_BYTES, 1))
        count = count if num_jobs is None else min(count, num_jobs)
        if measure_gain is not None and count > 1:
            gain = measure_gain(cores[:2])
            if gain is not None:
                count = min(count, len(cores) // 2) if gain < 1 else count
                reason = f" (two jobs of one thread train {gain:.2g}x as much as one of two)"
    each = max(len(cores) // count, 1)
    about = format_count(each, "core") + (" each" if count > 1 else "")
    return core_places(cores, count), f"{format_count(count, 'job')} side by side, {about}{reason}"


def most_devices(places: Sequence[DevicePlace]) -> int:
    """Return the number of places that one job can have: a share of each GPU, or all groups of cores."""
    return len({place.gpu for place in places if place.gpu}) or len(places)


def gpu_names() -> list[str]:
    """Return the GPUs of this process as CUDA_VISIBLE_DEVICES names them."""
    count = count_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]


def gpu_places(gpus: Sequence[str], per_device: int) -> list[DevicePlace]:
    """Return the shares of each GPU, the first share of all GPUs first."""
    return [DevicePlace((f"gpu-{gpu}.{share}",), gpu=gpu) for share in range(per_device) for gpu in gpus]


def core_numbers() -> list[int]:
    with suppress(AttributeError):  # Linux only
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_places(cores: Sequence[int], count: int) -> list[DevicePlace]:
    """Divide cores into groups of about equal size. If there are more places than cores, places share cores."""
    if count > len(cores):
        turns = [(cores[number % len(cores)], number // len(cores)) for number in range(count)]
        return [DevicePlace((f"core-{core}.{turn}",), cores=(core,)) for core, turn in turns]
    bounds = [len(cores) * number // count for number in range(count + 1)]
    groups = [tuple(cores[first:last]) for first, last in pairwise(bounds)]
    return [DevicePlace(tuple(f"core-{core}.0" for core in group), cores=group) for group in groups]
