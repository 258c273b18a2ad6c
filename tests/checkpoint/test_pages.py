from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from trainrun.checkpoint.pages import large_pages

FORKED = """
import gc, mmap, os
from trainrun.checkpoint.pages import large_pages

gc.disable()
knot = [large_pages(2**26)]
knot.append(knot)
del knot  # garbage that was not collected yet
child = os.fork()
if not child:
    own = [mmap.mmap(-1, 2**24, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(8)]  # where the hole is
    gc.collect()
    for memory in own:
        memory[0] = memory[2**24 - 1] = 1
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_the_memory_is_ones_own_and_begins_at_a_page() -> None:
    memory = large_pages(3 * mmap.PAGESIZE)
    assert bytes(memory) == bytes(3 * mmap.PAGESIZE)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="processes share it")
def test_a_forked_process_that_collects_garbage_keeps_its_own_memory() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True)
