"""Torch's libraries, loaded beside the reading of the words, and not after it.

What: a thread opens them as `import torch` does, in the same order, without Python's lock; the import then finds them
there. When: a command that will train, on Linux, with a second core. When not: where torch is there already, or built
otherwise, or where LD_LIBRARY_PATH may hold CUDA libraries of another release, among which the import chooses better;
what cannot be opened here is left to the import, which says why. What they read of the environment has to
be there before. Gain: the first step of a run comes after 0.93 of the time (2 cores of an Intel Xeon, 1.28 to 1.19 s;
`python scripts/bench_start.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from pathlib import Path

LIBRARIES = {"libtorch_global_deps.so": "RTLD_GLOBAL", "libtorch.so": "RTLD_LOCAL"}  # as torch 2.8 to 2.13 do

_threads: list[threading.Thread] = []


def load_torch_early() -> None:
    """Returns at once. Once, in a process that has nothing of torch yet."""
    if _threads or "torch" in sys.modules or sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
        return
    found = importlib.util.find_spec("torch")  # looks for its folder only
    folders = list(found.submodule_search_locations or []) if found is not None else []
    if folders and not foreign_cuda(Path(folders[0], "lib")):
        # No daemon: a process that ends while its libraries are being opened is aborted.
        _threads.append(
            threading.Thread(target=_open, args=(Path(folders[0], "lib"),), name="trainrun torch")
        )
        _threads[0].start()


def foreign_cuda(folder: Path) -> bool:
    """Whether a torch with CUDA would be given libraries by the environment rather than its own."""
    return bool(os.environ.get("LD_LIBRARY_PATH")) and (folder / "libtorch_cuda.so").exists()


def leave_without_it(code: int) -> None:
    """Ends a process that never came to import torch: the usual way waits until all is opened, and closes it again."""
    if not _threads or "torch" in sys.modules:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or full, or None
            stream.flush()
    os._exit(code)


def _open(folder: Path) -> None:
    """By a foreign function, which lets go of Python's lock; `ctypes.CDLL` keeps it."""
    import ctypes  # 2 ms, which an answer without a run need not wait for

    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, visible in LIBRARIES.items():
        if not dlopen(os.fsencode(folder / name), os.RTLD_NOW | getattr(os, visible)):
            return
