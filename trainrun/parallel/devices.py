"""Choose the device of a rank and the number of ranks; detect whether torchrun or Slurm started them.

The driver counts GPUs without torch, whose import takes two seconds.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainrun.errors import ConfigError
from trainrun.output import format_count
from trainrun.runtime.machine import count_usable_cores

if TYPE_CHECKING:
    import torch


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that CUDA shows to this process."""
    return count_visible(query_installed_gpus().gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def count_visible(installed: int, visible: str | None) -> int:
    """Return how many of the `installed` GPUs `CUDA_VISIBLE_DEVICES` shows. As CUDA does, stop at the first invalid
    entry.
    """
    if visible is None or installed == 0:
        return installed
    count = slices = 0
    for entry in (word.strip() for word in visible.split(",")):
        by_name = entry.startswith(("GPU-", "MIG-"))
        if not by_name and not (entry.isdigit() and int(entry) < installed):
            break
        count += 1
        slices += entry.startswith("MIG-")
    return 1 if 0 < slices == count else count  # of slices, CUDA shows a process the first one


class InstalledGpus(NamedTuple):
    """The GPUs that CUDA can show to a process, and the driver's version with the newest CUDA that it runs."""

    gpus: int = 0
    driver: str = ""


def query_installed_gpus() -> InstalledGpus:
    """Return the GPUs according to NVIDIA's management library (NVML), in about 20 ms; no GPU without the library.

    If all GPUs are split into slices (MIG), CUDA shows one slice to a process.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return InstalledGpus()
    if nvml.nvmlInit_v2() != 0:
        return InstalledGpus()
    try:
        count, cuda, name = ctypes.c_uint(0), ctypes.c_int(0), ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return InstalledGpus()
        nvml.nvmlSystemGetDriverVersion(name, ctypes.c_uint(len(name)))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        sliced = sum(_is_sliced(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()
    driver = f"driver {name.value.decode()}, for CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10} at most"
    return InstalledGpus(count.value - sliced or min(sliced, 1), driver)


def _is_sliced(nvml: ctypes.CDLL, index: int) -> bool:
    handle, mode, pending = ctypes.c_void_p(), ctypes.c_uint(0), ctypes.c_uint(0)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return False
    ask = getattr(nvml, "nvmlDeviceGetMigMode", None)  # since driver 450
    # a GPU that cannot be cut into slices answers with an error
    return ask is not None and ask(handle, ctypes.byref(mode), ctypes.byref(pending)) == 0 and mode.value == 1


def choose_device(
    accelerator: str, local_rank: int = 0, mode: str = "single", external: bool = False, devices: Any = "auto"
) -> torch.device:
    """Return the device of one rank. `auto` prefers a GPU, then Apple's (one process only), then the CPU.

    external: started by torchrun or Slurm, which may show every rank a single GPU. devices: a list of GPUs, of which
        a rank takes the one at its position. Raise ConfigError if the machine has GPUs that torch cannot use.
    """
    import torch

    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if not has_cuda and accelerator in ("auto", "cuda") and (count := count_gpus()):
        raise ConfigError(describe_unusable_gpus(accelerator, count, query_installed_gpus().driver))
    present = [name for name, there in (("cuda", has_cuda), ("mps", has_mps), ("cpu", True)) if there]
    if accelerator == "auto":
        accelerator = next(name for name in present if name != "mps" or mode == "single")
    if accelerator not in present:
        raise ConfigError(
            f"parallel.accelerator={accelerator}: torch {torch.__version__} finds none on this machine, only "
            f"{', '.join(present)}; allowed here: auto, {', '.join(present)}"
        )
    count = torch.cuda.device_count() if accelerator == "cuda" else 0
    if isinstance(devices, list | tuple):
        check_device_numbers(list(devices), count)
        return torch.device("cuda", devices[local_rank])
    if accelerator != "cuda":
        return torch.device(accelerator)
    if external and count == 1:
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise ConfigError(
            f"parallel.devices: rank {local_rank} of this machine has no GPU of its own, "
            f"torch finds {count}; use fewer ranks or parallel.accelerator=cpu"
        )
    return torch.device("cuda", local_rank)


def is_started_by_launcher(env: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether torchrun or Slurm started this process as one of several ranks. The rank is in `RANK`.

    As a side effect, Slurm's variables are translated into torchrun's.
    """
    if "TRAINRUN_STORE" in env:
        return False
    if all(word in env for word in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return True
    if "SLURM_PROCID" not in env:
        return False
    return translate_slurm_variables(env)


def check_device_numbers(listed: list[int], num_gpus: int) -> None:
    """Raise ConfigError if a listed number is not a GPU of this machine."""
    if not num_gpus:
        raise ConfigError(
            f"parallel.devices={listed}: lists GPU numbers, but this run uses no GPU; give a number of ranks, as "
            f"parallel.devices={len(listed)}"
        )
    if wrong := [number for number in listed if number >= num_gpus]:
        raise ConfigError(
            f"parallel.devices={listed}: no GPU {wrong[0]}, {num_gpus} GPU(s) visible here, 0 to {num_gpus - 1}"
        )


def describe_unusable_gpus(accelerator: str, count: int, driver: str) -> str:
    """Return the message for GPUs that the driver reports and torch cannot use."""
    import torch

    cuda = torch.version.cuda
    build = f"torch {torch.__version__} was built for {f'CUDA {cuda}' if cuda else 'the CPU alone'}"
    return (
        f"parallel.accelerator={accelerator}: {count} GPU(s) here ({driver}), but torch sees none; {build}. Install "
        "the build of torch for this driver (trainrun help gpus-and-drivers), or set parallel.accelerator=cpu"
    )


def translate_slurm_variables(env: MutableMapping[str, str]) -> bool:
    """Translate Slurm's variables into torchrun's if this is one of several tasks of a job step. Return whether it
    is.

    The batch script itself has the variables of the job's tasks too, but is one process.
    """
    num_tasks = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
    if not env.get("SLURM_STEP_ID", "").isdigit() or num_tasks < 2:
        return False
    env["RANK"] = env["SLURM_PROCID"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["WORLD_SIZE"] = str(num_tasks)
    tasks = parse_tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if tasks:
        env["LOCAL_WORLD_SIZE"] = str(tasks[int(env.get("SLURM_NODEID", "0"))])
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "localhost"))
    env["MASTER_ADDR"] = env.get("MASTER_ADDR") or resolve_node_address(parse_first_node(nodes))
    # one port per job step: two of them on a node must not meet
    number = int(env["SLURM_JOB_ID"]) * 7 + int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(20000 + number % 10000))
    return True


def parse_tasks_per_node(counts: str) -> list[int]:
    """Return the number of tasks of each node from Slurm's notation: `2(x3),1` gives [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(number) for number, times in parts for _ in range(int(times or 1))]


def is_one_task_a_node(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether Slurm started a single task on this machine, which may start several ranks itself."""
    return env.get("LOCAL_WORLD_SIZE") == "1" and env.get("RANK") == env.get("SLURM_PROCID", "")


def describe_local_ranks_fault(devices: Any, accelerator: str) -> str:
    """Return the message if torchrun or Slurm started another number of ranks here than `parallel.devices`, or more
    than there are GPUs; "" without a fault.

    With `auto`, it is also a fault if this process sees GPUs that no rank of the machine would use. A process that
    sees one GPU may be one of several that see one each.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    started = f"torchrun or Slurm started {format_count(local, 'rank')} on this machine"
    uses_gpus = accelerator not in ("cpu", "mps") and "LOCAL_WORLD_SIZE" in os.environ
    visible = count_gpus() if uses_gpus else 0
    if 1 < visible < local:
        return (
            f"parallel.devices={devices}: {started}, and {visible} GPUs are visible there; start {visible} ranks, or "
            "say parallel.accelerator=cpu"
        )
    if devices != "auto":
        wanted = len(devices) if isinstance(devices, list | tuple) else int(devices)
        if wanted == local:
            return ""
        return f"parallel.devices={devices}: {started}; start {wanted} there, or use parallel.devices={local}"
    if visible <= local:
        return ""
    return (
        f"parallel.devices=auto: {visible} GPUs are visible and {started}, so {visible - local} would not be used; say "
        f"parallel.devices={local} to leave them, or start {visible} ranks there (Slurm with one task a machine: "
        f"parallel.devices={visible})"
    )


def parse_first_node(nodes: str) -> str:
    """Return the first name of a Slurm node list: `gpu[03-05,9]-b,cpu1` gives `gpu03-b`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "the pattern matches every text"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def resolve_node_address(node: str) -> str:
    """Return the node's name, or the address that Slurm has for it if the name does not resolve here."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        if shutil.which("scontrol"):
            process = subprocess.run(
                ["scontrol", "show", "node", node], capture_output=True, text=True, check=False
            )
            if match := re.search(r"\bNodeAddr=(\S+)", process.stdout):
                return match.group(1)
    return node


def choose_num_devices(
    mode: str, accelerator: str, devices: Any, num_gpus: int | None = None
) -> tuple[int, str]:
    """Return the number of ranks and the reason. devices: `auto`, a number, or a list of GPUs."""
    listed = list(devices) if isinstance(devices, list | tuple) else None
    if listed is not None:
        devices = len(listed)
    elif devices != "auto":
        devices = int(devices)
    if mode == "single":
        if devices not in ("auto", 1):
            raise ConfigError(
                f"parallel.devices={listed or devices}: parallel=single uses 1; use parallel=ddp for more"
            )
        return 1, "parallel=single is one process"
    if accelerator == "mps":
        raise ConfigError(f"parallel.accelerator=mps: works only with parallel=single, not with {mode}")
    if accelerator == "cpu":
        num_gpus = 0
    elif num_gpus is None:
        num_gpus = count_gpus()
    if accelerator == "cuda" and num_gpus == 0:
        raise ConfigError("parallel.accelerator=cuda: no NVIDIA GPU is visible here; use cpu or auto")
    if listed is not None:
        check_device_numbers(listed, num_gpus)
        return len(listed), f"parallel.devices={listed}"
    if devices != "auto":
        if 0 < num_gpus < devices:
            raise ConfigError(
                f"parallel.devices={devices}: {num_gpus} GPU(s) visible here; "
                f"allowed are 1 to {num_gpus}, or more with parallel.accelerator=cpu"
            )
        return devices, f"parallel.devices={devices}"
    if num_gpus > 0:
        return num_gpus, f"one for each of {num_gpus} GPU(s)"
    cores = count_usable_cores()
    return min(2, cores), f"on a CPU ({cores} core(s)) two ranks, at most one for each core"
