"""int8: weights in one byte, each output with a scale of its own; inputs in bytes too where kernels gain by it.

what: `int8-weight-only` stores bytes and computes in floating point. `int8-dynamic` looks at the range of every batch
    of inputs and multiplies bytes, in linear layers. `int8-static` takes ranges that were measured once, on batches of
    the run.
when: serving on a CPU; weight-only for the size alone. When not: the training goes on (bytes are not trained).
source: Jacob et al. 2018, arXiv 1712.05877. The kernels are torch's own for CPUs (`torch.ops.quantized`); without them
    (a GPU, an exported graph, a later torch) the same numbers are computed in floating point. Embeddings and recurrent
    layers stay as they are.
gain: a quarter of the size; `trainrun quantize` prints the times before and after, as they are on your machine.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from trainrun.errors import ConfigError

Mode = Literal["int8-weight-only", "int8-dynamic", "int8-static"]
MODES = ("int8-weight-only", "int8-dynamic", "int8-static")
LARGEST = 127  # of a weight
INPUT_LEVELS, OUTPUT_LEVELS = 127, 255  # seven bits of an input, or the sums of older CPUs overflow
SMALLEST = 1e-12
WEIGHTS, ACTIVATIONS = torch.qint8, torch.quint8
NOT_TRAINED = (
    "transform.int8: bytes are not trained; go on with the run that this one was made from, and quantize that"
)


class Int8Layer(nn.Module):
    """A linear layer or a 2-D convolution with bytes for weights.

    weight_int8: of the layer's shape; scale: (outputs,); input_range, output_range: (low, high) of `int8-static`.
    plain: compute in floating point, for a graph. seen: the ranges while they are measured.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d, mode: str) -> None:
        super().__init__()
        weight = layer.weight.detach()
        flat = weight.float().flatten(1)
        scale = (flat.abs().amax(1) / LARGEST).clamp(min=SMALLEST)
        self.mode, self.plain, self.seen = mode, False, False
        self.conv: Any = None
        if isinstance(layer, nn.Conv2d):
            self.conv = (layer.stride, numeric_padding(layer), layer.dilation, layer.groups)
            if (
                mode == "int8-dynamic"
            ):  # torch's kernel loses what is below 0: it rounds to the steps of the inputs
                self.mode = "int8-weight-only"
        bytes_ = (flat / scale[:, None]).round().to(torch.int8).reshape(weight.shape)
        self.weight_int8: Tensor
        self.input_range: Tensor
        self.output_range: Tensor
        self.register_buffer("weight_int8", bytes_)
        self.scale = nn.Parameter(scale.to(weight.dtype))
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        if mode == "int8-static":
            self.register_buffer("input_range", torch.zeros(2))
            self.register_buffer("output_range", torch.zeros(2))
        self._packed: Any = None

    @property
    def weight(self) -> Tensor:
        """The weight in floating point."""
        return self.weight_int8.to(self.scale.dtype) * self.scale.reshape(
            -1, *[1] * (self.weight_int8.ndim - 1)
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._packed = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            raise ConfigError(NOT_TRAINED)
        if self.seen:
            return self._measured(x)
        if self.mode == "int8-weight-only":
            return self._product(x)
        if self.plain or x.device.type != "cpu" or not x.numel() or not self._pack():
            return self._in_floating_point(x)
        return self._by_kernel(x.float()).to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        if self.conv is None:
            return functional.linear(x, self.weight, self.bias)
        return functional.conv2d(x, self.weight, self.bias, *self.conv)

    def _measured(self, x: Tensor) -> Tensor:
        out = self._product(x)
        for kept, values in ((self.input_range, x), (self.output_range, out)):
            low, high = values.detach().float().aminmax()
            kept[0], kept[1] = torch.minimum(kept[0], low), torch.maximum(kept[1], high)
        return out

    def _in_floating_point(self, x: Tensor) -> Tensor:
        if self.mode == "int8-dynamic":
            return self._product(round_to_steps(x, x.min(), x.max(), INPUT_LEVELS))
        out = self._product(round_to_steps(x, self.input_range[0], self.input_range[1], INPUT_LEVELS))
        return round_to_steps(out, self.output_range[0], self.output_range[1], OUTPUT_LEVELS)

    def _pack(self) -> bool:
        """Whether the kernels are here; their order of the weights is made at the first call."""
        if self._packed is None:
            try:
                self._packed = self._for_kernels()
            except (AttributeError, RuntimeError):  # of another torch, or machine
                self._packed = False
        return self._packed is not False

    def _for_kernels(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensors of such types are deprecated: without them, see above
            scale, bias = (
                self.scale.detach().double(),
                None if self.bias is None else self.bias.detach().float(),
            )
            weight = torch.quantize_per_channel(
                self.weight.detach().float(), scale, torch.zeros_like(scale, dtype=torch.int64), 0, WEIGHTS
            )
        if self.conv is None:
            packed = torch.ops.quantized.linear_prepack(weight, bias)
        else:
            stride, padding, dilation, groups = self.conv
            packed = torch.ops.quantized.conv2d_prepack(weight, bias, stride, padding, dilation, groups)
        if self.mode == "int8-dynamic":
            return packed, None, None
        return (
            packed,
            scale_and_zero_point(self.input_range, INPUT_LEVELS),
            scale_and_zero_point(self.output_range, OUTPUT_LEVELS),
        )

    def _by_kernel(self, x: Tensor) -> Tensor:
        packed, before, after = self._packed
        kernels = torch.ops.quantized
        if before is None:
            return kernels.linear_dynamic(x, packed, True)  # type: ignore[no-any-return]
        step, zero = before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = torch.quantize_per_tensor(x, step, zero, ACTIVATIONS)
        kernel = kernels.linear if self.conv is None else kernels.conv2d
        return kernel(given, packed, *after).dequantize()  # type: ignore[no-any-return]


def round_to_steps(x: Tensor, low: Tensor, high: Tensor, levels: int) -> Tensor:
    """Round to the nearest of `levels` + 1 even steps from low to high. 0 is one of the steps."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = ((high - low) / levels).clamp(min=SMALLEST)
    zero = (-low / step).round()
    return ((x / step + zero).round().clamp(0, levels) - zero) * step


def scale_and_zero_point(both: Tensor, levels: int) -> tuple[float, int]:
    """Return step size and zero point of a range. both: its lower and upper end."""
    low, high = min(float(both[0]), 0.0), max(float(both[1]), 0.0)
    step = max((high - low) / levels, SMALLEST)
    return step, round(-low / step)


def int8(model: nn.Module, to: Mode = "int8-dynamic") -> nn.Module:
    """Replace linear layers and 2-D convolutions that have weights of their own.

    Subclasses and tied layers are left unchanged. Raise ValueError if no layer can be replaced.
    """
    if to not in MODES:
        raise ValueError(f"to={to}: must be one of {', '.join(MODES)}")
    for layer in [one for one in model.modules() if parametrize.is_parametrized(one)]:
        _with_plain_weights(layer)
    new = {name: Int8Layer(layer, to) for name, layer in replaceable_layers(model).items()}
    if not new:
        raise ValueError(f"to={to}: the model has no torch.nn.Linear or Conv2d with weights of its own")
    for name, layer in new.items():
        if not name:
            return layer
        model.set_submodule(name, layer)
    return model


def _with_plain_weights(layer: Any) -> None:
    """Keep the weights that masks or norms make. torch's own function would change copies of the layer too."""
    made = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
    layer.__class__ = parametrize.type_before_parametrizations(layer)
    del layer.parametrizations
    for name, value in made.items():
        layer.register_parameter(name, nn.Parameter(value))


def replaceable_layers(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers and convolutions that can be replaced, by name."""
    return {
        name: layer
        for name, layer in untied_layers(model).items()
        if type(layer) is nn.Linear
        or (type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and numeric_padding(layer) is not None)
    }


def numeric_padding(layer: nn.Conv2d) -> tuple[int, ...] | None:
    """Return the padding as numbers, for the kernels; None if `same` pads the two sides differently."""
    if not isinstance(layer.padding, str):
        return layer.padding
    both = [
        d * (k - 1) * (layer.padding == "same")
        for d, k in zip(layer.dilation, layer.kernel_size, strict=True)
    ]
    return None if any(one % 2 for one in both) else tuple(one // 2 for one in both)


def untied_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with matrices whose parameters are not shared with another layer, by name."""
    counts = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    found = {}
    for name, layer in model.named_modules():
        own = [*layer.parameters(recurse=False)]
        if any(one.ndim > 1 for one in own) and all(counts[id(one)] == 1 for one in own):
            found[name] = layer
    return found


def has_computed_weight(layer: nn.Module) -> bool:
    """Return whether the weight is computed at each call, by torch's old weight_norm or spectral_norm."""
    return not isinstance(getattr(layer, "weight", None), nn.Parameter | None)


def explain_float_layers(model: nn.Module, what: str = "bytes") -> dict[str, str]:
    """Return the layers whose matrices stay in floating point, with reasons. what: as in `no bytes for this`."""
    alone = untied_layers(model)
    return {
        name: "shares its weight with another layer"
        if name not in alone
        else f"no {what} for this {type(layer).__name__}"
        + ", whose weight is computed" * has_computed_weight(layer)
        for name, layer in model.named_modules()
        if any(one.ndim > 1 and one.is_floating_point() for one in layer.parameters(recurse=False))
    }


@contextmanager
def record_ranges(model: nn.Module) -> Iterator[None]:
    """In this context, layers of `int8-static` record the ranges of their inputs and outputs."""
    layers = [layer for layer in model.modules() if isinstance(layer, Int8Layer)]
    for layer in layers:
        layer.seen = True
    try:
        yield
    finally:
        for layer in layers:
            layer.seen, layer._packed = False, None


def compute_in_floats(model: nn.Module) -> nn.Module:
    """Make 8-bit layers compute the same numbers without their kernels, for an exported graph."""
    for layer in model.modules():
        if isinstance(layer, Int8Layer):
            layer.plain = True
    return model
