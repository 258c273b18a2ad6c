"""The small networks of tests/runs are importable here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "runs"), str(Path(__file__).parents[1])]
