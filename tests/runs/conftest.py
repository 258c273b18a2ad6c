"""Makes `exact_parts` importable, by name in a config, as a user's own code is; and the package `faults`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
