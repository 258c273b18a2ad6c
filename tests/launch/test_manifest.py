"""`launch=k8s` and `launch=sky` print manifests whose fields the two programs know. No cluster is asked."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainrun.cli.main import main
from trainrun.errors import ConfigError
from trainrun.launch.launch_options import read_options
from trainrun.launch.manifest import format_manifest

FIELDS = yaml.safe_load(Path(__file__).with_name("manifest_fields.yaml").read_text())
TYPES = {"text": str, "number": int, "flag": bool, "map": dict, "list": list}
FOLDER = "output_dir=/runs/a"
K8S, SKY = (["launch=" + kind, "launch.image=me/train:1"] for kind in ("k8s", "sky"))


def wrong_fields(value: Any, fields: Any, path: str = "") -> list[str]:
    """Return the paths of fields that the format does not have, lacks, or has with another type."""
    if isinstance(fields, dict):
        if not isinstance(value, dict):
            return [path]
        by_name = {name.rstrip("!"): inner for name, inner in fields.items()}
        lacking = [f"{path}.{name[:-1]}" for name in fields if name.endswith("!") and name[:-1] not in value]
        unknown = [f"{path}.{name}" for name in value if name not in by_name]
        known = (
            wrong_fields(value[name], by_name[name], f"{path}.{name}") for name in value if name in by_name
        )
        return lacking + unknown + [wrong for found in known for wrong in found]
    if fields == "texts":
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
    else:
        fits = type(value) is TYPES[fields] if fields in TYPES else value == fields
    return [] if fits else [path]


def manifest(launch_words: list[str], words: list[str], name: str = "n") -> dict[str, Any]:
    options = read_options(launch_words)
    assert options is not None
    text = format_manifest(options, name, words)
    values: dict[str, Any] = yaml.safe_load(text)
    assert wrong_fields(values, FIELDS[options.kind]) == []
    return values


def test_the_check_of_fields_fails_for_another_manifest() -> None:
    good = manifest(K8S, [FOLDER])
    trainer = good["spec"]["trainer"]
    assert wrong_fields(good | {"kind": "PyTorchJob"}, FIELDS["k8s"]) == [".kind"]
    spec = {"runtimeRef": {}, "trainer": trainer | {"numNodes": "2", "gpus": 1}}
    assert wrong_fields(good | {"spec": spec}, FIELDS["k8s"]) == [
        ".spec.runtimeRef.name", ".spec.trainer.gpus", ".spec.trainer.numNodes",
    ]  # fmt: skip


def test_a_train_job_starts_a_rank_for_each_gpu_of_each_machine() -> None:
    words = ["optimizer.lr=1e-3", "data.path=$(HOME)/a", FOLDER]
    job = manifest([*K8S, "launch.nodes=2", "launch.gpus=8"], words, "digits-MLP_2")
    assert job["metadata"]["name"] == "digits-mlp-2"
    assert job["spec"]["trainer"] == {
        "image": "me/train:1", "numNodes": 2, "numProcPerNode": 8, "command": ["torchrun", "-m", "trainrun"],
        "args": ["optimizer.lr=1e-3", "data.path=$$(HOME)/a", "parallel=ddp", "parallel.devices=8", FOLDER],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}},
    }  # fmt: skip
    assert "resourcesPerNode" not in manifest(K8S, [FOLDER])["spec"]["trainer"]


@pytest.mark.parametrize("name", ["7_days", "Größe", "a" * 80, "---", "x-" * 40])
def test_a_name_is_one_that_kubernetes_takes(name: str) -> None:
    made = manifest(K8S, [FOLDER], name)["metadata"]["name"]
    assert made[0].isalpha()
    assert made[-1].isalnum()
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(made) <= 63


def test_a_sky_task_starts_torchrun_with_the_words_as_they_are(tmp_path: Path) -> None:
    words = ["model.hidden=[64, 64]", "run_name=it's $HOME", FOLDER]
    options = [
        "launch=sky",
        "launch.nodes=2",
        "launch.gpus=8",
        "launch.gpu_type=H100",
        "launch.image=me/train:1",
    ]
    task = manifest(options, words)
    assert task["resources"] == {"accelerators": "H100:8", "image_id": "docker:me/train:1"}
    assert "accelerators" not in manifest(SKY, words)["resources"]
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/root", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", task["run"]], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "--nnodes=2", "--node_rank=1", "--nproc_per_node=8", "--master_addr=10.0.0.1", "--master_port=29500",
        "-m", "trainrun", *words[:2], "parallel=ddp", "parallel.devices=8", FOLDER,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("launch_words", "words", "key"),
    [
        (["launch=k8s"], [FOLDER], "launch.image"),
        (["launch=sky"], [FOLDER], "launch.image"),
        (K8S, [], "output_dir"),
        (K8S, ["output_dir=runs/a"], "output_dir"),
        ([*K8S, "launch.time=10"], [FOLDER], "launch.time=10"),
        ([*K8S, "launch.sbatch={qos: a}"], [FOLDER], "launch.sbatch"),
        ([*K8S, "launch.image="], [FOLDER], "launch.image="),
        ([*SKY, "launch.gpus=8"], [FOLDER], "launch.gpu_type"),
        ([*SKY, "launch.gpu_type=H100"], [FOLDER], "launch.gpus"),
    ],
)
def test_what_a_cluster_lacks_is_refused(launch_words: list[str], words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        manifest(launch_words, words)
    assert key in str(caught.value)


def test_the_command_prints_the_manifest_alone(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*K8S, "optimizer.lr=0.1", FOLDER]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert shlex.join(job["spec"]["trainer"]["args"]) == f"optimizer.lr=0.1 {FOLDER}"
    assert list(workdir.iterdir()) == []
    assert main([*K8S, "optimizer.lr=-1", FOLDER]) == 2
    assert capsys.readouterr().out == ""
