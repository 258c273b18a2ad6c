"""The working directory as a package: `trainrun.here.sched` is the file sched.py in it.

A target in the working directory is preferred to a module of the same name elsewhere, as with `python train.py`.
This applies to the target only: the standard library and installed packages keep their own modules. Workers and
ranks have the same working directory, so they find objects that were pickled under this name.
"""

from __future__ import annotations

import os

__path__ = [os.getcwd()]
