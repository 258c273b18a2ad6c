"""The installation looks at the GPU's driver: a real bash, a driver that is told, and pip's words written down.

One test imports torch, for what the installation says at its end; it takes two seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!{python} -SE
import json, os, sys
if sys.argv[1:3] == ["-m", "pip"]:
    with open("{log}", "a") as log, open(os.environ.get("PIP_CONSTRAINT", os.devnull)) as pins:
        cuda = [line for line in pins if line.startswith("cuda-")]
        places = [os.environ.get("PIP_INDEX_URL"), os.environ.get("PIP_EXTRA_INDEX_URL")]
        log.write(json.dumps([sys.argv[3:], cuda, places]) + "\\n")
elif "import torch" in sys.argv[-1] and "REAL_TORCH" not in os.environ:
    print("torch sees no GPU")
else:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
"""
INDEX = "https://wheels.invalid/cu126"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


class Install(NamedTuple):
    """pins: those of CUDA 13. places: pip's index and the further one, by the environment."""

    words: list[str]
    pins: list[str]
    places: list[str | None]


class Done(NamedTuple):
    code: int
    text: str
    installs: list[Install]


class Machine:
    """A copy of the scripts with a driver; Python is this one, but for pip."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tools, self.log = folder, folder / "tools", folder / "pip.log"
        (folder / ".venv/bin").mkdir(parents=True)
        self.tools.mkdir()
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        shutil.copy(ROOT / "pyproject.toml", folder)
        self._write(folder / ".venv/bin/python", PYTHON.format(python=sys.executable, log=self.log))

    def has(self, *gpus: str, tells_capability: bool = True) -> None:
        refused = "" if tells_capability else 'case "$*" in *compute_cap*) exit 2 ;; esac\n'
        lines = "".join(f"echo '{gpu}'\n" for gpu in gpus)
        self._write(self.tools / "nvidia-smi", f"#!/bin/sh\n{refused}{lines}")

    def install(self, *words: str, **env: str) -> Done:
        self.log.write_text("")
        program = 'set -euo pipefail; source scripts/install.sh; install_trainrun gpu "$@"'
        own = {name: value for name, value in os.environ.items() if not name.endswith("INDEX_URL")}
        done = subprocess.run(
            ["bash", "-c", program, "bash", *words], cwd=self.folder, capture_output=True, text=True, check=False,
            env=own | {"PATH": f"{self.tools}:{os.environ['PATH']}"} | env,
        )  # fmt: skip
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        installs = [Install(row[0][1:], *row[1:]) for row in rows if row[0][0] == "install"]
        return Done(done.returncode, done.stdout + done.stderr, installs)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("gpus", [("580.65.06, 9.0",), ("590.10, 7.5", "590.10, 12.0")])
def test_a_new_driver_takes_pips_own_build(machine: Machine, gpus: tuple[str, ...]) -> None:
    machine.has(*gpus)
    done = machine.install()
    assert done.code == 0, done.text
    assert [install.words[-1] for install in done.installs] == ["torch", f"{machine.folder}[gpu]"]
    assert all(install.pins for install in done.installs)


@pytest.mark.parametrize(
    ("gpu", "parts"),
    [
        (
            "535.104.05, 8.0",
            ["needs driver 580", "driver 535.104.05 and 8.0", "TORCH_INDEX_URL", "for cu126"],
        ),
        ("575.51, 12.0", ["driver 575.51", "for cu128"]),
        ("590.10, 7.0", ["compute capability 7.5", "for cu126"]),  # a V100
        ("470.82.01, 7.0", ["driver 470.82.01 is too old for every build", "install driver 525 or newer"]),
    ],
)
def test_another_driver_is_told_what_to_do_before_anything_is_downloaded(
    machine: Machine, gpu: str, parts: list[str]
) -> None:
    machine.has("590.10, 9.0", gpu)
    done = machine.install()
    assert done.code == 1
    assert all(part in done.text for part in parts), done.text
    assert "parallel.accelerator=cpu" in done.text
    assert not done.installs


def test_a_driver_that_does_not_tell_the_capability(machine: Machine) -> None:
    machine.has("450.80.02", tells_capability=False)
    assert "driver 450.80.02 is too old" in machine.install().text


def test_the_cpu_is_taken_where_it_is_meant(machine: Machine) -> None:
    machine.has("535.104.05, 8.0")
    assert machine.install("model=cnn", "parallel.accelerator=cpu").code == 0


def test_the_index_that_the_user_names_gives_torch_and_is_kept(machine: Machine) -> None:
    machine.has("535.104.05, 8.0")
    done = machine.install(TORCH_INDEX_URL=INDEX)
    assert done.code == 0, done.text
    first, second, ours = done.installs
    assert (first.words[-2:], first.places) == (["--no-deps", "torch"], [INDEX, ""])
    assert (second.words[-1], second.places) == ("torch", [None, f"{INDEX} "])
    assert (ours.words[-1], ours.places) == (f"{machine.folder}[gpu]", [None, None])
    assert not any(install.pins for install in done.installs)
    again = machine.install()
    assert (again.code, again.installs) == (0, [])
    assert machine.install(TORCH_INDEX_URL=INDEX.replace("126", "128")).installs


def test_it_says_what_torch_sees(machine: Machine) -> None:
    import torch

    done = machine.install("parallel.accelerator=cpu", REAL_TORCH="1")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = f"{count} GPU(s): " if count else "no GPU\n"
    assert f"trainrun: torch {torch.__version__} sees {seen}" in done.text
