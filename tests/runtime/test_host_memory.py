"""Memory of freed tensors leaves the process or stays with it, as is asked for, and no number changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from faults.forks import run_forked

import trainrun as package

pytestmark = pytest.mark.process

START = """
import resource, sys, torch
from pathlib import Path
from trainrun.runtime import machine

def megabytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) // 1024
"""
# Ten times the same three tensors of 50, 100 and 20 MB.
AGAIN = """
def step():
    a = torch.ones(50 << 18)
    b = torch.ones(100 << 18)
    del a
    c = torch.ones(20 << 18)

def count_page_faults():
    for _ in range(8):  # until there is a hole for each
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_before = count_page_faults()
assert machine.set_allocator("keep")
print(faults_before, count_page_faults(), megabytes(), end=" ")
machine.return_kept_memory()
print(megabytes())
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="glibc's switches")


@linux
def test_what_is_kept_is_used_again_and_goes_back_at_the_end() -> None:
    command = [sys.executable, "-c", START + AGAIN]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    faults_before, faults_on, inside, after = map(int, done.stdout.split())
    assert faults_before > 10 * 40  # of 4 kB, or of 2 MB
    assert faults_on < faults_before / 10
    assert inside - after > 140


def test_a_run_is_the_same_bit_for_bit(workdir: Path) -> None:
    words = (
        "model=cnn",
        "model.width=8",
        "trainer.max_steps=3",
        "trainer.limit_val_batches=1",
        "monitor.plots=false",
    )
    plain = str(package.train(*words).status["metrics"])
    for rule in ("keep", "libc", "return"):

        def train_with_rule(rule: str = rule) -> int:
            print(package.train(*words, f"trainer.cpu_allocator={rule}").status["metrics"])
            return 0

        # in a process of its own, as glibc cannot go back to its own rule
        assert run_forked(train_with_rule, workdir / rule, timeout=300).code == 0
        assert (workdir / rule).read_text().splitlines()[-1] == plain, rule
