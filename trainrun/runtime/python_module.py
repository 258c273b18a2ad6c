"""The command that runs a module as a program in a new process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

# Python puts the working directory first, also for `-m`, so that a `types.py` in it would be taken for Python's own.
PROGRAM = (
    "import sys; sys.path[0] or sys.path.append(sys.path.pop(0)); import runpy; "
    "runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
)


def module_command(name: str, *words: str) -> list[str]:
    """Return the command that runs a module as a program. It imports from the working directory only if this process
    does.
    """
    with suppress(OSError):  # the working directory may be gone
        if sys.path and sys.path[0] not in ("", os.getcwd()):
            return [sys.executable, "-c", PROGRAM.format(name=name), *words]
    return [sys.executable, "-m", name, *words]
