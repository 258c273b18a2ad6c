"""Show which convolutions of this torch write outside of their memory on a CPU with AVX2.

Each layer runs in a process of its own under glibc's checks of the heap, so it needs Linux with glibc.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import torch

CHECKS = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3", "ONEDNN_MAX_CPU_ISA": "AVX2"}
LAYER = """
import torch
layouts = {{"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}}
layer = torch.nn.Conv2d({channels}, 8, 1, {stride}, bias=False).to(memory_format=layouts["{weight}"])
pictures = torch.randn(4, {channels}, 8, 8).contiguous(memory_format=layouts["{pictures}"]).requires_grad_()
for _ in range(5):
    layer(pictures).square().sum().backward()
"""


def is_sound(channels: int, stride: int, weight: str, pictures: str) -> bool:
    code = LAYER.format(channels=channels, stride=stride, weight=weight, pictures=pictures)
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, **CHECKS}, capture_output=True)
    return found.returncode == 0


def main() -> None:
    print(f"torch {torch.__version__}: 1 x 1 convolutions whose backward corrupts the heap, held to AVX2")
    layouts = ("contiguous", "channels-last")
    for channels, stride in itertools.product((2, 3, 4, 6, 8), (1, 2)):
        for weight, pictures in itertools.product(layouts, layouts):
            if not is_sound(channels, stride, weight, pictures):
                print(f"{channels} channels, stride {stride}, weight {weight}, input {pictures}")


if __name__ == "__main__":
    main()
