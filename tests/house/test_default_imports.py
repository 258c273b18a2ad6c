"""The modules that one default training imports are counted, so that the number does not grow unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
SATELLITES = {
    "autotune",
    "benchmark",
    "comparison",
    "convert",
    "distillation",
    "embedding",
    "export",
    "launch",
    "live",
    "mirror",
    "plots",
    "prediction",
    "race",
    "sampling",
    "smaller",
    "summary",
    "sweep",
    "vae_health",
    "verify",
    "watch",
}
MOST_MODULES = 141

TRAINED = """
import json, sys
from trainrun.cli.main import main
code = main(["trainer.max_steps=5", "hydra.run.dir=run"])
own = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("trainrun.")}
print(json.dumps([code, own]))
"""


def test_a_default_training_imports_no_more_than_before(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}){TRAINED}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code, files = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    spine = [
        Path(file)
        for name, file in files.items()
        if file and Path(file).stem != "__init__" and name.split(".")[1] not in SATELLITES
    ]
    assert len(spine) <= MOST_MODULES
    assert len(spine) > 20  # something was counted
