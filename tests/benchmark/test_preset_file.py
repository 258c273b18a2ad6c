"""What stays of a search: the preset, which a run finds at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from approved import refused

from trainrun.benchmark.remedies import NUMERIC, Remedy
from trainrun.benchmark.run_overrides import resolve_overrides
from trainrun.benchmark.tune.autotune_session import host_preset_name, preset_path, write_preset
from trainrun.benchmark.tune.tuner import Trial, Tuning
from trainrun.comparison.paired import Ratio
from trainrun.config.compose import compose_run
from trainrun.errors import ConfigError

pytestmark = pytest.mark.process

GAIN = Ratio(2.0, 1.9, 2.1, 20, (1.9, 2.1) * 10)


def written(typed: list[str], *found: str):
    trials = tuple(Trial("loading", 2.0, Remedy((one,), NUMERIC), GAIN, reason="") for one in found)
    tuning = Tuning((), "samples", 1000.0, ("",), trials, GAIN, "", 100.0)
    return write_preset(preset_path("tuned-here", Path.cwd()), resolve_overrides(typed), tuning)


def test_a_run_finds_the_preset_at_once(workdir: Path) -> None:
    found = written(
        ["model=cnn", "data.num_workers=3", "preset=fast", "precision=32"],
        "precision=bf16-mixed", "trainer.num_threads=2", "data.num_workers=auto", "trainer.compile.scope=off",
    )  # fmt: skip
    assert found.path == workdir / "conf/preset/tuned-here.yaml"
    assert found.use == ["model=cnn", "preset=tuned-here"]
    composed = compose_run(found.use)
    assert composed.notes == []
    config = composed.config
    chosen = config.precision.mode, config.trainer.num_threads, config.data.num_workers
    assert chosen == ("bf16-mixed", 2, "auto")
    assert config.trainer.channels_last  # of the preset that was asked for before
    text = found.path.read_text()
    assert "2.00x (1.90 to 2.10" in text
    assert "# trainer.num_threads=2: 2.00x when found" in text


def test_a_preset_holds_no_secret(workdir: Path) -> None:
    (workdir / "secret_net.py").write_text("class Net:\n    def __init__(self, api_key): ...\n")
    found = written(["model=secret_net.Net", "model.api_key=typed-1"], "trainer.num_threads=2")
    assert found.path is not None
    text = found.path.read_text()
    assert "typed-1" not in text
    assert "model.api_key=***" in text


def test_a_preset_of_ones_own_is_not_overwritten(workdir: Path) -> None:
    path = workdir / "conf/preset/mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\nseed: 3\n")
    with refused(ConfigError):
        preset_path("mine", workdir)
    with refused(ConfigError, "--name"):
        preset_path("a/b", workdir)
    assert host_preset_name().startswith("tuned-")
