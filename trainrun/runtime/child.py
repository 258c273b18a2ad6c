"""The command of another Python process whose imports find what those of this one do."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

# Python puts the working directory first, also for `-m`, so that a `types.py` in it would be taken for Python's own.
MODULE = (
    "import sys; sys.path[0] or sys.path.append(sys.path.pop(0)); import runpy; "
    "runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
)


def module_command(name: str, *words: str) -> list[str]:
    """Run a module as a program. The working directory comes first among its imports only where it does here."""
    with suppress(OSError):  # the working directory may be gone
        if sys.path and sys.path[0] not in ("", os.getcwd()):
            return [sys.executable, "-c", MODULE.format(name=name), *words]
    return [sys.executable, "-m", name, *words]
