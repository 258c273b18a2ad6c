"""The working directory as a package: `trainrun.here.sched` is the file sched.py in it, whatever else has that name.

A target in the working directory wins over a module of the same name elsewhere, as under `python train.py`, but for
this target alone: the standard library and installed packages keep theirs. Worker processes and ranks, which have the
same working directory, find what was pickled by this name.
"""

from __future__ import annotations

import os

__path__ = [os.getcwd()]
