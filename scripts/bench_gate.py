"""What the gate of `trainrun tune` sees of settings that are the same training: how far they are from the user's words.

    python scripts/bench_gate.py [WORKLOAD ...] [--steps 3 10 20]

Nothing is timed. Printed: the largest difference of a loss, on the scale of the first, and the update against that of
the user's words, by its cosine and by its length. The tolerances of `trainrun.lab.gate` rest on it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import as_the_command  # noqa: E402,F401  # ahead of torch
from bench_kit import machine  # noqa: E402
from bench_tune import WORKLOADS  # noqa: E402

from trainrun.lab.bench import Bench  # noqa: E402
from trainrun.lab.choices import config_of, exchanged  # noqa: E402
from trainrun.lab.gate import SHOWN, beside, judge  # noqa: E402

BF16 = ["precision=bf16-mixed"]
TWO_THREADS, LAST = ["trainer.num_threads=2"], ["trainer.channels_last=true"]
SETTINGS = {
    "mlp": [TWO_THREADS, ["data.batch_size=32", "trainer.accumulate_grad_batches=4"], BF16],
    "cnn": [TWO_THREADS, LAST, BF16, [*BF16, *LAST]],
    "gpt": [TWO_THREADS, ["model.attention=plain"], ["data.batch_size=4", "trainer.accumulate_grad_batches=4"],
            BF16, [*BF16, "model.attention=plain"], [*BF16, "model.attention=fp32"]],
    "lstm": [TWO_THREADS, ["data.batch_size=8", "trainer.accumulate_grad_batches=4"], BF16],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 10, 20])
    asked = parser.parse_args()
    print(machine())
    for name in asked.workloads or list(WORKLOADS):
        words = exchanged(WORKLOADS[name], ["trainer.num_threads=1"])
        for steps in asked.steps:
            with Bench() as bench:
                reference = bench.start(config_of(words)).trace(steps)
                for setting in SETTINGS[name]:
                    subject = bench.start(config_of(exchanged(words, setting)))
                    found = subject.trace(steps)
                    cosine, length = beside(reference.update, found.update)
                    loss = judge(reference, found, SHOWN).loss
                    print(f"{name:5} {steps:3} steps  loss {loss:.1e}  cosine {cosine:.6f}  length {length:.4f}  "
                          f"{' '.join(setting)}", flush=True)  # fmt: skip
                    subject.close()


if __name__ == "__main__":
    main()
