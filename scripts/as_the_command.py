"""Imported ahead of torch: threads wait asleep for each other, as `python -m trainrun` has them, for both sides."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
