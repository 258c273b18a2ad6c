"""Peak memory of whole runs, one fresh process each: `python scripts/bench_peak.py [gpt|cnn ...]`.

The figure is the peak of the resident set during the run above the resident set once everything is imported
(torch, the command, matplotlib), so that it is what data, model, optimizer, activations, checkpoints and pictures
take. The first run of a workload is its default; the others train the same number of samples in a step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import sys
from pathlib import Path

import matplotlib.pyplot
import trainrun.rank, trainrun.runner
from trainrun.cli import main

def megabytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) / 1024

before = megabytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
code = main(sys.argv[1:])
print(f"PEAK {code} {megabytes('VmHWM') - before:.1f}")
"""
QUIET = ("trainer.limit_val_batches=4", "monitor.progress_bar=false")
WORKLOADS = {
    "gpt": ("data=text", "data.train.max_bytes=2000000", "model=gpt", "model.size=3M", "task=language_modeling",
            "trainer.max_steps=4"),
    "cnn": ("data=synthetic", "data.shape=[3,64,64]", "data.train.num_samples=256",
            "data.val.num_samples=64", "model=cnn",
            "trainer.max_steps=8"),
}  # fmt: skip
BATCHES = "data.batch_size=8 trainer.accumulate_grad_batches=4"
VARIANTS = {
    "default": "",
    "preset=memory-limited": "preset=memory-limited",
    "micro-batches of 8": BATCHES,
    "gradient_checkpointing=full": "trainer.gradient_checkpointing=full",
    "gradient_checkpointing=selective": "trainer.gradient_checkpointing=selective",
    "gradient_checkpointing=0.5": "trainer.gradient_checkpointing=0.5",
    "optimizer_in_backward": "trainer.optimizer_in_backward=true trainer.nan_policy=ignore trainer.out_of_memory=stop",
}


def peak(words: list[str]) -> float:
    """Megabytes."""
    root = str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *words],
            cwd=folder, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": root},
        )  # fmt: skip
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("PEAK")]
    if not found or found[0][1] != "0":
        sys.exit(f"{' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(found[0][2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--all", action="store_true", help="every technique by itself too")
    options = parser.parse_args()
    for name in options.workloads:
        default = None
        for variant, words in list(VARIANTS.items())[: None if options.all else 2]:
            megabytes = peak([*WORKLOADS[name], *QUIET, *words.split()])
            default = default or megabytes
            print(f"{name:5} {variant:34} {megabytes:8.1f} MB  {megabytes / default:.2f}x", flush=True)


if __name__ == "__main__":
    main()
