"""What `auto` becomes by rules: memory of freed tensors, number type, threads; and that it lasts."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import trainrun as package
from trainrun.assemble import start_choices
from trainrun.assemble.start_choices import choose_numbers, freed_memory
from trainrun.cli.main import main
from trainrun.config.compose import compose_run
from trainrun.parallel.single import Single
from trainrun.precision import other_types
from trainrun.runs.restore_config import parts_of
from trainrun.runs.run_folder import RunDir, read_identity, write_identity
from trainrun.runtime import machine

pytestmark = pytest.mark.process


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def done(name: str) -> Any:
        return lambda: made.append(name) is None

    monkeypatch.setattr(start_choices, "keep_freed_memory", done("keep"))
    monkeypatch.setattr(start_choices, "return_freed_memory", done("return"))
    monkeypatch.setattr(start_choices, "can_keep", lambda: True)
    return made


def told(
    monkeypatch: pytest.MonkeyPatch, wanted: str, rough: float, device: str = "cpu", ranks: int = 1
) -> str:
    """Of a machine with 150 bytes."""
    monkeypatch.setattr(start_choices, "free_bytes", lambda device: 150)
    monkeypatch.setattr(start_choices, "rough_guess", lambda run: rough)
    trainer = SimpleNamespace(cpu_allocator=wanted)
    parallel = SimpleNamespace(device=SimpleNamespace(type=device), local_world_size=ranks)
    run: Any = SimpleNamespace(config=SimpleNamespace(trainer=trainer), parallel=parallel)
    return freed_memory(run)


@pytest.mark.parametrize(
    ("rough", "ranks", "made"),
    [(50, 1, ["keep"]), (51, 1, []), (30, 2, []), (25, 2, ["keep"]), (math.inf, 1, [])],
)
def test_auto_keeps_where_memory_is_ample(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], rough: float, ranks: int, made: list[str]
) -> None:
    assert bool(told(monkeypatch, "auto", rough, ranks=ranks)) == (not made)
    assert calls == made


def test_other_devices_and_the_users_own_switches_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    assert told(monkeypatch, "auto", 1, device="cuda") == ""
    assert told(monkeypatch, "libc", 1) == ""
    monkeypatch.setattr(start_choices, "can_keep", lambda: False)
    assert told(monkeypatch, "auto", 1) == ""
    assert calls == []


@pytest.mark.parametrize("wanted", ["keep", "return"])
def test_what_is_asked_for_is_done_or_said(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], wanted: str
) -> None:
    told(monkeypatch, wanted, math.inf)
    assert calls == [wanted]
    monkeypatch.setattr(start_choices, f"{wanted}_freed_memory", lambda: False)
    assert "no such switch" in told(monkeypatch, wanted, 1)


def test_a_number_type_is_chosen_by_rule_and_lasts_through_resume_and_evaluation(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("seed=1", "model=mlp", "monitor.plots=false", "monitor.hardware=false", "trainer.num_threads=1")
    named = package.train(*words, "precision=bf16-mixed", "trainer.max_steps=6", "output_dir=named")
    monkeypatch.setattr(other_types, "type_by_rule", lambda *_: ("bf16-mixed", "as on a GPU"))
    run = package.train(*words, "precision=auto", "trainer.max_steps=3", "output_dir=open")
    assert "precision: bf16-mixed, as on a GPU" in run.metrics[0]["facts"]["choices"]
    assert read_identity(run.files)["precision"] == "bf16-mixed"
    monkeypatch.setattr(other_types, "type_by_rule", lambda *_: pytest.fail("chosen again"))
    assert main(["resume", "open", "trainer.max_steps=6"]) == 0
    weights = [package.load_model(folder, which="last").state_dict() for folder in (named.folder, run.folder)]
    assert all(map(torch.equal, *(own.values() for own in weights)))
    assert parts_of(run.files, "last", [])[0].config.precision.mode == "bf16-mixed"


def test_a_type_that_is_emulated_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_types, "cpu_has", lambda *features: False)
    mode, why = other_types.type_by_rule(torch.device("cpu"), tiny=False)
    assert (mode, why) == ("32-true", "this cpu has no bfloat16 arithmetic for matrix products")
    monkeypatch.setattr(other_types, "cpu_has", lambda *features: True)
    assert other_types.type_by_rule(torch.device("cpu"), tiny=False)[0] == "bf16-mixed"
    assert other_types.type_by_rule(torch.device("cpu"), tiny=True)[0] == "32-true"


@pytest.mark.parametrize(("recorded", "number"), [(1, 1), (8, 2)])
def test_a_resume_takes_as_many_threads_as_the_run_began_with(
    recorded: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, notes = [2], list[str]()  # a later fork of this process would have none of those that are set
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    config, cpu = compose_run([]).config, Single(torch.device("cpu"))
    choose_numbers(config, nn.Linear(1, 1), cpu, {"num_threads": str(recorded)}, notes)
    assert threads[-1] == number
    assert notes == (["trainer.num_threads: 1, as the run began"] if recorded == 1 else [])


def test_the_number_of_threads_is_written_down_and_a_resume_uses_it(trainrun: Any, workdir: Path) -> None:
    words = ("hydra.run.dir=r", "data=synthetic", "model=cnn", "data.shape=[1,8,8]", "monitor.plots=false")
    assert trainrun(*words, "trainer.max_steps=3", OMP_NUM_THREADS="2").returncode == 0
    run = RunDir(workdir / "r")
    assert read_identity(run)["num_threads"] == 2
    write_identity(run, read_identity(run) | {"num_threads": 1})
    done = trainrun("resume", "r", "trainer.max_steps=6", OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert "trainer.num_threads: 1, as the run began" in done.stdout
    manifests = sorted((workdir / "r" / "checkpoints").glob("step-*/MANIFEST.json"))
    assert '"num_threads": 1,' in manifests[-1].read_text()
    assert read_identity(run)["num_threads"] == 1


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("MALLOC_TRIM_THRESHOLD_", "1", False), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", False),
     ("GLIBC_TUNABLES", "glibc.cpu.x86_shstk=on", True)],
)  # fmt: skip
def test_the_environment_goes_first(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: bool
) -> None:
    for each in (*machine.USERS, "GLIBC_TUNABLES"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(machine, "_glibc", lambda name: object())
    monkeypatch.setenv(name, value)
    assert machine.can_keep() is allowed
