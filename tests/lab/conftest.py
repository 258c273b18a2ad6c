"""The worlds of these tests can be imported, and a user's own files as by a run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
