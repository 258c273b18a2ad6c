"""The functions that `trainrun.assemble.start_choices` calls if this folder is installed."""

from __future__ import annotations

from trainrun.autotune.forecast import memory_forecast
from trainrun.autotune.number_choices import choose_numbers

__all__ = ["choose_numbers", "memory_forecast"]
