"""Ranks that Slurm started: its words as those of torchrun."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import MutableMapping


def as_torchrun(env: MutableMapping[str, str]) -> bool:
    """Translate the variables, only inside a job step of several tasks; whether this is one.

    The batch script itself sees the job's tasks too, but is one process.
    """
    num_tasks = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
    if not env.get("SLURM_STEP_ID", "").isdigit() or num_tasks < 2:
        return False
    env["RANK"] = env["SLURM_PROCID"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["WORLD_SIZE"] = str(num_tasks)
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        env["LOCAL_WORLD_SIZE"] = env["WORLD_SIZE"]
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "localhost"))
    env["MASTER_ADDR"] = env.get("MASTER_ADDR") or address_of(first_node(nodes))
    # one port per job step: two of them on a node must not meet
    number = int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(20000 + number % 10000))
    return True


def first_node(nodes: str) -> str:
    """The first name of a Slurm node list: `gpu[03-05,9]-b,cpu1` -> `gpu03-b`; every bracket gives its first number."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "the pattern matches every text"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def address_of(node: str) -> str:
    """The node's name, or the address that Slurm itself uses for it if the name does not resolve here."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        if shutil.which("scontrol"):
            asked = subprocess.run(
                ["scontrol", "show", "node", node], capture_output=True, text=True, check=False
            )
            if found := re.search(r"\bNodeAddr=(\S+)", asked.stdout):
                return found.group(1)
    return node
