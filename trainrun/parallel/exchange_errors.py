"""What a failed exchange between ranks means: NCCL's own reason, and what to do about it.

NCCL's errors have several lines, of which the first says the same for all of them; the reason comes last.
"""

from __future__ import annotations

import re

from trainrun.errors import ConfigError, LaunchError, TrainingError, TrainrunError
from trainrun.parallel.rank_place import LostContact

LAST = re.compile(r"Last error:\s*(\S.*)")
KIND = re.compile(r"\b(nccl[A-Z]\w+): ")
OF_OTHERS = ("ncclRemoteError", "ncclInProgress")  # another rank failed first
MORE = "NCCL_DEBUG=INFO shows more"
HINTS = {
    "Duplicate GPU": "start one rank for each GPU, with parallel.devices or the launcher's own setting",
    "/dev/shm": "NCCL needs more shared memory: start the container with --shm-size=8g or --ipc=host",
    "driver version is insufficient": "torch's build is newer than the GPU's driver (trainrun help gpus-and-drivers)",
}


def exchange_failure(error: RuntimeError) -> TrainrunError:
    """Explain a failed exchange: another rank is gone, unless NCCL says what is wrong here."""
    text = str(error).strip()
    kind = KIND.search(text)
    if "NCCL error in" not in text or kind is None:
        return LostContact(error)
    last = LAST.search(text)
    reason = f"{kind.group(1)}: {last.group(1).strip()}" if last else f"{kind.group(1)}; {MORE}"
    if kind.group(1) in OF_OTHERS or re.search(
        r"[Cc]onnection (closed|reset|refused)|[Tt]imed? ?out", reason
    ):
        return LostContact(reason)
    if "out of memory" in reason:
        return TrainingError(
            f"out of memory in the exchange between the ranks ({reason}): a smaller data.batch_size leaves NCCL room"
        )
    for mark, hint in HINTS.items():
        if mark in reason:
            return (ConfigError if mark == "Duplicate GPU" else LaunchError)(f"parallel: {reason}; {hint}")
    return TrainingError(f"the exchange between the ranks failed ({reason}); {MORE}")
