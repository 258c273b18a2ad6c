"""Ranks that torchrun or Slurm started are recognised, and Slurm's words translated."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.parallel.devices import (
    describe_local_ranks_fault,
    is_one_task_a_node,
    is_started_by_launcher,
    parse_first_node,
    parse_tasks_per_node,
    resolve_node_address,
)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
SLURM_STEP = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "gpu[07-08],gpu12",
}  # fmt: skip


def test_torchrun() -> None:
    assert is_started_by_launcher(dict(TORCHRUN))
    assert not is_started_by_launcher(
        TORCHRUN | {"TRAINRUN_STORE": "/tmp/x"}
    )  # our own launcher, inside torchrun
    assert not is_started_by_launcher({"RANK": "1", "WORLD_SIZE": "2"})
    assert not is_started_by_launcher({})


def test_slurm_step_becomes_torchruns_words() -> None:
    env = dict(SLURM_STEP)
    assert is_started_by_launcher(env)
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("3", "1", "4", "gpu07")
    other_rank = SLURM_STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert is_started_by_launcher(other_rank)
    assert other_rank["MASTER_PORT"] == env["MASTER_PORT"]
    assert env["LOCAL_WORLD_SIZE"] == "2"
    assert not is_one_task_a_node(env)
    first_node_of_step = SLURM_STEP | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    assert is_started_by_launcher(first_node_of_step)
    assert is_one_task_a_node(first_node_of_step)
    assert not is_one_task_a_node(
        first_node_of_step | {"LOCAL_WORLD_SIZE": "8", "RANK": "7"}
    )  # a rank of its own
    next_step = SLURM_STEP | {"SLURM_STEP_ID": "1"}
    assert is_started_by_launcher(next_step)
    assert next_step["MASTER_PORT"] != env["MASTER_PORT"]


@pytest.mark.process
def test_a_node_whose_name_does_not_resolve_is_found_at_slurms_own_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = "gpu07.invalid"
    assert resolve_node_address("127.0.0.1") == "127.0.0.1"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\necho "NodeName=$3 Arch=x86_64"\necho " NodeAddr=10.0.0.$# "\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    assert resolve_node_address(node) == "10.0.0.3"
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    assert resolve_node_address(node) == node


@pytest.mark.parametrize(
    "changed", [{"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": "4294967291x"}, {"SLURM_STEP_ID": ""}]
)
def test_one_task_or_no_step_is_one_process(changed: dict[str, str]) -> None:
    env = SLURM_STEP | changed
    assert not is_started_by_launcher(env)
    assert "RANK" not in env


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[03-05,09]", "gpu03"),
        ("a-b-c,d", "a-b-c"),
        ("rack[01,07]-node[10-12]-ib,x[1-2]", "rack01-node10-ib"),
    ],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert parse_first_node(nodes) == first


@pytest.mark.parametrize(
    ("counts", "tasks"), [("2(x3),1", [2, 2, 2, 1]), ("8", [8]), ("1(x2),4(x1)", [1, 1, 4]), ("", [])]
)
def test_tasks_of_each_node(counts: str, tasks: list[int]) -> None:
    assert parse_tasks_per_node(counts) == tasks


@pytest.mark.parametrize(
    ("wanted", "accelerator", "num_gpus", "fits"),
    [
        (2, "auto", 8, True),  # of this machine: the job has 16
        (16, "auto", 8, False),
        ([4, 6], "auto", 8, True),
        ([4], "auto", 8, False),
        ("auto", "auto", 2, True),
        ("auto", "auto", 1, True),  # each rank sees its own
        ("auto", "auto", 8, False),  # six would stand idle
        ("auto", "cpu", 8, True),
    ],
)
def test_devices_are_compared_with_the_ranks_of_the_machine(
    wanted: object, accelerator: str, num_gpus: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("trainrun.parallel.devices.count_gpus", lambda: num_gpus)
    fault = describe_local_ranks_fault(wanted, accelerator)
    assert fits == (fault == "")
    assert fits or "parallel.devices=2" in fault


@pytest.mark.parametrize(
    ("wanted", "accelerator", "num_gpus", "fits"),
    [
        ("auto", "auto", 2, False),
        (4, "cuda", 3, False),
        (4, "cpu", 2, True),
        (4, "auto", 4, True),
        (4, "auto", 0, True),
    ],
)
def test_more_ranks_than_gpus_on_the_machine_are_refused(
    wanted: object, accelerator: str, num_gpus: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("trainrun.parallel.devices.count_gpus", lambda: num_gpus)
    fault = describe_local_ranks_fault(wanted, accelerator)
    assert fits == (fault == "")
    assert fits or fault.startswith(f"parallel.devices={wanted}: ")
