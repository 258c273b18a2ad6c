"""Does `trainrun tune` find what there is, claim nothing that is not there, and promise what comes true?

    python scripts/bench_tune.py grid [WORKLOAD ...] [--budget 120] [--knobs threads ...] [--slot 280 --store FOLDER]
                                                                within 5 % of a grid, at a fifth of its cost?
    python scripts/bench_tune.py null [--repeats 40] [--budget 60]      a search with nothing to find: false claims
    python scripts/bench_tune.py fresh [WORKLOAD ...] [--budget 120]    is it never slower, and does the claim hold?

grid: every combination of the knobs' settings is run in turns with the user's words; its cost is the time that this
took. The search has the same knobs, and its champion meets the grid's best once more, in several pairs of processes.
With --slot a grid that takes longer ends after so many seconds, and the same words go on with it. null: each repeat is
a whole search that may only choose the settings that are there already. fresh: after the search, champion and default
are started again, several times. The exit code is always 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import as_the_command  # noqa: E402,F401  # ahead of torch
from bench_kit import machine  # noqa: E402

from trainrun.errors import ConfigError  # noqa: E402
from trainrun.lab.bench import Bench, SubjectFailed  # noqa: E402
from trainrun.lab.choices import config_of, exchanged  # noqa: E402
from trainrun.lab.contender import Contender, RealStand  # noqa: E402
from trainrun.lab.duel import Duel, take_pair  # noqa: E402
from trainrun.lab.evidence import Outcome  # noqa: E402
from trainrun.lab.journal import Journal  # noqa: E402
from trainrun.lab.knobs import COMPILE, KNOBS, Knob, Value, Wish, different  # noqa: E402
from trainrun.lab.look import look, measure_for  # noqa: E402
from trainrun.lab.statistics import Ratio, grouped_ratio  # noqa: E402
from trainrun.lab.tuner import Tuner  # noqa: E402
from trainrun.parallel.launch import num_cores  # noqa: E402

COMMON = ["seed=1", "trainer.max_epochs=1000", "monitor.hardware=false"]
WORKLOADS = {
    "mlp": [*COMMON, "data=digits", "model=mlp", "model.hidden=[1024,1024]", "data.batch_size=128"],
    "cnn": [*COMMON, "data=synthetic", "model=cnn", "data.batch_size=64"],
    "gpt": [*COMMON, "data=text", "data.train.block_size=64", "data.train.max_bytes=400000", "model=gpt",
            "task=language_modeling", "model.layers=2", "model.width=128", "model.heads=4", "data.batch_size=16"],
    "lstm": [*COMMON, "data=text", "data.train.kind=lines", "data.train.max_bytes=400000", "model=lstm",
             "task=language_modeling", "data.batch_size=32", "data.max_sequence_length=128"],
}  # fmt: skip
GRID_KNOBS = ["threads", "loader", "numbers", "micro-batch", "optimizer"]
GRID_PAIRS = 5
CHECK_PAIRS = 30
CHECK_PROCESSES = 3
PROCESSES = 5
Taken = list[str]


def quiet(about: str, left: float) -> None:
    if sys.stdout.isatty():
        print(f"\r\033[K  {about} ... {left:.0f} s left", end="", flush=True)


def search(words: Sequence[str], budget: float, knobs: Sequence[Knob]) -> tuple[Outcome, float]:
    """A whole search, and the seconds of the clock that it took."""
    began = time.monotonic()
    with Bench() as bench:
        wish = Wish("numeric", budget, num_cores(), knobs)
        outcome = Tuner(words, RealStand(bench), wish, Journal(None), quiet).run()
    return outcome, time.monotonic() - began


def chosen(outcome: Outcome) -> Taken:
    return exchanged(outcome.base, outcome.words)


def duel_of(first: Contender, second: Contender, pairs: int) -> Duel:
    found = Duel()
    while len(found.pairs) < pairs:
        take_pair(found, first.turn, second.turn)
    return found


def beside(
    bench: Bench, first: Sequence[str], second: Sequence[str], pairs: int, processes: int = 1
) -> Ratio:
    """The second over the first, in so many pairs of fresh processes."""
    stand, found = RealStand(bench), []
    for number in range(processes):
        order = (first, second) if number % 2 == 0 else (second, first)
        sides = [stand.start(config_of(words), 120.0) for words in order]
        for side in sides:
            side.pace(0.3)
        sides = sides if number % 2 == 0 else sides[::-1]
        found.append(duel_of(sides[0], sides[1], pairs // processes).pairs)
        for side in sides:
            side.close()
    return grouped_ratio(found, 0.99)


def grid(words: Sequence[str], knobs: Sequence[Knob]) -> Iterator[Taken]:
    """Every combination that can be: one setting of each knob, or the present one."""
    with Bench() as bench:
        facts, pins = look(words, RealStand(bench), measure_for(120.0), num_cores(), 120.0)
    base = exchanged(words, pins)
    facts = replace(facts, config=config_of(base))
    axes: list[list[Value]] = []
    for knob in knobs:
        values = (
            []
            if knob.applies(facts)
            else different(knob.values(facts), [facts.config], lambda w: exchanged(base, w))
        )
        axes.append([Value(()), *values])
    for combination in product(*axes):
        yield exchanged(base, [word for value in combination for word in value.words])


@dataclass
class Grid:
    """combinations: of the first portion, whose look decides what `auto` means. rows: of each that was measured, its
    number, its speed over the first's (0: it cannot be), and seconds. file: what one portion leaves for the next."""

    combinations: list[Taken]
    rows: list[tuple[int, float, float]]
    file: Path | None

    @property
    def complete(self) -> bool:
        return len(self.rows) == len(self.combinations)

    @property
    def best(self) -> Taken:
        return self.combinations[max(self.rows, key=lambda row: row[1])[0]]

    @property
    def seconds(self) -> float:
        return sum(seconds for _, _, seconds in self.rows)

    def add(self, number: int, speed: float, seconds: float) -> None:
        self.rows.append((number, speed, seconds))
        if self.file is not None:
            self.file.write_text(json.dumps({"combinations": self.combinations, "rows": self.rows}))


def begun_grid(name: str, knobs: Sequence[Knob], store: Path | None) -> Grid:
    file = None if store is None else store / f"grid-{name}.json"
    if file is not None and file.is_file():
        told = json.loads(file.read_text())
        return Grid(told["combinations"], [tuple(row) for row in told["rows"]], file)
    return Grid(list(grid(WORKLOADS[name], knobs)), [], file)


def measure_grid(found: Grid, until: float) -> None:
    """The combinations that are left, as far as the time goes. A start of the base in a later portion costs nothing."""
    began = time.monotonic()
    with Bench() as bench:
        stand = RealStand(bench)
        base = stand.start(config_of(found.combinations[0]), 120.0)
        base.pace(0.3)
        began = time.monotonic() if found.rows else began
        for number in range(len(found.rows), len(found.combinations)):
            if time.monotonic() > until:
                return
            quiet(f"grid {number} of {len(found.combinations)}", until - time.monotonic())
            try:
                other = stand.start(config_of(found.combinations[number]), 120.0)
                other.pace(0.3)
                speed = duel_of(base, other, GRID_PAIRS).ratio().value
                other.close()
            except (ConfigError, SubjectFailed):
                speed = 0.0
            now = time.monotonic()
            found.add(number, speed, now - began)
            began = now


def against_grid(
    names: Sequence[str], budget: float, knobs: Sequence[Knob], slot: float, store: Path | None
) -> None:
    for name in names:
        until = time.monotonic() + slot
        found = begun_grid(name, knobs, store)
        measured = found.complete
        measure_grid(found, until)
        cost = found.seconds
        print(
            f"\r\033[K{name:5} grid {len(found.rows)} of {len(found.combinations)} in {cost:.0f} s",
            flush=True,
        )
        if not found.complete or (store is not None and not measured):
            continue  # the search has a slot of its own
        outcome, took = search(WORKLOADS[name], min(budget, 0.2 * cost), knobs)
        with Bench() as bench:
            ratio = beside(bench, found.best, chosen(outcome), CHECK_PAIRS, CHECK_PROCESSES)
        print(f"{name:5} search {took:.0f} s ({100 * took / cost:.0f} %): champion over the grid's best {ratio}; "
              f"{outcome.verdict}")  # fmt: skip
        print(
            f"      grid: {' '.join(found.best[-4:])}\n      tune: {' '.join(outcome.words) or '(as it was)'}",
            flush=True,
        )


def nothing_to_find(repeats: int, budget: float) -> None:
    """The same settings again under another name: a log point that never comes more or less rarely."""
    words = [*WORKLOADS["mlp"], "trainer.num_threads=1", "data.engine=resident"]
    same = Knob("nothing", lambda facts: [Value((f"monitor.window_size={size}",)) for size in (21, 22, 23, 24)],
                lambda facts: "", 1.0)  # fmt: skip
    claims = 0
    for number in range(repeats):
        outcome, _ = search(words, budget, [same])
        claims += outcome.claimed
        print(f"\r\033[Knull {number + 1}: {claims} claims; {outcome.verdict}", flush=True)
    print(f"false claims: {claims} of {repeats} ({100 * claims / repeats:.0f} %)")


def in_fresh_processes(names: Sequence[str], budget: float) -> None:
    for name in names:
        outcome, took = search(WORKLOADS[name], budget, [knob for knob in KNOBS if knob.name != COMPILE])
        with Bench() as bench:
            again = beside(bench, outcome.base, chosen(outcome), CHECK_PAIRS, PROCESSES)
        claim = outcome.claim
        holds = not outcome.claimed or (
            claim is not None and claim.low <= again.high and again.low <= claim.high
        )
        inside = claim is not None and claim.low <= again.value <= claim.high
        said = claim if outcome.claimed else "nothing"
        verdict = ("holds, inside" if inside else "holds") if holds else "DOES NOT HOLD"
        slower = "; SLOWER than the default" if again.high < 0.98 else ""
        print(f"\r\033[K{name:5} {took:.0f} s of {budget:.0f} s: claimed {said}; fresh {again}: {verdict}{slower}; "
              f"{' '.join(outcome.words)}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("grid", "null", "fresh"))
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--knobs", nargs="+", default=GRID_KNOBS, choices=[knob.name for knob in KNOBS])
    parser.add_argument("--slot", type=float, default=float("inf"), help="seconds of one portion of a grid")
    parser.add_argument("--store", type=Path, help="a folder for the portions that are done")
    asked = parser.parse_args()
    names = asked.workloads or list(WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"no such workload: {', '.join(unknown)}")
    print(machine())
    if asked.what == "grid":
        against_grid(
            names, asked.budget, [knob for knob in KNOBS if knob.name in asked.knobs], asked.slot, asked.store
        )
    elif asked.what == "null":
        nothing_to_find(asked.repeats, asked.budget)
    else:
        in_fresh_processes(names, asked.budget)


if __name__ == "__main__":
    main()
