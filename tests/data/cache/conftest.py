"""The sources of these tests can be imported, here and in processes that are started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
