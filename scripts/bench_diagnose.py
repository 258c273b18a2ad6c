"""Does `trainrun diagnose` name what is wrong, and say how much it costs? Faults are planted and taken away again.

    python scripts/bench_diagnose.py [WORKLOAD ...] [--fault "slow disk" ...] [--repeats 1] [--budget 20] [--verdicts]

For each fault of each workload: the first verdict, the gain it promises, and the gain when the fault is really taken
away, measured in turns of pairs of processes, with what the faulty run chose for itself held fixed. The clean
workloads must be healthy. What came is measured until the interval of its turns is within 5 %, in up to six pairs of
processes.
`healthy` says that nothing costs a tenth of the time. Where taking the fault away gives less than that, it is the
truth: such a row is `small`, and counted apart. The exit code is 0 whatever is found. `.item()` in every step costs
nothing on a CPU, so it must not be named there. Not planted: more threads than cores, which no run takes; a part of the
model in 32 bits where the machine only emulates bfloat16, so that 32 bits are far faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import as_the_command  # noqa: E402,F401  # ahead of torch
import torch  # noqa: E402
from bench_kit import machine  # noqa: E402

from trainrun.benchmark.budget import Budget, TimedTurns, find_steps_per_turn  # noqa: E402
from trainrun.benchmark.diagnose.diagnosis import CLEAR, diagnose  # noqa: E402
from trainrun.benchmark.diagnose.rounds import build_timed_items  # noqa: E402
from trainrun.benchmark.diagnose.verdict import reach_verdict  # noqa: E402
from trainrun.benchmark.run_overrides import (  # noqa: E402
    compose_config,
    override_key,
    replace_overrides,
    start_choice_overrides,
)
from trainrun.benchmark.worker_process import WorkerPool  # noqa: E402
from trainrun.comparison.paired import Ratio, TimedItems, compute_total_ratio, sum_timed_items  # noqa: E402
from trainrun.precision.autocast import emulates_bfloat16  # noqa: E402

PAIRS = 7  # of turns, of the run with the fault and the one without, in one pair of processes
FEWEST, MOST = 2, 6  # pairs of processes; those that come after the fewest take more turns
SURE = 0.05  # of the gain: an interval that is as wide to either side
CLOSE = 0.2
READ = ["data.engine=workers", "data.num_workers=0"]
COMMON = ["seed=1", "data=custom", "data.num_classes=10", "trainer.max_epochs=200", "monitor.hardware=false"]
WORKLOADS = {
    "mlp": [*COMMON, "data.train._target_=faulty_parts.Table", "model=custom", "model._target_=faulty_parts.Wide",
            "model.hidden=1536", "data.batch_size=256"],
    "cnn": [*COMMON, "data.train._target_=faulty_parts.Pictures", "model=cnn", "data.batch_size=64"],
    "gpt": ["seed=1", "data=custom", "data.train._target_=faulty_parts.Sequences", "model=gpt",
            "task=language_modeling", "task.shift_labels=true", "model.vocab_size=256", "model.layers=2",
            "model.width=128", "model.heads=2", "data.batch_size=16", "trainer.max_epochs=200",
            "monitor.hardware=false", "data.padding=bucket"],
}  # fmt: skip


class Fault(NamedTuple):
    """expected: the first word of the verdict. words: what plants it. without: what takes its place, if anything; None
    if turns cannot show what it costs, as it is paid once a run."""

    name: str
    expected: str
    words: list[str]
    without: list[str] | None
    only: tuple[str, ...] = tuple(WORKLOADS)


RAGGED = ["data.train.usual=32", "data.train.longest=512", "model.context=512"]
LISTENER = "+monitor.slow._target_=faulty_parts.SlowListener"
FAULTS = [
    Fault("clean", "healthy", [], []),
    Fault(".item() every step", "healthy", ["task._target_=faulty_parts.AskingClassification"], [], ("mlp", "cnn")),
    Fault(".item() every step", "healthy", ["task._target_=faulty_parts.AskingLanguageModeling"], [], ("gpt",)),
    Fault("slow item", "data", [*READ, "data.train.wait=0.001"], READ),
    Fault("item holds the GIL", "data", [*READ, "data.train.compute=0.001"], READ),
    Fault("slow disk", "data", [*READ, "data.train.file=0.05"], READ, ("mlp", "cnn")),
    Fault("slow disk", "data", [*READ, "data.train.file=0.1"], READ, ("gpt",)),  # a step takes longer, and reads less
    Fault("slow logger", "logging", [LISTENER, "monitor.log_every_n_steps=2"], ["monitor.log_every_n_steps=2"]),
    Fault("synchronous checkpoints", "checkpoint",
          ["checkpoint.async_save=false", "checkpoint.every_n_train_steps=2"], ["checkpoint.enabled=false"]),
    Fault("island in fp32", "islands", ["precision=bf16-mixed", "model.island=true"],
          ["precision=bf16-mixed"], ("mlp",)),
    Fault("tiny batch", "dispatch", ["data.batch_size=1"], ["data.batch_size=8"]),
    Fault("one thread of many", "threads", ["trainer.num_threads=1"], [], ("mlp", "cnn")),
    Fault("padding", "padding", ["data.padding=longest", *RAGGED], ["data.padding=bucket", *RAGGED], ("gpt",)),
    Fault("recompiling shapes", "compile",
          ["data.padding=longest", "trainer.compile=model", "trainer.compile.dynamic=false", "trainer.max_epochs=2"],
          None, ("gpt",)),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], default=[])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of one diagnosis")
    parser.add_argument(
        "--fault", action="append", choices=sorted({fault.name for fault in FAULTS}), help="only these"
    )
    parser.add_argument("--verdicts", action="store_true", help="do not measure the gain that really comes")
    chosen = parser.parse_args()
    print(machine())
    columns = f"{'took':>5} {'verdict':<11} {'right':<5} {'promised':>8} {'real':>22}  error"
    print(f"{'workload':<8} {'fault':<25} {columns}")
    told: list[str] = []
    errors: list[float] = []
    for workload in chosen.workloads or WORKLOADS:
        for fault in FAULTS:
            if workload not in fault.only or fault.name not in (chosen.fault or [fault.name]):
                continue
            if fault.expected == "islands" and emulates_bfloat16(torch.device("cpu")):
                print(f"{workload:<8} {fault.name:<25} not planted: bfloat16 is emulated on this machine")
                continue
            for _ in range(chosen.repeats):
                right, error = judged(workload, fault, chosen.budget, chosen.verdicts)
                told.append(right)
                errors += [error] if error is not None else []
    close = sum(error <= CLOSE for error in errors)
    print(
        f"right first verdict: {told.count('yes')} of {len(told) - told.count('small')}"
        f"; too small to be named: {told.count('small')}; promised within 20 %: {close} of {len(errors)}",
        end="",
    )
    print(f"; error median {median(errors):.0%}, worst {max(errors):.0%}" if errors else "")


def judged(
    workload: str, fault: Fault, budget: float, verdicts_only: bool = False
) -> tuple[str, float | None]:
    """Whether the verdict was right (yes, NO, small), and how far the promise was from what came."""
    base, began = WORKLOADS[workload], time.monotonic()
    words = without_twice([*base, *fault.words])
    found = diagnose(words, Budget(budget), lambda about, left: None)
    told = reach_verdict(found)
    took, right = f"{time.monotonic() - began:.0f} s", "yes" if told.first == fault.expected else "NO"
    error, gains = None, ""
    if fault.expected != "healthy":
        # What is said in words comes first.
        promises = [*(cause.what_if for cause in told.causes), *found.what_ifs]
        promised = next((each.gain.value for each in promises if each.name == fault.expected), float("nan"))
        gains = f" {promised:>7.2f}x"
        if fault.without is not None and not verdicts_only:
            own = start_choice_overrides(compose_config(words), found.info)
            real = realised(words, without_twice([*base, *fault.without]), own)
            error = abs(promised / real.value - 1)
            gains += f" {real!s:>22}  {error:.0%}"
            if told.first == "healthy" and real.value < CLEAR:
                right = "small"
    line = f"{workload:<8} {fault.name:<25} {took:>5} {told.first:<11} {right:<5}{gains}"
    print(line, *([told.text] if right == "NO" else []), flush=True)
    return right, error


def realised(faulty: list[str], clean: list[str], own: list[str]) -> Ratio:
    """How much faster the run is without the fault, validation and checkpoints as they come. own: what the run that
    was diagnosed chose for itself, as threads."""
    pairs: list[tuple[TimedItems, TimedItems]] = []
    for number in range(MOST):
        if number >= FEWEST and sure(compute_total_ratio(pairs)):
            break
        # Each pair in another order, or all of them read the same batches, with the same number of rare stalls.
        order_of_data = [f"seed={number + 1}"]
        with WorkerPool() as pool:
            first = pool.start(compose_config(replace_overrides(faulty, [*own, *order_of_data])))
            said = {override_key(word) for word in clean}
            held = replace_overrides(clean, order_of_data)
            second = pool.start(
                compose_config([*held, *(word for word in own if override_key(word) not in said)])
            )
            steps = find_steps_per_turn(lambda steps, first=first: first.train(steps, variant="whole"))
            sides = [
                TimedTurns(lambda steps, each=each: each.train(steps, variant="whole"), steps)
                for each in (first, second)
            ]
            for side in sides:
                side()
            count = PAIRS if number < FEWEST else 3 * PAIRS
            turns = [pair_of(sides, number + turn) for turn in range(count)]
        first_turns, second_turns = zip(*turns, strict=True)
        pairs.append(
            (sum_timed_items(first_turns), sum_timed_items(second_turns))
        )  # a pair of processes counts once
    return compute_total_ratio(pairs)


def pair_of(sides: list[TimedTurns], number: int) -> tuple[TimedItems, TimedItems]:
    """The second comes first in every other pair."""
    turns = [side() for side in (sides if number % 2 == 0 else sides[::-1])]
    first, second = turns if number % 2 == 0 else turns[::-1]
    return build_timed_items(first), build_timed_items(second)


def sure(gain: Ratio) -> bool:
    return gain.low > (1 - SURE) * gain.value and gain.high < (1 + SURE) * gain.value


def without_twice(words: list[str]) -> list[str]:
    """The last of several words for one key."""
    return list({word.partition("=")[0]: word for word in words}.values())


if __name__ == "__main__":
    main()
