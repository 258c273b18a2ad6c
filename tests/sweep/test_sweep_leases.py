"""Places for jobs side by side: no place is used twice, and none is idle while a job waits for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from trainrun.errors import ConfigError
from trainrun.sweep import job_queue, run_sweep
from trainrun.sweep.job_queue import JobQueue, StopRelay
from trainrun.sweep.jobs import open_sweep
from trainrun.sweep.options import SweepOptions
from trainrun.sweep.places import leases
from trainrun.sweep.places.leases import DevicePlace, Lease, Leases, core_places, find_places, gpu_places
from trainrun.sweep.progress import SweepProgress

Command = Callable[[list[str], Path], list[str]]


class FakeProcess:
    """A job that ends after some looks at it. used: the GPUs of those that run."""

    pid = 0
    used: ClassVar[list[str]] = []
    generator: ClassVar[random.Random] = random.Random(0)

    def __init__(self, command: list[str], env: dict[str, str], **about: object) -> None:
        self._folder, self._gpu = Path(command[0]), env["CUDA_VISIBLE_DEVICES"]
        assert self._gpu not in self.used
        self.used.append(self._gpu)
        self._looks = self.generator.randrange(1, 5)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self._looks -= 1
        if self._looks == 0:
            (self._folder / "status.json").write_text('{"state": "done", "value": 1.0, "monitor": "val/acc"}')
            self.used.remove(self._gpu)
            self.returncode = 0
        return self.returncode


def test_no_place_is_used_twice_and_none_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 jobs on eight pretended GPUs, each of which ends at another time."""
    monkeypatch.setattr(job_queue, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None))
    monkeypatch.setattr(job_queue.subprocess, "Popen", FakeProcess)
    sweep = open_sweep([["lr=range(100)"]], tmp_path / "sweep")
    places = Leases(gpu_places([str(gpu) for gpu in range(8)], 1), tmp_path / "leases")
    queue = JobQueue(sweep, lambda words, folder: [str(folder)], StopRelay(), SweepProgress(sweep, 8), places)
    fill_places = queue._fill_places

    def fill_and_check() -> bool:
        goes_on = fill_places()
        assert len(FakeProcess.used) == 8 or not queue._waiting
        return goes_on

    monkeypatch.setattr(queue, "_fill_places", fill_and_check)
    queue.run()
    assert [job.result.state for job in sweep.jobs.values()] == ["done"] * 100
    assert FakeProcess.used == []
    lease = places.take(8)
    assert lease is not None  # none is held any more
    lease.release()


def test_a_job_of_several_devices_takes_all_or_none(tmp_path: Path) -> None:
    places = Leases(gpu_places(["0", "1", "2", "3"], 1), tmp_path)
    first, second = places.take(3), places.take(2)
    assert first is not None
    assert second is None  # one is free, and stays so for others
    assert (single := places.take(1)) is not None
    first.release()
    third = places.take(2)
    assert third is not None
    assert len({*third.environment()["CUDA_VISIBLE_DEVICES"].split(","), *single.environment().values()}) == 3


def test_jobs_that_share_a_gpu_are_on_different_ones_first(tmp_path: Path) -> None:
    places = Leases(gpu_places(["0", "1"], 2), tmp_path)
    taken = [places.take(1) for _ in range(4)]
    assert [lease.environment()["CUDA_VISIBLE_DEVICES"] for lease in taken if lease] == ["0", "1", "0", "1"]
    assert leases.most_devices(places.places) == 2  # a job of several ranks has a GPU for each


@pytest.mark.parametrize(
    ("cores", "count", "groups"),
    [
        (range(4), 2, [(0, 1), (2, 3)]),
        (range(5), 2, [(0, 1), (2, 3, 4)]),
        (range(2), 2, [(0,), (1,)]),
        ([3, 7], 3, [(3,), (7,), (3,)]),
    ],
)
def test_cores_are_shared_out(cores: list[int], count: int, groups: list[tuple[int, ...]]) -> None:
    places = core_places(list(cores), count)
    assert [place.cores for place in places] == groups
    names = [name for place in places for name in place.locks]
    assert len(names) == len(set(names))


def test_auto_takes_the_gpus_or_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "core_numbers", lambda: [0, 1, 2])
    monkeypatch.setattr(leases, "count_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    auto = SweepOptions(jobs=None)
    assert [place.gpu for place in find_places(auto, 10, uses_gpus=True)[0]] == ["2", "3", "5", "7"]
    places, about = find_places(auto, 2, uses_gpus=False)
    assert [place.cores for place in places] == [(0,), (1, 2)]
    assert about == "2 jobs side by side, 1 core each"
    assert len(find_places(auto, None, uses_gpus=False)[0]) >= 1  # of a search that its time ends
    assert find_places(SweepOptions(), 10, uses_gpus=True)[0] == []
    with pytest.raises(ConfigError, match="no GPU is used here"):
        find_places(SweepOptions(per_device=2), 10, uses_gpus=False)


@pytest.mark.parametrize(
    ("gain", "places"),
    [(1.4, [(0,), (1,), (2,), (3,)]), (0.7, [(0, 1), (2, 3)]), (None, [(0,), (1,), (2,), (3,)])],
)
def test_auto_measures_whether_one_thread_a_job_is_faster(
    gain: float | None, places: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "core_numbers", lambda: [0, 1, 2, 3])
    chosen, about = find_places(SweepOptions(jobs=None), 10, uses_gpus=False, measure_gain=lambda cores: gain)
    assert [place.cores for place in chosen] == places
    assert (str(gain) in about) == (gain is not None)
    three = find_places(SweepOptions(jobs=3), 10, uses_gpus=False, measure_gain=lambda cores: 1 / 0)[0]
    assert len(three) == 3


@pytest.mark.process
def test_jobs_run_side_by_side_each_on_its_own_device(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job waits until three run; a fourth starts when a place is free."""
    monkeypatch.setattr(run_sweep, "uses_gpus", lambda sweep: True)
    monkeypatch.setattr(leases, "gpu_names", lambda: ["4", "5", "6"])
    words = ["do=meet", "number=3", "lr=1,2,3,4", "sweep.jobs=auto"]
    assert run_sweep.run_sweep([words], tmp_path / "sweep", command) == 0
    jobs = [json.loads((path / "here").read_text()) for path in sorted((tmp_path / "sweep").glob("?-*"))]
    assert [job["gpus"] for job in jobs[:3]] == ["4", "5", "6"]
    assert jobs[3]["gpus"] in ("4", "5", "6")


@pytest.mark.process
def test_jobs_on_cores_get_their_number_of_threads(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = leases.core_numbers()[0]
    monkeypatch.setattr(leases, "core_numbers", lambda: [core])
    words = ["do=meet", "number=2", "lr=1,2", "sweep.jobs=2"]
    assert run_sweep.run_sweep([words], tmp_path / "sweep", command) == 0
    for path in (tmp_path / "sweep").glob("?-*"):
        told = json.loads((path / "here").read_text())
        assert told["words"][-1] == "trainer.num_threads=1"
        assert told["cores"] in ([core], [])
        assert "trainer.num_threads=1" not in path.name
    assert Lease([DevicePlace(("x",), cores=(1, 2))], []).settings(["+trainer.num_threads=8"]) == []
