"""Process-wide settings of torch: threads, determinism, kernels, and the precision of matrix products."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import deterministic

from trainrun.config.schema import RunConfig
from trainrun.data.cache.room import cache_home
from trainrun.interfaces import Parallel
from trainrun.precision.autocast import describe_matmul_precision, is_tiny_step, set_matmul

FEW_WEIGHTS = 400_000  # trained ones, whose update is too short to share
# Inductor's advice, by a function of torch; `describe_matmul_precision` gives it with the name of the setting.
OF_TORCH = "TensorFloat32 tensor cores for float32 matrix multiplication available"
DETERMINISM: Any = deterministic  # its switch is a property, which its stub does not know
ROUNDING = (
    "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision",
    "cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision",
)  # fmt: skip


@contextmanager
def restore_backends() -> Iterator[None]:
    """Restore, at the end of the block, the settings that `set_backends` and `set_threads` change.

    So a notebook continues with its own settings after a run.
    """
    determined, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = DETERMINISM.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    anomaly = torch.is_anomaly_enabled()
    restore_rounding = record_rounding()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", OF_TORCH)
            yield
    finally:
        set_deterministic(determined, warn_only)
        DETERMINISM.fill_uninitialized_memory = fills
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.autograd.set_detect_anomaly(anomaly)
        restore_rounding()


def record_rounding() -> Callable[[], None]:
    """Return a function that restores the current precision of float32 products.

    It uses the older and the newer API of torch (since 2.9). Torch refuses to read the older one if a user set both.
    """
    older: str | None = None
    tf32: bool | None = None
    with suppress(RuntimeError):
        older, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    newer = {name: attrgetter(name)(torch.backends) for name in ROUNDING if has_readable_attribute(name)}

    def restore_rounding_modes() -> None:
        if older is not None and tf32 is not None:
            torch.set_float32_matmul_precision(older)
            torch.backends.cudnn.allow_tf32 = tf32
        for name, value in newer.items():
            owner, _, attribute = name.rpartition(".")
            if attrgetter(name)(torch.backends) != value:
                setattr(attrgetter(owner)(torch.backends), attribute, value)

    return restore_rounding_modes


def has_readable_attribute(name: str) -> bool:
    try:
        attrgetter(name)(torch.backends)
    except (AttributeError, RuntimeError):
        return False
    return True


def set_deterministic(wanted: bool, warn_only: bool) -> None:
    """Set deterministic algorithms if that is a change. The call loads torch's compiler, which takes 1 to 2 s."""
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (wanted, warn_only):
        torch.use_deterministic_algorithms(wanted, warn_only=warn_only)


def set_compile_cache() -> None:
    """Let inductor store compiled code in the user's cache folder, unless the environment names another folder.

    Inductor's default is below /tmp. In the cache folder, restarts, other ranks and the runs of a sweep find the
    code.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_home() / "compiled"))


def set_backends(config: RunConfig, parallel: Parallel) -> list[str]:
    """Set determinism, kernels, and the precision of float32 products for this process. Return notes about them."""
    trainer = config.trainer
    if parallel.device.type == "cuda":
        # Torch asks once, at the first product of the process, whether this is set, so a deterministic run that comes
        # second in a notebook needs that the first one set it. 32 MiB, what cuBLAS takes on Hopper anyway.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(trainer.deterministic, warn_only=False)
    if (
        trainer.deterministic
    ):  # or torch writes NaN into all new memory, a kernel each, which no result depends on
        DETERMINISM.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = trainer.benchmark
    if trainer.detect_anomaly:
        torch.autograd.set_detect_anomaly(True)
    if trainer.compile.scope != "off":
        set_compile_cache()
    notes = [set_matmul(config.precision.matmul, parallel.device)]
    if parallel.device.type == "cuda":
        capability = torch.cuda.get_device_capability(parallel.device)
        notes.append(describe_matmul_precision(config.precision.matmul, config.precision.mode, capability))
    return [note for note in notes if note]


def set_threads(config: RunConfig, model: nn.Module, device: torch.device, notes: list[str]) -> None:
    """Set the number of CPU threads of one operation by a rule. It is not measured, because it changes the last bits
    of sums.

    A step of a few dense layers is too small for two threads unless it has many weights. With batches of one, two
    threads took 1.7x, 1.2x and 1.0x the time of one thread for 10, 85 and 301 thousand weights. They took 0.76x,
    0.73x and 0.60x for 0.6, 1.1 and 4.3 million weights, whose update is most of the step (two quiet cores of an
    Intel Xeon). To measure it again: `trainrun diagnose data=synthetic data.shape=[64] model.hidden=[1024,512]
    data.batch_size=1 trainer.num_threads=1`.
    """
    wanted = config.trainer.num_threads
    if wanted != "auto":
        torch.set_num_threads(wanted)
        return
    if device.type != "cpu" or torch.get_num_threads() == 1:
        return
    few = sum(each.numel() for each in model.parameters() if each.requires_grad) < FEW_WEIGHTS
    if few and is_tiny_step(model, config.data.batch_size):
        torch.set_num_threads(1)
        notes.append("trainer.num_threads: 1, a step this small does not gain from more")
