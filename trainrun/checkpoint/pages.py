"""Memory in large pages, that loader processes do not share.

What: private memory with MADV_HUGEPAGE and MADV_DONTFORK, where the system has them; it begins at a page.
When: what is handed to a disk by O_DIRECT, or overwritten as a whole again and again.
Gain: the kernel clears 2 MiB at a time and pins one page in place of 512. A file of 1.2 GB written through eight blocks
of 4 MiB takes 0.32 to 0.39 s in place of 0.62 to 0.65, with its SHA-256 0.42 to 0.45 in place of 0.57 to 0.74 (two
cores of an AMD EPYC, a virtual disk).
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from functools import cache

LIVING: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
NOT_OURS: list[mmap.mmap] = []  # of the process that this one was forked from


def large_pages(size: int) -> mmap.mmap:
    """Map `size` bytes of private memory, not touched yet, in huge pages if the kernel allows.

    Forked processes do not inherit it: while pages are shared, each overwrite would copy one.
    """
    _mind_forks()
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no large pages
    LIVING.add(memory)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            try:
                memory.madvise(getattr(mmap, advice))
            except OSError as error:
                if error.errno != errno.EINVAL:  # a kernel that was built without
                    raise
    return memory


@cache
def _mind_forks() -> None:
    """A forked process has the objects and not their memory: what took its place would be unmapped with the object,
    which may have been garbage already when the process was forked."""
    os.register_at_fork(after_in_child=lambda: NOT_OURS.extend(LIVING))
