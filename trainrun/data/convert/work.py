"""All parts, one after the other: what is not there yet is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from trainrun.data.convert.files import remove_leftovers, writing_to
from trainrun.data.convert.npy import NpyTarget
from trainrun.data.convert.pool import written
from trainrun.data.convert.progress import Shown, progress_bar
from trainrun.data.convert.samples import Samples
from trainrun.data.convert.target import Target


def write_parts(dest: Path, targets: Mapping[str, Target], parts: Mapping[str, Samples], num_workers: int,
                console: Console, say: Callable[[str], None]) -> None:  # fmt: skip
    """DataError: the disk is full, or a sample cannot be read; what is finished stays."""
    kept = [target.kept() for target in targets.values() if isinstance(target, NpyTarget)]
    with writing_to(dest), progress_bar(console) as progress:
        remove_leftovers(dest, frozenset().union(*kept))
        for name, target in targets.items():
            samples, began = parts[name], time.monotonic()
            units = [unit for unit in target.units() if not target.is_done(unit)]
            left = sum(unit.end - unit.begin for unit in units)
            shown = Shown(progress, name, len(samples), len(samples) - left)
            try:
                if units:
                    target.prepare()
                for unit, result in written(target, samples, units, num_workers, shown.at):
                    target.collect(unit, result)
                target.finish(samples)
            except BaseException:
                target.give_up()
                raise
            shown.at(left, now=True)
            there = f", {len(samples) - left:,} of them were there already" if left < len(samples) else ""
            say(f"{name}: {len(samples):,} samples{there} ({time.monotonic() - began:.1f} s)")
