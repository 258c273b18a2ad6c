"""int8 weights: one byte per weight and a scale for each output. Inputs become bytes too if the kernels are faster
then.

what: `int8-weight-only` stores bytes and computes in floating point. `int8-dynamic` measures the range of every
    batch of inputs and multiplies bytes, in linear and recurrent layers. `int8-static` uses ranges that were
    measured once on batches of the run, in linear layers and 2-D convolutions.
when: inference on a CPU; weight-only to save memory. When not: training continues (bytes are not trained).
source: Jacob et al. 2018, arXiv 1712.05877. The kernels are torch's own for CPUs (`torch.ops.quantized`). Without
    them (on a GPU, in an exported graph, or in a later torch) the layers compute in floating point. torchao is not
    used: its dynamic layers need torch.compile. Without it, two layers of 512 x 2048 took 14.6 ms a sample, and
    these 0.12 ms (one Xeon core).
gain: a quarter of the size. `trainrun quantize` prints the times before and after on your machine.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from trainrun.errors import ConfigError

Mode = Literal["int8-weight-only", "int8-dynamic", "int8-static"]
MODES = ("int8-weight-only", "int8-dynamic", "int8-static")
LARGEST = 127  # of a weight
INPUT_LEVELS, OUTPUT_LEVELS = 127, 255  # seven bits of an input, or the sums of older CPUs overflow
SMALLEST = 1e-12
RECURRENT = (nn.LSTM, nn.GRU)
STORED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *RECURRENT)
KERNEL_TYPES = {"int8-weight-only": (), "int8-dynamic": (nn.Linear, *RECURRENT),
                "int8-static": (nn.Linear, nn.Conv2d, *RECURRENT)}  # fmt: skip
NOT_TRAINED = (
    "transform.int8: quantized weights cannot be trained; continue the original run, and quantize it again"
)


class Int8Matrix(nn.Module):
    """A parametrization that stores a weight as bytes, with a scale for each output."""

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes, in the shape of the weight, and the scales (outputs,)."""
        rows = weight.float().flatten(1)
        scale = (rows.abs().amax(1) / LARGEST).clamp(min=SMALLEST)
        values = (rows / scale[:, None]).round().to(torch.int8)
        return values.reshape(weight.shape), scale.to(weight.dtype)

    def forward(self, values: Tensor, scale: Tensor) -> Tensor:
        ones = [1] * (values.ndim - 1)
        return values.to(scale.dtype) * scale.reshape(-1, *ones)


class Int8Layer(nn.Module):
    """A layer with `Int8Matrix` weights whose inputs become bytes too. It also has the attributes of the original
    layer.

    in_floats: compute in floating point, for an exported graph. input_range, output_range: (low, high) of a static
        layer; None for a dynamic layer, which uses the range of each batch. is_recording: measure these ranges.
    """

    def __init__(self, layer: nn.Module, is_static: bool) -> None:
        super().__init__()
        self.layer, self.in_floats, self.is_recording = layer, False, False
        self.input_range: Tensor | None
        self.output_range: Tensor | None
        self.register_buffer("input_range", torch.zeros(2) if is_static else None)
        self.register_buffer("output_range", torch.zeros(2) if is_static else None)
        self._kernel: Any = None  # False if there is none

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # `__deepcopy__` of the layer would copy the layer alone
                raise
            return getattr(super().__getattr__("layer"), name)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._kernel = None

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute the layer. hx: the state of a recurrent layer."""
        x = input
        if self.is_recording:
            return self._record(x)
        is_batch = isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() > 0
        has_kernel = is_batch and not self.in_floats and self._find_kernel()
        if isinstance(self.layer, RECURRENT):
            fits = has_kernel and x.ndim == 3
            return self._kernel(x, hx) if fits else self.layer(x, hx)
        return self._kernel(x.float()).to(x.dtype) if has_kernel else self._compute_in_floats(x)

    def _record(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        for limits, values in ((self.input_range, x), (self.output_range, output)):
            assert limits is not None
            low, high = values.detach().float().aminmax()
            limits[0], limits[1] = torch.minimum(limits[0], low), torch.maximum(limits[1], high)
        return output

    def _compute_in_floats(self, x: Tensor) -> Tensor:
        """Return the result of the kernel, computed in floating point. The order of sums may differ."""
        if self.input_range is None or self.output_range is None:
            low, high = x.min(), x.max()
            return self.layer(round_to_steps(x, low, high, INPUT_LEVELS))  # type: ignore[no-any-return]
        output = self.layer(round_to_steps(x, self.input_range[0], self.input_range[1], INPUT_LEVELS))
        return round_to_steps(output, self.output_range[0], self.output_range[1], OUTPUT_LEVELS)

    def _find_kernel(self) -> bool:
        """Return whether there is a kernel. Pack the weights for it at the first call."""
        if self._kernel is None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # tensors of such types are deprecated: see the head
                    self._kernel = build_kernel(self.layer, self.input_range, self.output_range)
            except (AttributeError, RuntimeError):  # of another torch, or machine
                self._kernel = False
        return self._kernel is not False


@torch.no_grad()
def build_kernel(layer: Any, input_range: Tensor | None, output_range: Tensor | None) -> Callable[..., Any]:
    """Return a function that computes the layer in bytes."""
    kernels = torch.ops.quantized
    if isinstance(layer, RECURRENT):
        return partial(run_recurrent, layer, pack_cells(layer))
    if isinstance(layer, nn.Conv2d):
        options = (layer.stride, numeric_padding(layer), layer.dilation, layer.groups)
        packed = kernels.conv2d_prepack(
            quantized_weight(layer, "weight"), float_bias(layer, "bias"), *options
        )
    else:
        packed = kernels.linear_prepack(quantized_weight(layer, "weight"), float_bias(layer, "bias"))
    if input_range is None or output_range is None:
        return partial(kernels.linear_dynamic, W_prepack=packed, reduce_range=True)
    kernel = kernels.conv2d if isinstance(layer, nn.Conv2d) else kernels.linear
    step, zero = scale_and_zero_point(input_range, INPUT_LEVELS)
    after = scale_and_zero_point(output_range, OUTPUT_LEVELS)

    def run_static(x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = torch.quantize_per_tensor(x, step, zero, torch.quint8)
        return kernel(values, packed, *after).dequantize()  # type: ignore[no-any-return]

    return run_static


def quantized_weight(layer: Any, name: str) -> Tensor:
    """Return a weight as a quantized tensor of torch."""
    scale = layer.parametrizations[name].original1.detach().double()
    zeros = torch.zeros_like(scale, dtype=torch.int64)
    return torch.quantize_per_channel(getattr(layer, name).float(), scale, zeros, 0, torch.qint8)


def float_bias(layer: Any, name: str) -> Tensor | None:
    """Return the bias of a layer as float32; None without one."""
    bias = getattr(layer, name, None)
    return None if not isinstance(bias, Tensor) else bias.detach().float()


def pack_cells(layer: Any) -> list[Any]:
    """Return the packed weights of each layer and direction of a recurrent module."""
    cells, kernels = [], torch.ops.quantized
    for number in range(layer.num_layers):
        for ending in ("", "_reverse")[: 1 + layer.bidirectional]:
            packed, biases = [], []
            for part in ("ih", "hh"):
                name = f"{part}_l{number}{ending}"
                weight = quantized_weight(layer, f"weight_{name}")
                bias = float_bias(layer, f"bias_{name}")
                biases.append(torch.zeros(len(weight)) if bias is None else bias)
                packed.append(kernels.linear_prepack(weight, biases[-1]))
            cells.append(kernels.make_quantized_cell_params_dynamic(*packed, *biases, True))
    return cells


def run_recurrent(layer: Any, cells: list[Any], x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """Return the outputs (as nn.LSTM and nn.GRU do) and the last state for a batch of sequences."""
    if state is None:
        shape = (len(cells), x.shape[0 if layer.batch_first else 1], layer.hidden_size)
        state = x.new_zeros(shape, dtype=torch.float32)
        state = (state, state) if isinstance(layer, nn.LSTM) else state
    options = (True, layer.num_layers, 0.0, False, layer.bidirectional, layer.batch_first)
    if isinstance(layer, nn.GRU):
        output, after = torch.quantized_gru(x.float(), state.float(), cells, *options)
        return output.to(x.dtype), after.to(x.dtype)
    state = [part.float() for part in state]
    output, hidden, cell = torch.quantized_lstm(
        x.float(), state, cells, *options, dtype=torch.qint8, use_dynamic=True
    )
    return output.to(x.dtype), (hidden.to(x.dtype), cell.to(x.dtype))


def round_to_steps(x: Tensor, low: Tensor, high: Tensor, levels: int) -> Tensor:
    """Round to the nearest of `levels` + 1 evenly spaced values from low to high. 0 is one of them."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = ((high - low) / levels).clamp(min=SMALLEST)
    zero = (-low / step).round()
    return ((x / step + zero).round().clamp(0, levels) - zero) * step


def scale_and_zero_point(both: Tensor, levels: int) -> tuple[float, int]:
    """Return the step size and the zero point of a range. both: the two ends of the range."""
    low, high = min(float(both[0]), 0.0), max(float(both[1]), 0.0)
    step = max((high - low) / levels, SMALLEST)
    return step, round(-low / step)


def int8(model: nn.Module, to: Mode = "int8-dynamic") -> nn.Module:
    """Store the weights of linear, convolutional and recurrent layers in bytes, in place.

    Subclasses and layers with tied weights do not change. Raise ValueError if no layer can be replaced.
    """
    if to not in MODES:
        raise ValueError(f"to={to}: must be one of {', '.join(MODES)}")
    for layer in [layer for layer in model.modules() if parametrize.is_parametrized(layer)]:
        _remove_parametrizations(layer)
    layers = {name: layer for name, layer in untied_layers(model).items() if type(layer) in STORED}
    layers = {name: layer for name, layer in layers.items() if not has_computed_weight(layer)}
    if not layers:
        kinds = ", ".join(kind.__name__ for kind in STORED)
        raise ValueError(f"to={to}: the model has no layer with weights of its own among {kinds}")
    for name, layer in layers.items():
        is_static = to == "int8-static" and not isinstance(layer, RECURRENT)
        has_kernel = type(layer) in KERNEL_TYPES[to] and can_be_packed(layer)
        store_in_bytes(layer)
        quantized = Int8Layer(layer, is_static) if has_kernel else layer
        quantized.register_forward_pre_hook(refuse_training)
        if not name:
            return quantized
        model.set_submodule(name, quantized)
    return model


def refuse_training(layer: nn.Module, inputs: Any) -> None:
    """Raise ConfigError if the layer is called in training mode."""
    if layer.training and torch.is_grad_enabled():
        raise ConfigError(NOT_TRAINED)


@torch.no_grad()
def store_in_bytes(layer: nn.Module) -> None:
    """Store the matrices of a layer as `Int8Matrix`."""
    matrices = [name for name, value in layer.named_parameters(recurse=False) if value.ndim > 1]
    for name in matrices:
        getattr(layer, name).requires_grad_(False)  # no gradient can be had of bytes
        parametrize.register_parametrization(layer, name, Int8Matrix())
        layer.parametrizations[name].original1.requires_grad_()  # type: ignore[union-attr, index]


def can_be_packed(layer: Any) -> bool:
    """Return whether a kernel supports the options of a layer."""
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros" and numeric_padding(layer) is not None
    return getattr(layer, "proj_size", 0) == 0


def _remove_parametrizations(layer: Any) -> None:
    """Replace parametrizations (masks, norms) by their current weights.

    torch's own function would also change copies of the layer.
    """
    made = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
    layer.__class__ = parametrize.type_before_parametrizations(layer)
    del layer.parametrizations
    for name, value in made.items():
        layer.register_parameter(name, nn.Parameter(value))


def numeric_padding(layer: nn.Conv2d) -> tuple[int, ...] | None:
    """Return the padding as numbers, for the kernels; None if `same` pads the two sides differently."""
    if not isinstance(layer.padding, str):
        return layer.padding
    both = [
        d * (k - 1) * (layer.padding == "same")
        for d, k in zip(layer.dilation, layer.kernel_size, strict=True)
    ]
    return None if any(width % 2 for width in both) else tuple(width // 2 for width in both)


def untied_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with matrices that share no parameter with another layer, by name."""
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers = {}
    for name, layer in model.named_modules():
        weights = [*layer.parameters(recurse=False)]
        if any(parameter.ndim > 1 for parameter in weights) and all(
            counts[id(parameter)] == 1 for parameter in weights
        ):
            layers[name] = layer
    return layers


def has_computed_weight(layer: nn.Module) -> bool:
    """Return whether the weight is computed at each call, by torch's old weight_norm or spectral_norm."""
    return not isinstance(getattr(layer, "weight", None), nn.Parameter | None)


def explain_float_layers(model: nn.Module, storage: str = "bytes") -> dict[str, str]:
    """Return the layers whose matrices stay in floating point, each with the reason. storage: a word for the
    message.
    """
    alone = untied_layers(model)
    return {
        name: "shares its weight with another layer"
        if name not in alone
        else f"no {storage} for this {type(layer).__name__}"
        + ", whose weight is computed" * has_computed_weight(layer)
        for name, layer in model.named_modules()
        if any(
            parameter.ndim > 1 and parameter.is_floating_point()
            for parameter in layer.parameters(recurse=False)
        )
    }


@contextmanager
def record_ranges(model: nn.Module) -> Iterator[None]:
    """Record the ranges of inputs and outputs of `int8-static` layers inside the block."""
    layers = [layer for layer in model.modules() if isinstance(layer, Int8Layer)]
    layers = [layer for layer in layers if layer.input_range is not None]
    for layer in layers:
        layer.is_recording = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_recording, layer._kernel = False, None


def compute_in_floats(model: nn.Module) -> nn.Module:
    """Make 8-bit layers compute without their kernels, for an exported graph."""
    for layer in model.modules():
        if isinstance(layer, Int8Layer):
            layer.in_floats = True
    return model
