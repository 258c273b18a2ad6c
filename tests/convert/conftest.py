"""Makes `convert_kit` and `own_sources` importable: by name in a config, as a user's own code is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
