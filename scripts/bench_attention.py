"""Which attention kernel is fastest here: forward and backward, by head width, context, batch and type.

    python scripts/bench_attention.py [--rounds 7] [--threads 1] [--device cuda]

The kernels take turns; what is printed is each one's fastest time as a multiple of the best, and what `auto` takes.
"""

from __future__ import annotations

import argparse

import bench_kit
import torch

from trainrun.model.attention import causal_attention, fastest_kernel

KERNELS = ("flash", "fp32", "plain", "math")
WIDTHS, CONTEXTS, BATCHES = (16, 32, 64, 128), (64, 256, 512, 768, 1024), (2, 8, 16)
HEADS = 4
MOST_POSITIONS = 8192


def seconds(kernel: str, parts: list[torch.Tensor], gradient: torch.Tensor) -> float:
    started = bench_kit.now()
    causal_attention(*parts, None, 0.0, kernel).backward(gradient)
    return bench_kit.now() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    bench_kit.add_device(parser)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    worst = 1.0
    for dtype in (torch.float32, torch.bfloat16):
        for width in WIDTHS:
            for context in CONTEXTS:
                for batch in BATCHES:
                    if batch * context > MOST_POSITIONS:
                        continue
                    shape = (batch, HEADS, context, width)
                    parts = [
                        torch.randn(shape, dtype=dtype, device=given.device, requires_grad=True)
                        for _ in range(3)
                    ]
                    gradient = torch.randn(shape, dtype=dtype, device=given.device)
                    times = {name: [seconds(name, parts, gradient)] for name in KERNELS}
                    for _ in range(given.rounds):
                        for name in KERNELS:
                            times[name].append(seconds(name, parts, gradient))
                    best = min(min(found) for found in times.values())
                    ratios = {name: min(found) / best for name, found in times.items()}
                    taken = fastest_kernel(given.device, dtype, context)
                    worst = max(worst, ratios[taken])
                    shown = "  ".join(f"{name} {ratio:5.2f}" for name, ratio in ratios.items())
                    where = f"{str(dtype)[6:]:9} width {width:3} context {context:4} batch {batch:2}"
                    print(f"{where}  {shown}  auto {taken} {ratios[taken]:.2f}", flush=True)
    print(f"auto is at most {worst:.2f}x the best")


if __name__ == "__main__":
    main()
