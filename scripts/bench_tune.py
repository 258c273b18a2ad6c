"""Does `trainrun tune` find what there is, claim nothing that is not there, and promise what comes true?

    python scripts/bench_tune.py grid [WORKLOAD ...] [--budget 120]     within 5 % of a grid, at a fifth of its cost?
    python scripts/bench_tune.py null [--repeats 40] [--budget 60]      a search with nothing to find: false claims
    python scripts/bench_tune.py fresh [WORKLOAD ...] [--budget 120]    is it never slower, and does the claim hold?

grid: every combination of the knobs' settings is run in turns with the user's words; its cost is the time that this
took, and the champion meets the grid's best once more. null: each repeat is a whole search that may only choose the
settings that are there already. fresh: after the search, champion and default are started anew, several times. The
exit code is 0 whatever is found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from trainrun.lab.statistics import Ratio  # noqa: E402
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
GRID_KNOBS = ("threads", "loader", "numbers", "micro-batch")
GRID_PAIRS = 5
CHECK_PAIRS = 30
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
    stand, found = RealStand(bench), Duel()
    for _ in range(processes):
        sides = [stand.start(config_of(words), 120.0) for words in (first, second)]
        for side in sides:
            side.pace(0.3)
        found.pairs += duel_of(sides[0], sides[1], pairs // processes).pairs
        for side in sides:
            side.close()
    return found.ratio(0.99)


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
            else different(knob.values(facts), facts.config, lambda w: exchanged(base, w))
        )
        axes.append([Value(()), *values])
    for combination in product(*axes):
        yield exchanged(base, [word for value in combination for word in value.words])


def grid_speeds(words: Sequence[str], knobs: Sequence[Knob]) -> tuple[dict[tuple[str, ...], float], float]:
    """Of each combination over the first, and what that cost."""
    began = time.monotonic()
    found: dict[tuple[str, ...], float] = {}
    combinations = list(grid(words, knobs))
    with Bench() as bench:
        stand = RealStand(bench)
        base = stand.start(config_of(combinations[0]), 120.0)
        base.pace(0.3)
        for number, combination in enumerate(combinations):
            quiet(f"grid {number} of {len(combinations)}", 0.0)
            try:
                other = stand.start(config_of(combination), 120.0)
                other.pace(0.3)
                found[tuple(combination)] = duel_of(base, other, GRID_PAIRS).ratio().value
                other.close()
            except (ConfigError, SubjectFailed):
                continue
    return found, time.monotonic() - began


def against_grid(names: Sequence[str], budget: float) -> None:
    knobs = [knob for knob in KNOBS if knob.name in GRID_KNOBS]
    for name in names:
        speeds, cost = grid_speeds(WORKLOADS[name], knobs)
        best = list(max(speeds, key=lambda words: speeds[words]))
        outcome, took = search(WORKLOADS[name], min(budget, 0.2 * cost), knobs)
        with Bench() as bench:
            ratio = beside(bench, best, chosen(outcome), CHECK_PAIRS)
        print(f"\r\033[K{name:5} grid {len(speeds)} in {cost:.0f} s, search {took:.0f} s ({100 * took / cost:.0f} %): "
              f"champion over the grid's best {ratio}; {outcome.verdict}", flush=True)  # fmt: skip
        print(f"      grid: {' '.join(best[-4:])}\n      tune: {' '.join(outcome.words) or '(as it was)'}")


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
    asked = parser.parse_args()
    names = asked.workloads or list(WORKLOADS)
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"no such workload: {', '.join(unknown)}")
    print(machine())
    if asked.what == "grid":
        against_grid(names, asked.budget)
    elif asked.what == "null":
        nothing_to_find(asked.repeats, asked.budget)
    else:
        in_fresh_processes(names, asked.budget)


if __name__ == "__main__":
    main()
