"""The doors of this satellite: what `trainrun.assemble.start_choices` calls where the folder is there."""

from __future__ import annotations

from trainrun.autotune.forecast import memory_forecast
from trainrun.autotune.number_choices import choose_numbers

__all__ = ["choose_numbers", "memory_forecast"]
