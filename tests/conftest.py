"""What the tests share: one thread, a clean folder, and short real runs."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
# Importable by name, in a config too, as a user's own code is.
sys.path += [
    str(TESTS / room)
    for room in (".", "runs", "step", "task", "benchmark", "autotune", "convert", "data", "data/cache")
]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product on a GPU
# Whoever starts the tests may ignore or block signals (`nohup`, a job in the background of a script): tests do not.
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import approved  # noqa: E402
import lanes  # noqa: E402  # imports torch, which reads the environment
import matplotlib.font_manager  # noqa: E402, F401  # without a cache of fonts it starts a process
import torch  # noqa: E402
from faults.forks import start_forked  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from PIL import Image  # noqa: E402

from trainrun.cli.main import main  # noqa: E402
from trainrun.config import overrides  # noqa: E402
from trainrun.data import look  # noqa: E402
from trainrun.parallel import launch  # noqa: E402
from trainrun.plots import canvas, draw  # noqa: E402
from trainrun.runs import rank  # noqa: E402
from trainrun.runtime import collector  # noqa: E402

REAL_START = launch.start_rank
USUAL, THRESHOLDS = gc.get_threshold(), (collector.BETWEEN, 10, 10)  # of Python's garbage collector
HUGE_PAGE, COLLAPSE = 2**21, 25  # bytes; MADV_COLLAPSE
MANY_MODULES = 30  # imported by one test: what they hold is not garbage either

Command = Callable[..., "subprocess.CompletedProcess[str]"]
watch = lanes.Watch()
not_written: set[str] = set()  # modules that no test wrote


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every case of a GPU on the pretended one too")


def pytest_configure(config: pytest.Config) -> None:
    watch.install()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case by its words, so that a new case renames no other."""
    if not isinstance(val, list | tuple) or not val or not all(isinstance(word, str) for word in val):
        return None
    name = " ".join(val)
    return name if name.isascii() and name.isprintable() and len(name) <= 120 else None


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test its lane. The longest come first, so that no process waits for another at the end."""
    for item in items:
        if not any(mark.name in lanes.LANES for mark in item.iter_markers()):
            room = item.path.relative_to(TESTS).parts[0]
            needs_gpu = item.get_closest_marker("gpu") is not None
            item.add_marker(lanes.PROCESS if needs_gpu else lanes.LANE_OF.get(room, lanes.UNIT))
    items.sort(key=lambda item: -lanes.LANES.index(lanes.lane_of_item(item)))


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder that all processes of pytest-xdist share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def own_threads() -> None:
    """Name the threads that are there as the runner's: of pytest-xdist, or left by a test. No fork waits for them."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.name = f"trainrun tests {thread.name.removeprefix('trainrun tests ')}"


@pytest.fixture(autouse=True)
def _draw_on_request(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No process that draws outlives a test: a run draws before it ends, and only in a test that asks for `drawn`
    (pictures of one pixel) or `pictures`. To build them takes longer than the rest of a short run."""
    painted, drawn = (name in request.fixturenames for name in ("pictures", "drawn"))
    drawing = draw.draw_all_plots if drawn or painted else lambda run: ""
    monkeypatch.setattr(draw, "start_drawing_process", drawing)
    if not painted:
        monkeypatch.setattr(canvas, "save_figure", save_one_pixel)


def save_one_pixel(_: object, path: Path) -> Path:
    return canvas.write_image_atomically(path, lambda file: Image.new("L", (1, 1)).save(file, format="png"))


@pytest.fixture
def drawn() -> None:
    """The pictures of runs are built, and are of one pixel: `_draw_on_request`."""


@pytest.fixture
def pictures() -> None:
    """The pictures of runs are painted: `_draw_on_request`."""


@pytest.fixture(autouse=True)
def lane(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test does no more than its lane allows."""
    own_threads()
    with watch.of_lane(lanes.lane_of_item(request.node)):
        yield


@pytest.fixture(autouse=True)
def forget_imports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote is imported by no later test in this process, whatever its name; nor is one found in
    the folder of an earlier test, which the command put on the path."""
    path, places = sys.path, list(sys.path)
    yield
    sys.path = path
    path[:] = places
    written = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    new = sys.modules.keys() - not_written
    for name in new:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]
        else:
            not_written.add(name)
    if len(new) > MANY_MODULES and gc.get_threshold() == THRESHOLDS:
        freeze_what_stays()


@pytest.fixture(autouse=True, scope="session")
def own_list(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The runs and caches of tests are not among the user's own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("caches"))
    approved.temporary.append(str(tmp_path_factory.getbasetemp()))


@pytest.fixture(autouse=True, scope="session")
def forked_ranks() -> None:
    """Ranks are forked from this process, but for a test that asks for `real_ranks`; CUDA allows no forks."""
    if not torch.cuda.is_available():
        # Autograd makes its threads at its first use, one for each device, and is then lost to a forked process; torch
        # 2.15 with CUDA libraries counts the devices that torch.compile pretends, if that came first.
        torch.ones((), requires_grad=True).backward()
        launch.start_rank = start_forked  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def seeds_of_the_host_alone() -> None:
    """torch notes for each kind of GPU that it has not looked for yet from which line it was seeded: the text of the
    whole stack, 4 ms a run."""
    if not torch.cuda.is_available():
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def disk_is_not_waited_for() -> None:
    """No test takes the power away: files need not be on the disk. A run waits 30 times for it, 1 to 5 ms each.

    What is synced in which order is seen by tests of `FileLayer`, and commands in processes of their own sync.
    """
    os.fsync = lambda descriptor: None  # type: ignore[assignment]


@pytest.fixture(autouse=True, scope="session")
def composed_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hydra composes each choice of options of ours once; all processes of these tests read copies later (95 ms and 1
    ms). The working directory in it is that of the first, and nothing of ours reads it. Each of our files is parsed
    once, too: a choice that is new reads twenty."""
    compose, folder = overrides._compose_with_hydra, session_folder(tmp_path_factory) / "composed"
    folder.mkdir(exist_ok=True)
    kept: dict[str, bytes] = {}
    ours, load = f"{overrides.find_conf_dir()}{os.sep}", OmegaConf.load

    def parsed(file: Any) -> Any:
        name = str(getattr(file, "name", file))
        if not name.startswith(ours):
            return load(file)
        if name not in kept:
            kept[name] = pickle.dumps(load(file))
        return pickle.loads(kept[name])

    OmegaConf.load = parsed  # type: ignore[method-assign]

    def copied(words: list[str], user_dirs: list[Path]) -> DictConfig:
        if user_dirs:
            return compose(words, user_dirs)
        key = hashlib.sha256(repr((overrides.find_conf_dir(), words)).encode()).hexdigest()
        file = folder / key
        if key not in kept and file.exists():
            kept[key] = file.read_bytes()
        elif key not in kept:
            kept[key] = pickle.dumps(compose(words, user_dirs))
            written = folder / f"{key}-{os.getpid()}"
            written.write_bytes(kept[key])
            written.rename(file)
        return pickle.loads(kept[key])

    overrides._compose_with_hydra = copied


@pytest.fixture(autouse=True, scope="session")
def frozen_once() -> None:
    """What is there now stays: no collection of garbage walks through it (0.3 s each, and several a run), and no
    forked process copies the pages that it lies in. Runs leave the collector to the tests: `real_collector`."""
    freeze_what_stays()
    collapse_into_huge_pages()
    gc.set_threshold(*THRESHOLDS)
    rank.collect_between_steps = lambda: None


def freeze_what_stays() -> None:
    gc.collect()
    gc.freeze()


def collapse_into_huge_pages() -> None:
    """Collapse the memory of this process into huge pages, where Linux has that (6.1). A fork then copies an entry for
    each 2 MB, not for each 4 kB, which takes 4 ms in place of 20; these tests fork some thousand times."""
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *name = line.split()
        if inode == "0" and access.startswith("rw") and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            for address in range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                advise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE), COLLAPSE)


@pytest.fixture
def real_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a run does with Python's garbage collector is what is tested."""
    monkeypatch.setattr(rank, "collect_between_steps", collector.collect_between_steps)
    gc.unfreeze()
    gc.collect()
    gc.set_threshold(*USUAL)
    yield
    freeze_what_stays()
    gc.set_threshold(*THRESHOLDS)


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are looked at in this process, as where no fork is safe, for tests of what is done with their samples: a
    fork of this process takes longer than most of these tests."""
    monkeypatch.setattr(look, "can_fork_safely", lambda: False)


@pytest.fixture
def real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How ranks start is what is tested."""
    monkeypatch.setattr(launch, "start_rank", REAL_START)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the working directory, and on the import path as for a user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


@pytest.fixture
def own(workdir: Path, request: pytest.FixtureRequest) -> Path:
    """`workdir` with own.py, a user's code: the text OWN of the module of the test."""
    (workdir / "own.py").write_text(request.module.OWN)
    return workdir


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """The command ends with 2; its message names each key, and is the approved one."""

    def check(words: list[str], *keys: str) -> None:
        assert main([*words]) == 2
        approved.approve_error(capsys.readouterr().err, *keys)

    return check


@pytest.fixture
def trainrun(workdir: Path) -> Command:
    """The real command in a process of its own, from `workdir`."""

    def call(*words: str, timeout: float = 600.0, **environment: str) -> subprocess.CompletedProcess[str]:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-m", "trainrun", *words],
            cwd=workdir, capture_output=True, text=True, timeout=timeout,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )  # fmt: skip

    return call
