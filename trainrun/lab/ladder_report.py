"""The folklore on this machine, for people: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trainrun.lab.gate import EXACT
from trainrun.lab.ladder import NO_TIME, Height, Heights
from trainrun.lab.rungs import CADENCE, OTHER
from trainrun.lab.statistics import Ratio
from trainrun.lab.tune_report import interval, megabytes, off
from trainrun.monitor.readable import counted, quantity
from trainrun.plots.bars import Bar, draw_bars, short
from trainrun.plots.compare import text_table

HEAD = ("rung", "alone", "interval", "says", "on top", "memory", "loss off", "training", "words")
LONGEST_REASON: Final = 20
CHANGES = {EXACT: "the same", "numeric": "rounds more", OTHER: "another", CADENCE: "the same"}


def says(ratio: Ratio) -> str:
    if ratio.low > 1:
        return "helps"
    return "HURTS" if ratio.high < 1 else "not seen"


def table(found: Heights) -> str:
    return text_table(HEAD, [line(height) for height in found.rungs])


def line(height: Height) -> list[str]:
    words = " ".join(height.words)
    if height.alone is None:
        reason = height.reason if len(height.reason) <= LONGEST_REASON else "see below"
        return [height.title, "-", "", reason, "", "", "", CHANGES[height.mathematics], words]
    together = (
        ""
        if height.together is None
        else f"{height.together.value:.2f}x{'' if height.held else ' (left out)'}"
    )
    on = "is on; without it: " if height.on else ""
    return [
        height.title, f"{height.alone.value:.2f}x", interval(height.alone), says(height.alone), together,
        megabytes(height.peak_bytes), off(height.loss), CHANGES[height.mathematics], f"{on}{words}",
    ]  # fmt: skip


def summary(found: Heights) -> list[str]:
    noise = found.noise
    lines = [f"{rung.title}: {rung.reason}" for rung in found.rungs if len(rung.reason) > LONGEST_REASON]
    lines += [f"noise: your words against themselves {noise}, at {quantity(found.speed)} {found.unit}/s"]
    if found.total is not None:
        told = f"{found.total.value:.2f}x ({found.total.low:.2f} to {found.total.high:.2f}, 99 %, fresh processes)"
        lines.append(
            f"total of all that is the same training and helped: {told}: {' '.join(found.total_words)}"
        )
    elif found.total_words:
        lines.append(f"total: not measured, {found.total_reason}; what helped: {' '.join(found.total_words)}")
    else:
        lines.append(f"total: {nothing_held(found)}")
    return lines


def nothing_held(found: Heights) -> str:
    unmeasured = sum(rung.reason == NO_TIME for rung in found.rungs)
    if unmeasured:
        return f"not known: for {counted(unmeasured, 'rung')} there was no time (--budget), and no other helped clearly"
    return "nothing that is the same training helped clearly; your words are as fast as the folklore"


def picture(found: Heights, path: Path, words: str) -> Path:
    alone = [bar(height.title, height.alone, height.reason) for height in found.rungs]
    top = [bar(height.title, height.together, "" if height.alone is None else "-") for height in found.rungs]
    alone.append(Bar("all that helped, measured anew", None))
    top.append(bar("all that helped, measured anew", found.total, "not measured"))
    about = "green: helps, orange: hurts, grey: not told from 1; lines: 95 % intervals, 99 % for all together"
    panels = {"alone, over your words": alone, "on top of what helped before": top}
    return draw_bars(path, headline(found), panels, (about, words))


def headline(found: Heights) -> str:
    if found.total is None:
        return "The folklore of fast training, on this run"
    return f"The folklore of fast training, on this run: {found.total} in all"


def bar(label: str, ratio: Ratio | None, note: str) -> Bar:
    return (
        Bar(label, None, note=short(note))
        if ratio is None
        else Bar(label, ratio.value, ratio.low, ratio.high)
    )
