"""What a search found, for people: the ladder as text and as a picture."""

from __future__ import annotations

from pathlib import Path

from trainrun.lab.evidence import KEPT, NEEDLESS, REJECTED, UNTRIED, Outcome, Rung, Trial
from trainrun.lab.statistics import Ratio
from trainrun.monitor.readable import quantity
from trainrun.plots.bars import Bar, draw_bars
from trainrun.plots.compare import text_table

HEAD = ("speed", "x before", "interval", "x yours", "memory", "loss off", "kept", "setting")


def table(outcome: Outcome) -> str:
    """The settings that were measured, in the order in which they were, and how the best of them went on."""
    rows = [[speed(outcome.speed, outcome), "", "", "1.00x", "", "", "", "your own words"]]
    gain = 1.0
    for trial in outcome.trials:
        if trial.ratio is None:
            continue
        held = gain * trial.ratio.value
        rows.append([
            speed(outcome.speed * held, outcome), f"{trial.ratio.value:.2f}x", interval(trial.ratio), f"{held:.2f}x",
            megabytes(trial.peak_bytes), off(trial.loss),
            f"yes ({trial.mathematics})" if trial.state == KEPT else f"no ({trial.state})", f"+ {trial.title}",
        ])  # fmt: skip
        gain = held if trial.state == KEPT else gain
    return text_table(HEAD, rows)


def summary(outcome: Outcome, explain: bool) -> list[str]:
    """All lines under the table. explain: every setting that was not taken, and why."""
    lines = [f"note: {note}" for note in outcome.notes]
    left = [trial for trial in outcome.trials if trial.state != KEPT]
    if explain:
        lines += list(dict.fromkeys(f"{name_of(trial)}: {why(trial)}" for trial in left))
    else:
        for state in (REJECTED, UNTRIED, NEEDLESS):
            names = list(dict.fromkeys(trial.knob for trial in left if trial.state == state))
            lines += [f"{state}: {', '.join(names)} (why: --explain)"] if names else []
    if len(outcome.rungs) > 1:
        lines += [f"{' '.join(rung.words)}: {contribution(rung)}" for rung in outcome.rungs]
    return lines


def contribution(rung: Rung) -> str:
    told = [("alone", rung.first_in), ("all with it against all without it", rung.last_out)]
    return (
        ", ".join(f"{name} {ratio}" for name, ratio in told if ratio is not None) or "not measured by itself"
    )


def name_of(trial: Trial) -> str:
    return f"{trial.knob}: {trial.title}" if trial.words else trial.knob


def why(trial: Trial) -> str:
    ratio = f" {trial.ratio}" if trial.ratio is not None else ""
    reason = f", {trial.reason}" if trial.reason else ""
    return f"{trial.state}{ratio}{reason}"


def noise_line(outcome: Outcome) -> str:
    noise = outcome.noise
    smallest = 100 * max(noise.high - 1, 1 - noise.low)
    return (
        f"noise: your words against themselves {noise}; effects below {smallest:.2g} % are not seen here now"
    )


def picture(outcome: Outcome, path: Path, words: str) -> Path:
    """The steps of the ladder over the user's own words, and in the end the champion, measured again."""
    bars, gain = [ratio_bar("your words again (noise)", outcome.noise)], 1.0
    for trial in outcome.trials:
        if trial.ratio is None:
            continue
        bars.append(ratio_bar(trial.title, trial.ratio, gain))
        gain *= trial.ratio.value if trial.state == KEPT else 1.0
    if outcome.claim is not None:
        bars.append(ratio_bar("ALL THAT IS KEPT, measured anew", outcome.claim))
    about = ("each setting on top of what was kept before it, the dotted line it had to beat; grey: not told from it; "
             "black: intervals, 95 %, of the last 99 %", words)  # fmt: skip
    return draw_bars(path, outcome.verdict.partition(";")[0], {"": bars}, about)


def ratio_bar(label: str, ratio: Ratio, before: float = 1.0) -> Bar:
    """before: the speed that the ratio is over, on the scale of the picture."""
    value, low, high = (before * number for number in ratio[:3])
    return Bar(label, value, low, high, before=before)


def speed(value: float, outcome: Outcome) -> str:
    return f"{quantity(value)} {outcome.unit}/s"


def interval(ratio: Ratio) -> str:
    return f"{ratio.low:.2f} to {ratio.high:.2f}"


def megabytes(value: int) -> str:
    return f"{value / 1e6:,.0f} MB" if value else ""


def off(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.0e}" if loss else "0"
