"""What a failed exchange is called: NCCL's texts as torch hands them over."""

from __future__ import annotations

import pytest

from trainrun.errors import ConfigError, LaunchError, LostContact, TrainingError, TrainrunError
from trainrun.parallel.group import explain_failed_exchange

HEAD = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.27.5\n"
    "{}: {}. \n"
)
CUDA = HEAD.format(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "ncclUnhandledCudaError", "Call failed"
)
SYSTEM = HEAD.format("unhandled system error", "ncclSystemError", "System call (e.g. socket, malloc) failed")
USAGE = HEAD.format(
    "invalid usage", "ncclInvalidUsage", "This usually reflects invalid usage of NCCL library"
)
REMOTE = HEAD.format(
    "remote process exited", "ncclRemoteError", "A call failed possibly due to a network error"
)


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        (
            USAGE + "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            ConfigError, ["Duplicate GPU detected : rank 1 and rank 0", "one rank for each GPU"],
        ),
        (
            SYSTEM + "Last error:\nError while creating shared memory segment /dev/shm/nccl-zKzPVj (size 9637888), "
            "error: No space left on device (28)",
            LaunchError, ["/dev/shm/nccl-zKzPVj", "--shm-size=8g"],
        ),
        (
            CUDA + "Last error:\nCuda failure 2 'out of memory'",
            TrainingError, ["out of memory", "Cuda failure 2", "data.batch_size"],
        ),
        (
            CUDA + "Last error:\nCuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'",
            LaunchError, ["driver version is insufficient", "gpus-and-drivers"],
        ),
        (CUDA, TrainingError, ["ncclUnhandledCudaError", "NCCL_DEBUG=INFO"]),
        (
            CUDA + "Last error:\nCuda failure 999 'unknown error'",
            TrainingError, ["Cuda failure 999 'unknown error'", "NCCL_DEBUG=INFO"],
        ),
        (REMOTE + "Last error:\nsocketProgress: Connection closed by remote peer node2<47312>", LostContact,
         ["lost contact with the other ranks (ncclRemoteError: socketProgress: Connection closed by remote peer"]),
        (SYSTEM + "Last error:\nsocketPollConnect: Connect to 10.0.0.7<41000> returned 111(Connection refused) errno",
         LostContact, ["10.0.0.7<41000>"]),
        ("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3401\nmore", LostContact,
         ["(["]),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)", LostContact, ["Watchdog"]),
    ],
)  # fmt: skip
def test_what_failed_and_what_to_do(text: str, kind: type[TrainrunError], parts: list[str]) -> None:
    found = explain_failed_exchange(RuntimeError(text))
    assert type(found) is kind
    assert all(part in str(found) for part in parts), str(found)
    assert "\n" not in str(found)
