"""The formats of an export. Each function writes the network and returns a runner of the written file."""

from __future__ import annotations

import contextlib
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
from trainrun.export.served import RealSamples, is_per_sample, list_outputs, suppress_output
from trainrun.folder.run_folder import write_json
from trainrun.runtime.network_copy import copy_network

Runner = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
ONNX_EXTRA = "--to onnx: needs {}; pip install 'trainrun[onnx]'"
FIXED_BATCH = (
    "this model fixes the size of its batches, as len(x) in its forward does and x.shape[0] does not; change that, or "
    "leave out --dynamic batch"
)


@dataclass(frozen=True)
class ExportRequest:
    """What to export. dynamic: whether the exported file accepts any batch size. about: facts for the metadata.

    adapter: the tensor names of an adapter, to export only these; None for all.
    """

    samples: RealSamples
    dynamic: bool
    about: dict[str, Any]
    adapter: frozenset[str] | None = None


def write_safetensors_format(request: ExportRequest, path: Path) -> tuple[Path, Runner]:
    """Write the weights; tied weights are written once. The metadata has the scaling of inputs, and the base of an
    adapter.
    """
    model, metadata = request.samples.served.model, {"trainrun": json.dumps(request.about)}
    if request.adapter is None:
        save_model(model, str(path), metadata=metadata)
        return path, _build_runner(request, path)
    path = path.with_name("adapter.safetensors")
    state = model.state_dict()
    save_file(
        {name: state[name].clone(memory_format=torch.contiguous_format) for name in request.adapter},
        path,
        metadata=metadata,
    )
    return path, _build_runner(request, path, request.adapter)


def write_huggingface(request: ExportRequest, folder: Path) -> tuple[Path, Runner]:
    """Write a folder in the layout of the Hugging Face Hub: `config.json` and `model.safetensors`."""
    folder.mkdir(exist_ok=True)
    weights = folder / "model.safetensors"
    save_model(request.samples.served.model, str(weights), metadata={"format": "pt"})
    write_json(folder / "config.json", request.about)
    return folder, _build_runner(request, weights)


def _build_runner(request: ExportRequest, path: Path, names: Collection[str] | None = None) -> Runner:
    """Return a runner of a copy of the network with the weights of the file: all of them, or those of `names`."""
    fresh = copy_network(request.samples.served)
    for name, tensor in fresh.model.state_dict().items():
        if names is None or name in names:
            tensor.zero_()
    load_model(fresh.model, str(path), strict=names is None)
    return lambda inputs: list_outputs(fresh(*inputs))


def write_torch_export(request: ExportRequest, path: Path) -> tuple[Path, Runner]:
    """Write a graph for `torch.export.load`, which needs neither trainrun nor the code of the model."""
    samples = request.samples
    with exporter_errors("torch.export"):
        program = torch.export.export(
            samples.served, samples.inputs[0], dynamic_shapes=_dynamic_shapes(request)
        )
        data = io.BytesIO()  # on a full disk torch's own writer ends the process
        torch.export.save(program, data)
        path.write_bytes(data.getbuffer())
        module = torch.export.load(path).module()
    return path, lambda inputs: list_outputs(module(*inputs))


def write_onnx(request: ExportRequest, path: Path) -> tuple[Path, Runner]:
    """Write a graph for onnxruntime. Raise ConfigError if a package is missing or the graph only accepts one batch
    size.
    """
    samples = request.samples
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ImportError as error:
            raise ConfigError(ONNX_EXTRA.format(name)) from error
    import onnxruntime

    num_outputs = len(samples.expected[0])
    outputs = ["output", *(f"output{i}" for i in range(1, num_outputs))]
    with exporter_errors("onnx"):
        program = torch.onnx.export(
            samples.served, samples.inputs[0], dynamo=True, verbose=False, external_data=False,
            dynamic_shapes=_dynamic_shapes(request), input_names=samples.names, output_names=outputs,
        )  # fmt: skip
        assert program is not None
        program.model.metadata_props["trainrun"] = json.dumps(request.about)
        program.save(str(path))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    graph_inputs = session.get_inputs()
    is_dynamic = any(isinstance(size, str) for graph_input in graph_inputs for size in graph_input.shape[:1])
    if request.dynamic and not is_dynamic:
        raise ConfigError(f"--to onnx: {FIXED_BATCH}")

    def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        feed = {
            graph_input.name: tensor.numpy() for graph_input, tensor in zip(graph_inputs, inputs, strict=True)
        }
        return tuple(torch.from_numpy(output) for output in session.run(None, feed))

    return path, run


FORMATS: dict[str, tuple[str, Callable[[ExportRequest, Path], tuple[Path, Runner]]]] = {
    "safetensors": ("model.safetensors", write_safetensors_format),
    "onnx": ("model.onnx", write_onnx),
    "torch.export": ("model.pt2", write_torch_export),
    "huggingface": ("huggingface", write_huggingface),
}


def _dynamic_shapes(request: ExportRequest) -> Any:
    if not request.dynamic:
        return None
    batch = torch.export.Dim("batch")
    has_rows = is_per_sample(request.samples.inputs[0])
    return {"inputs": tuple({0: batch} if each else None for each in has_rows)}


@contextlib.contextmanager
def exporter_errors(name: str) -> Iterator[None]:
    """Suppress the output of the exporter, and turn its errors into a one-line ConfigError."""
    try:
        with suppress_output():
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
