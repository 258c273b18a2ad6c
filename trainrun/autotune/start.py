"""The doors of this satellite: what `trainrun.assemble.start_choices` calls where the folder is there."""

from __future__ import annotations

from trainrun.autotune.engine_choice import choose_engine
from trainrun.autotune.forecast import memory_forecast
from trainrun.autotune.number_choices import choose_numbers

__all__ = ["choose_engine", "choose_numbers", "memory_forecast"]
