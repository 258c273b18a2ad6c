"""Count the floating-point operations of a run, and compare their rate with the GPU's data-sheet peak (MFU).

what: one forward and backward pass under torch's FlopCounterMode, after the training, on state that is restored. MFU
    is the rate divided by the data-sheet peak, if the GPU is known. Causal attention counts as the full square.
when: at the end of a run that took at least MIN_SECONDS. when not: custom loops that cannot be repeated, and
    gradient checkpointing, whose recomputation would count too. Then there is no number.
source: https://arxiv.org/abs/2204.02311, appendix B (MFU); torch/utils/flop_counter.py
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from trainrun.data.batch import map_leaves
from trainrun.interfaces import has_count_method
from trainrun.optimizer.plain_step import avoid_compiler_import
from trainrun.seeding import restore_random_state
from trainrun.training.components import Components
from trainrun.training.without_trace import read_first_batches, run_trial

MIN_SECONDS = 10.0  # of training
MIN_STEPS = 50  # counting takes about one
# Products of half precision without sparsity, by NVIDIA's data sheets: what others state MFU against.
DATA_SHEETS = {
    "H200": 989e12, "H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
    "A10": 125e12, "V100-SXM2": 125e12, "T4": 65e12,
}  # fmt: skip
FLOAT16_ALONE = ("V100-SXM2", "T4")

Shape = Sequence[int]


class Work(NamedTuple):
    """The floating-point operations of a run.

    flops: of forward and backward for one item. data_sheet: the device's peak in FLOP per second; 0 if unknown.
    """

    flops: float
    data_sheet: float = 0.0


def measure_work(run: Components) -> Work | None:
    """Return the operations per item. Return None if they cannot be counted without side effects, or with
    recomputation.

    torch's counter keeps all activations, which would exceed the memory of a run with gradient checkpointing.
    """
    if run.config.trainer.gradient_checkpointing != "none":
        return None
    try:
        with restore_random_state():
            flops = flops_per_item(run)
            device, dtype = run.parallel.device, matmul_dtype(run)
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    # Whatever the user's model does in its copy, a finished run is not lost to a figure.
    except Exception:
        return None
    return Work(flops, data_sheet_flops(name, dtype)) if flops else None


def data_sheet_flops(name: str, dtype: torch.dtype) -> float:
    """Return the data-sheet peak of a GPU in FLOP per second, by the GPU's name.

    Return 0 for unknown GPUs, for parts of a GPU (MIG), and for other dtypes.
    """
    gpu_name = next((key for key in DATA_SHEETS if re.search(rf"\b{key}\b", name)), "")
    halves = (torch.float16,) if gpu_name in FLOAT16_ALONE else (torch.float16, torch.bfloat16)
    return DATA_SHEETS[gpu_name] if gpu_name and dtype in halves and "MIG" not in name else 0.0


def flops_per_item(run: Components) -> float:
    """Return the operations per item in the first batch of the first epoch."""
    batch = map_leaves(read_first_batches(run.train)[0], lambda leaf: leaf)
    owners = (run.model, run.task, batch, run.optimizer, *run.hooks.by_key.values())
    return run_trial(partial(count_flops, run, batch), run.parallel.device, *owners)


def count_flops(run: Components, batch: Any) -> float:
    """Return the operations per item of the batch. The caller restores the state of the run."""
    with flop_counter() as counted, run_without_compiler(counted):
        with run.precision.autocast():
            out = run.task.step(run.model, batch)
        out.loss_sum.backward()  # type: ignore[no-untyped-call]
    items = float(
        run.task.count(batch) if has_count_method(run.task) else run.counting.read_output_count(out)
    )
    return float(counted.get_total_flops()) / items if items else math.nan


@contextmanager
def run_without_compiler(counted: FlopCounterMode) -> Iterator[None]:
    """Run compiled modules eagerly inside the block, without importing torch's compiler (1.3 s)."""
    loaded = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if loaded else nullcontext()
    mode: Any = counted.mode
    with avoid_compiler_import([type(mode).__torch_dispatch__]), stance:
        yield


def flop_counter() -> FlopCounterMode:
    """Return a counter that also supports attention and LSTM on a CPU, which torch's own does not."""
    aten = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        aten.mkldnn_rnn_layer: _recurrent_flops,
        aten.mkldnn_rnn_layer_backward: _recurrent_backward_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward_flops(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


def _recurrent_flops(inputs: Shape, weight_in: Shape, weight_back: Shape, *_: Any, **__: Any) -> int:
    """Return the operations of a recurrent layer.

    inputs: (T, B, I). Weights: (gates * H, I) and (gates * H, H), each used at every position.
    """
    return 2 * math.prod(inputs[:2]) * (math.prod(weight_in) + math.prod(weight_back))


def _recurrent_backward_flops(inputs: Shape, weight_in: Shape, weight_back: Shape, *_: Any, **__: Any) -> int:
    return 2 * _recurrent_flops(inputs, weight_in, weight_back)


def matmul_dtype(run: Components) -> torch.dtype:
    """Return the dtype of the run's matrix products."""
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    mode = run.config.precision.mode
    if mode in mixed:
        return mixed[mode]
    return next((p.dtype for p in run.model.parameters() if p.is_floating_point()), torch.float32)
