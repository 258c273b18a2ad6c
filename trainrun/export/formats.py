"""The formats of an export: each writes the network and gives back a function that runs what was written."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor

from trainrun.errors import ConfigError
from trainrun.export.served import RealSamples, as_tuple, of_samples, quietly
from trainrun.runs.run_folder import write_json

Runner = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
ONNX_EXTRA = "--to onnx: needs {}; pip install 'trainrun[onnx]'"
FIXED_BATCH = (
    "this model fixes the size of its batches, as len(x) in its forward does and x.shape[0] does not; change that, or "
    "leave out --dynamic batch"
)


@dataclass(frozen=True)
class Order:
    """What to export. dynamic: any number of samples in a batch. adapter: the tensors of one, where weights alone are
    written; None for all."""

    samples: RealSamples
    dynamic: bool
    about: dict[str, Any]
    adapter: frozenset[str] | None = None


def to_safetensors(order: Order, path: Path) -> tuple[Path, Runner]:
    """The weights alone, tied ones once; how inputs are scaled stands in the file's metadata, and an adapter's base."""
    model, metadata = order.samples.served.model, {"trainrun": json.dumps(order.about)}
    if order.adapter is None:
        save_model(model, str(path), metadata=metadata)
        return path, _with_weights(order, path)
    path = path.with_name("adapter.safetensors")
    state = model.state_dict()
    save_file(
        {name: state[name].clone(memory_format=torch.contiguous_format) for name in order.adapter},
        path,
        metadata=metadata,
    )
    return path, _with_weights(order, path, order.adapter)


def to_huggingface(order: Order, folder: Path) -> tuple[Path, Runner]:
    """A folder in the layout of the Hugging Face hub: `config.json` and `model.safetensors`."""
    folder.mkdir(exist_ok=True)
    weights = folder / "model.safetensors"
    save_model(order.samples.served.model, str(weights), metadata={"format": "pt"})
    write_json(folder / "config.json", order.about)
    return folder, _with_weights(order, weights)


def _with_weights(order: Order, path: Path, names: Collection[str] | None = None) -> Runner:
    """The same network with the weights of the file, which are all that it has, or those."""
    fresh = copy.deepcopy(order.samples.served)
    for name, tensor in fresh.model.state_dict().items():
        if names is None or name in names:
            tensor.zero_()
    load_model(fresh.model, str(path), strict=names is None)
    return lambda inputs: as_tuple(fresh(*inputs))


def to_torch_export(order: Order, path: Path) -> tuple[Path, Runner]:
    """A graph that `torch.export.load` reads without this package or the model's code."""
    samples = order.samples
    with told("torch.export"):
        program = torch.export.export(samples.served, samples.inputs[0], dynamic_shapes=_shapes(order))
        data = io.BytesIO()  # on a full disk torch's own writer ends the process
        torch.export.save(program, data)
        path.write_bytes(data.getbuffer())
        module = torch.export.load(path).module()
    return path, lambda inputs: as_tuple(module(*inputs))


def to_onnx(order: Order, path: Path) -> tuple[Path, Runner]:
    """A graph for onnxruntime and others."""
    samples = order.samples
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ImportError as error:
            raise ConfigError(ONNX_EXTRA.format(name)) from error
    import onnxruntime

    num_outputs = len(samples.expected[0])
    outputs = ["output", *(f"output{i}" for i in range(1, num_outputs))]
    with told("onnx"):
        program = torch.onnx.export(
            samples.served, samples.inputs[0], dynamo=True, verbose=False, external_data=False,
            dynamic_shapes=_shapes(order), input_names=samples.names, output_names=outputs,
        )  # fmt: skip
        assert program is not None
        program.model.metadata_props["trainrun"] = json.dumps(order.about)
        program.save(str(path))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    if order.dynamic and not any(
        isinstance(size, str) for one in session.get_inputs() for size in one.shape[:1]
    ):
        raise ConfigError(f"--to onnx: {FIXED_BATCH}")
    names = [one.name for one in session.get_inputs()]

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = {name: one.numpy() for name, one in zip(names, inputs, strict=True)}
        return tuple(torch.from_numpy(one) for one in session.run(None, given))

    return path, run


FORMATS: dict[str, tuple[str, Callable[[Order, Path], tuple[Path, Runner]]]] = {
    "safetensors": ("model.safetensors", to_safetensors),
    "onnx": ("model.onnx", to_onnx),
    "torch.export": ("model.pt2", to_torch_export),
    "huggingface": ("huggingface", to_huggingface),
}


def _shapes(order: Order) -> Any:
    if not order.dynamic:
        return None
    batch = torch.export.Dim("batch")
    return {"inputs": tuple({0: batch} if many else None for many in of_samples(order.samples.inputs[0]))}


@contextlib.contextmanager
def told(name: str) -> Iterator[None]:
    """What the exporter prints is kept back; what it cannot do is one line."""
    try:
        with quietly():
            yield
    except (ConfigError, OSError):
        raise
    except Exception as error:  # of torch's compiler, the exporter or the runtime
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = " ".join(str(cause).split())[:300]
        if "marked batch as dynamic" in text:
            raise ConfigError(f"--to {name}: {FIXED_BATCH}") from error
        text = f"{type(cause).__name__}: {text}"
        raise ConfigError(f"--to {name}: this model cannot be exported ({text})") from error
