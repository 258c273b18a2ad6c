"""Memory of freed tensors leaves the process; without the switch some of it stays, and no number changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trainrun as package

# Blocks of 8 MB, every second of which lives on: the holes between them are 160 MB.
CODE = """
import sys, torch
from pathlib import Path
from trainrun.process.host_memory import return_freed_memory

def megabytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) // 1024

if sys.argv[1] == "on":
    print(return_freed_memory())
del_me = torch.ones(7 << 20)  # glibc learns from its end that such sizes come from the heap
del del_me
before = megabytes()
tensors = [torch.ones(2 << 20) for _ in range(40)]
del tensors[::2]
print(megabytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's switch")
def test_holes_go_back_to_the_system() -> None:
    def left(word: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", CODE, word], capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.splitlines()

    off, (note, on) = left("off"), left("on")
    assert "at once" in note
    assert 150 <= int(on) <= 200
    assert int(off[0]) >= 300


def test_a_run_is_the_same_bit_for_bit(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=cnn", "trainer.max_steps=3", "monitor.plots=false")
    plain = package.train(*words)
    on = package.train(*words, "trainer.return_freed_memory=true")
    assert plain.status["metrics"] == on.status["metrics"]
    assert "trainer.return_freed_memory:" in capsys.readouterr().out
