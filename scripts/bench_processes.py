"""What needs other processes: `bench_speed.py mlp_busy` (a step next to two busy ones), `memory` (peaks of runs), and
`waiting` (how threads wait for each other, which is read once, when a process starts)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import bench_kit

MUST = 2.5
STAY = 60  # epochs of 10 ms: what a scheduler grants to who has just woken is over by then


@contextmanager
def neighbours(number: int = 2) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that compute without end, stopped until they are told to go on."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        wake(found, False)
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


def wake(found: list[subprocess.Popen[bytes]], awake: bool) -> None:
    for process in found:
        os.kill(process.pid, signal.SIGCONT if awake else signal.SIGSTOP)


def alternating(found: list[subprocess.Popen[bytes]]) -> bench_kit.Hand:
    """In the place of a hand-written loop: STAY busy epochs and STAY quiet ones in turn, busy ones first."""
    awake = False
    for number in count():
        if number % STAY == 1:
            awake = not awake
            wake(found, awake)
        yield 0.0, 0.0


def busy(rounds: int, words: list[str], blocks: int = 20) -> None:
    """Threads are the runner's choice: that is what is measured."""
    words = ["model.hidden=[128]", f"trainer.max_epochs={STAY * blocks}", "monitor.plots=false", *words]
    ratios: list[float] = []
    for number in range(rounds + 1):
        with neighbours() as found, tempfile.TemporaryDirectory() as folder, bench_kit.silence():
            turns = bench_kit.one_round(
                words, Path(folder), lambda _, found=found: {"noise": alternating(found)}
            ).turns
        seconds = [turn.seconds for turn in turns.ours[1:]]
        sums = [sum(seconds[first : first + STAY]) for first in range(0, STAY * (blocks - 1), STAY)]
        if number:
            ratios += [one / other for one, other in zip(sums[::2], sums[1::2], strict=False)]
        print(f"round {number}: val/loss {turns.ours[-1].loss:.5f}; {bench_kit.machine()}", flush=True)
    print(f"mlp_busy: busy / quiet, in time: {bench_kit.spread(ratios)}, must be {MUST} or less")


def memory(gpt: list[str], words: list[str]) -> None:
    """Two steps of whole processes with one model, one sequence length and one batch size a step."""
    synthetic = [
        "data=synthetic",
        "data.shape=[3,48,48]",
        "data.train.num_samples=768",
        "data.val.num_samples=32",
    ]
    models = {
        "gpt": (32, gpt),
        "cnn": (256, [*synthetic, "model=cnn", "model.width=64"]),
    }
    print(bench_kit.machine())
    for name, (batch, model) in models.items():
        common = [*model, "trainer.max_steps=2", "trainer.limit_val_batches=1", "monitor.plots=false", *words]
        accumulate = f"trainer.accumulate_grad_batches={batch // 8}"
        limited = peak([*common, "preset=memory-limited", "data.batch_size=8", accumulate])
        plain = peak([*common, f"data.batch_size={batch}", "data.val_batch_size=32"])
        print(
            f"memory {name}: limited {limited:.0f} MiB, default {plain:.0f} MiB; "
            f"ratio {limited / plain:.2f}, must be 0.6 or less",
            flush=True,
        )


SMALL_GPT = [
    "data=text",
    "data.train.max_bytes=1000000",
    "task=language_modeling",
    "model=gpt",
    "model.heads=4",
]
WAITERS = {  # small steps, which wait the most, and one that fills its threads
    "mlp": ["model.hidden=[128]", "data.batch_size=32"],
    "wide mlp": ["model.hidden=[1024,1024]", "data.batch_size=128"],
    "small gpt": [*SMALL_GPT, "model.context=64", "data.train.block_size=64", "data.batch_size=12"],
    "cnn": ["model=cnn", "data=synthetic", "data.shape=[1,28,28]", "data.batch_size=64"],
}
WAITER_STEPS = {"mlp": 4000, "wide mlp": 400, "small gpt": 100, "cnn": 60}
POLICIES = {"ours": {}, "usual": {"GOMP_SPINCOUNT": "300000"}, "asleep": {"GOMP_SPINCOUNT": "0"}}


def waiting(rounds: int, words: list[str], steps: int | None) -> None:
    """Runs with two threads that wait as ours do (`trainrun.__main__`), in OpenMP's usual way and asleep, in turns;
    then the same next to one busy process."""
    common = ["trainer.num_threads=2", "monitor.plots=false", "monitor.hardware=false", "trainer.limit_val_batches=1",
              "checkpoint.enabled=false", "data.engine=threads", "trainer.max_epochs=null", *words]  # fmt: skip
    print(bench_kit.machine())
    for beside in (0, 1):
        with neighbours(beside) as found:
            wake(found, True)
            for name, model in WAITERS.items():
                total = steps or WAITER_STEPS[name] // (1 + 3 * beside)
                limit = f"trainer.max_steps={total}"
                times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
                for _ in range(rounds):
                    for policy, environment in POLICIES.items():
                        seconds = seconds_of([*model, *common, limit], OMP_NUM_THREADS="2", **environment)
                        times[policy].append(1e3 * seconds / total)
                shown = ", ".join(
                    f"{policy} {min(values):.2f} to {max(values):.2f}" for policy, values in times.items()
                )
                print(f"waiting, beside {beside}, {name}, ms a step: {shown}", flush=True)


def seconds_of(words: list[str], **environment: str) -> float:
    """Return the training seconds of one run through the command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainrun", *words, "hydra.run.dir=run"]
        paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False,
                              env=os.environ | {"PYTHONPATH": paths} | environment)  # fmt: skip
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
        return float(json.loads(Path(folder, "run", "status.json").read_text())["seconds"])


def peak(words: list[str]) -> float:
    """MiB resident at most, of one run through the command."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainrun", *words]
        paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        with open(f"{folder}/output", "w+") as output:
            process = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": paths}
            )
            _, status, usage = os.wait4(process.pid, 0)
            output.seek(0)
            assert status == 0, output.read()[-2000:]
    return usage.ru_maxrss / 1024
