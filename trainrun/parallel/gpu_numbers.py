"""GPUs that are asked for by their numbers, and those that torch does not see: what is said of them."""

from __future__ import annotations

from trainrun.errors import ConfigError


def check_listed(listed: list[int], num_gpus: int) -> None:
    """Raises ConfigError for numbers that are no GPUs of this machine."""
    if not num_gpus:
        raise ConfigError(
            f"parallel.devices={listed}: names GPUs by their numbers, and this run computes on none; say how many, as "
            f"parallel.devices={len(listed)}"
        )
    if wrong := [number for number in listed if number >= num_gpus]:
        raise ConfigError(
            f"parallel.devices={listed}: no GPU {wrong[0]}, {num_gpus} GPU(s) visible here, 0 to {num_gpus - 1}"
        )


def unseen(accelerator: str, count: int, driver: str) -> str:
    """The message where the driver counts GPUs and torch sees none."""
    import torch

    cuda = torch.version.cuda
    build = f"torch {torch.__version__} was built for {f'CUDA {cuda}' if cuda else 'the CPU alone'}"
    return (
        f"parallel.accelerator={accelerator}: {count} GPU(s) here ({driver}), but torch sees none; {build}. Install "
        "the build of torch for this driver (trainrun help gpus-and-drivers), or say parallel.accelerator=cpu"
    )
