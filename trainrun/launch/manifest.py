"""`trainrun launch=k8s|sky ...`: print a manifest that starts the run on a cluster.

What: a TrainJob of Kubeflow Trainer v2, or a task of SkyPilot. Both start torchrun on each machine, with the same
    settings. A restart in the same folder continues from the newest checkpoint. When: a cluster with Kubeflow, or
    machines that SkyPilot rents. When not: Slurm (launch=slurm). Source: the API trainer.kubeflow.org/v1alpha1, and
    https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainrun.config.compose import format_yaml
from trainrun.errors import ConfigError
from trainrun.launch.launch_options import LaunchOptions, build_job_words
from trainrun.output import report_result, say

PORT = 29500
MOST_NAME_LETTERS = 50  # Kubernetes adds its own to them, up to 63


def format_manifest(options: LaunchOptions, name: str, words: Sequence[str]) -> str:
    """Return the YAML text. words: the settings of the run. Raise ConfigError if they lack what the cluster needs."""
    folder = next((word.partition("=")[2] for word in words if word.startswith("output_dir=")), "")
    if not folder.startswith("/"):
        raise ConfigError(
            f"launch={options.kind}: add output_dir=/..., an absolute path that all machines share and that stays "
            "after the job"
        )
    if options.image is None:
        raise ConfigError(
            f"launch={options.kind}: add launch.image=..., a container image with trainrun and your code"
        )
    words = build_job_words(options, words, Path(folder))
    job_name = re.sub("[^a-z0-9]+", "-", name.lower())[:MOST_NAME_LETTERS].strip("-")
    job_name = job_name if job_name[:1].isalpha() else f"run-{job_name}".strip("-")
    if options.kind == "k8s":
        head = "# Start it by: kubectl create -f FILE. The runtime must mount a volume at output_dir."
        return f"{head}\n{format_yaml(build_train_job(options, job_name, words))}"
    head = "# Start it by: sky jobs launch FILE. output_dir must be in a bucket or volume (file_mounts)."
    return f"{head}\n{format_yaml(build_sky_task(options, job_name))}{format_sky_command(options, words)}"


def build_train_job(options: LaunchOptions, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the TrainJob. The runtime torch-distributed tells torchrun the machines, in variables `PET_*`."""
    trainer: dict[str, Any] = {
        "image": options.image,
        "numNodes": options.nodes,
        "numProcPerNode": options.gpus or 1,
        "command": ["torchrun", "-m", "trainrun"],
        "args": [word.replace("$(", "$$(") for word in words],  # Kubernetes would fill in a variable
    }
    if options.gpus is not None:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": options.gpus}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }


def build_sky_task(options: LaunchOptions, name: str) -> dict[str, Any]:
    """Return the task without its command."""
    if (options.gpus is None) != (options.gpu_type is None):
        raise ConfigError("launch=sky: launch.gpus=8 and launch.gpu_type=H100 belong together; add the other")
    resources = {"image_id": f"docker:{options.image}"}
    if options.gpus is not None:
        resources["accelerators"] = f"{options.gpu_type}:{options.gpus}"
    return {"name": name, "workdir": ".", "num_nodes": options.nodes, "resources": resources}


def format_sky_command(options: LaunchOptions, words: Sequence[str]) -> str:
    """Return the field `run`: one torchrun per machine."""
    lines = [
        "torchrun --nnodes=$SKYPILOT_NUM_NODES --node_rank=$SKYPILOT_NODE_RANK",
        f"--nproc_per_node={options.gpus or 1}",
        f'--master_addr=$(echo "$SKYPILOT_NODE_IPS" | head -n1) --master_port={PORT}',
        "-m trainrun",
        *map(shlex.quote, words),
    ]
    return "run: |\n" + textwrap.indent(" \\\n  ".join(lines), "  ") + "\n"


def print_manifest(options: LaunchOptions, name: str, words: Sequence[str]) -> None:
    """Print the manifest on standard output."""
    text = format_manifest(options, name, words)
    say(text, end="")
    report_result(manifest=text)
