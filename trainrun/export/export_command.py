"""`trainrun export RUN_DIR --to onnx`: write the trained network in other formats, and check them on real samples."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trainrun.assemble.resumption import load_network_of_run
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.checkpoint.weights import BASE
from trainrun.cli.run_arguments import add_checkpoint_options, build_run_parser, parse_arguments
from trainrun.config.saved_values import separate_secrets
from trainrun.config.schema import RunConfig, convert_to_plain_values
from trainrun.config.validate import suggest_closest_name
from trainrun.errors import EXIT_DONE, ConfigError, TrainingError
from trainrun.export.formats import FORMATS, ExportRequest, Runner
from trainrun.export.served import (
    CPU,
    ModelCall,
    RealSamples,
    ServedModel,
    build_input_functions,
    half_batch,
    list_outputs,
    load_real_samples,
)
from trainrun.folder.run_folder import RunDir, read_identity
from trainrun.output import report_result, say
from trainrun.parallel.single import Single
from trainrun.precision.autocast import cast_inputs
from trainrun.runs.restore_config import choose_saved_checkpoint
from trainrun.runs.resume import load_trusted_config
from trainrun.runs.run import open_run
from trainrun.sampling.run_tokenizer import apply_run_tokenizer
from trainrun.transform.int8 import Int8Layer, compute_in_floats
from trainrun.transform.lora import LoraLinear, merge_lora

TOLERANCE = 1e-4
TOLERANCE_OF_BYTES = 0.05  # numbers between two bytes may fall to either side
LEAST = 0.1
GRAPHS = ("onnx", "torch.export")  # the others hold weights for the same code


def main(argv: list[str]) -> int:
    """Write every format of `--to`, and compare its outputs with the outputs of the network. Return the exit code."""
    arguments = parse_export_arguments(argv)
    names = parse_formats(arguments.to)
    run = open_run(arguments.run_dir)
    out = output_folder(arguments.out, run)
    config = load_trusted_config(run, arguments.overrides, arguments.trust)
    which, split = choose_saved_checkpoint(run, arguments.which), arguments.split
    model = prepare_exported_model(load_network_of_run(run, config, which), arguments.merge)
    loaded = read_checkpoint(resolve_checkpoint(run.checkpoints, which))
    try:
        has_own_tokenizer = "bpe:" in str(config.data.train)
        read_config = apply_run_tokenizer(config, run, Single(CPU), []) if has_own_tokenizer else config
        samples = load_real_samples(read_config, model, split, loaded)
    except Exception as error:  # of the data, the task or the model; formats of weights alone need no samples
        if set(names) & set(GRAPHS) or split != "val":
            raise
        reason = " ".join(str(error).split())[:300]
        samples = RealSamples(ServedModel(model, ModelCall()), [], [], reason)
    outside = build_input_functions(config, split)
    about = describe_network(run, config, model, samples) | ({"before_network": outside} if outside else {})
    shared = loaded.shared if config.checkpoint.adapter_only else {}
    about |= {BASE: shared[BASE]} if BASE in shared else {}
    adapter = frozenset(shared["model"]) if BASE in shared and not arguments.merge else None
    request = ExportRequest(samples, arguments.dynamic == "batch", about, adapter)
    tolerance = arguments.tolerance
    if tolerance is None:
        tolerance = TOLERANCE_OF_BYTES if has_rounded_inputs(model) else TOLERANCE
    report_result(formats=[write_checked_export(name, request, out, tolerance) for name in names])
    for key in outside:
        say(f"note: {key} is not in the exported network; samples must go through it before")
    return EXIT_DONE


def parse_export_arguments(argv: list[str]) -> Namespace:
    parser = build_run_parser(
        "export",
        "Writes the trained network in other formats, and checks each with samples of the run's data.",
    )
    add_checkpoint_options(parser)
    parser.add_argument("--to", required=True, help=f"one or more of {', '.join(FORMATS)}, with commas")
    parser.add_argument("--dynamic", choices=["batch"], help="batch: allow any number of samples per call")
    parser.add_argument("--merge", action="store_true", help="add LoRA adapters to the weights")
    parser.add_argument("--out", help="a folder (default: RUN_DIR-export, beside the run)")
    parser.add_argument(
        "--tolerance", type=parse_tolerance,
        help=f"allowed difference, as a part of the largest output (default: {TOLERANCE:g}, or "
        f"{TOLERANCE_OF_BYTES:g} if inputs of layers are rounded to bytes)",
    )  # fmt: skip
    return parse_arguments(parser, argv)


def output_folder(text: str | None, run: RunDir) -> Path:
    """Return the folder to write to. Raise ConfigError if it is the run folder or inside it."""
    out = Path(text).expanduser() if text else run.root.with_name(f"{run.root.name}-export")
    if run.root in (out.resolve(), *out.resolve().parents):
        raise ConfigError(f"--out {text}: is inside the folder of the run; choose another folder")
    return out


def write_checked_export(name: str, request: ExportRequest, out: Path, tolerance: float) -> dict[str, Any]:
    """Write one format under a temporary name, check the file, and rename it. Return facts about the file and the
    check.

    After an error no file is left.
    """
    file, write = FORMATS[name]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unchecked-", dir=out) as folder:
            path, runner = write(request, Path(folder) / file)
            final = out / path.name
            result = check_export(name, final, runner, request, tolerance)
            size = format_size(path)
            if path.is_dir() and final.is_dir():  # with whatever else is there, as the `.git` of a hub
                for part in path.iterdir():
                    part.replace(final / part.name)
            else:
                path.replace(final)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--out {out}: cannot write in it ({reason}); name another folder") from error
    say(f"{name}: {final} ({size}), {result}")
    return {"format": name, "path": final, "checked": result}


def parse_tolerance(text: str) -> float:
    with suppress(ValueError):
        if 0 < (tolerance := float(text)) < float("inf"):
            return tolerance
    raise ArgumentTypeError(f"{text}: must be a number above 0, as 1e-4")


def has_rounded_inputs(model: nn.Module) -> bool:
    return any(isinstance(layer, Int8Layer) for layer in model.modules())


def parse_formats(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in FORMATS:
            raise ConfigError(
                f"--to {name}: no such format.{suggest_closest_name(name, FORMATS)} There are {', '.join(FORMATS)}"
            )
    return names


def prepare_exported_model(model: nn.Module, merge: bool) -> nn.Module:
    """Return the network in float32 or float64, with LoRA merged if `merge` is set. Raise ConfigError without LoRA
    layers.
    """
    if merge:
        if not any(isinstance(layer, LoraLinear) for layer in model.modules()):
            raise ConfigError("--merge: this run has no LoRA layers (transform.lora); leave it out")
        model = merge_lora(model)
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()):
        model = model.float()  # its inputs are rounded as before, and then made floats too
        model.register_forward_pre_hook(partial(cast_inputs, torch.float32), with_kwargs=True)
    return compute_in_floats(model).eval()


@torch.no_grad()
def check_export(name: str, path: Path, runner: Runner, request: ExportRequest, tolerance: float) -> str:
    """Run an exported file on real samples. Return a line about it. Raise TrainingError if the outputs differ."""
    samples = request.samples
    if samples.untried:
        return f"not tried on samples ({samples.untried})"
    pairs = [
        *zip(samples.inputs, samples.expected, strict=True),
        *([half_batch(samples)] if request.dynamic else []),
    ]
    try:
        worst = max(relative_difference(runner(inputs), expected) for inputs, expected in pairs)
    except TrainingError:
        raise
    except Exception as error:
        raise TrainingError(f"{path}: does not run ({type(error).__name__}: {error})") from error
    count = sum(len(inputs[0]) for inputs in samples.inputs)
    if not worst <= tolerance:
        again = list_outputs(samples.served(*samples.inputs[0]))
        if not relative_difference(again, samples.expected[0]) <= tolerance:
            raise TrainingError(
                f"{path}: was deleted: the network returns other outputs each time for the same samples; make its "
                "forward deterministic in evaluation mode (no random numbers, no counters)"
            )
        raise TrainingError(
            f"{path}: was deleted: its outputs for {count} samples of the run differ from those of the network by "
            f"{worst:.2g} of the largest output; allow more with --tolerance (now {tolerance:g})"
        )
    return f"largest difference {worst:.2g} of the largest output, on {count} samples"


def relative_difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference, relative to the largest expected number of the same output.

    For an output near zero it is relative to LEAST times the largest number of all outputs. It is infinity if shapes
    or NaNs differ.
    """
    if [output.shape for output in outputs] != [output.shape for output in expected]:
        return float("inf")
    worst, floor = 0.0, LEAST * max(map(largest_number, expected))
    for output, wanted in zip(outputs, expected, strict=True):
        output, wanted = output.double(), wanted.double()
        is_same = (output == wanted) | (output.isnan() & wanted.isnan())  # infinities too
        if not is_same.all():
            gap = float((output - wanted)[~is_same].abs().nan_to_num(nan=float("inf")).max())
            worst = max(worst, gap / max(largest_number(wanted), floor, 1e-12))
    return worst


def largest_number(output: Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    finite = output[output.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0


def format_size(path: Path) -> str:
    """Return the size of a file or folder as text, such as `0.14 MB`."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    num_bytes = sum(file.stat().st_size for file in files)
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def describe_network(
    run: RunDir, config: RunConfig, model: nn.Module, samples: RealSamples
) -> dict[str, Any]:
    """Return how the network is built and what its inputs are, as plain values without secrets."""
    values, data = convert_to_plain_values(separate_secrets(config)[0]), read_identity(run).get("data", {})
    sizes = {
        "in_shape": data.get("shape"),
        **dict.fromkeys(("num_classes", "vocab_size"), data.get("num_classes")),
    }
    node = {name: sizes.get(name) if value is None else value for name, value in values["model"].items()}
    return {
        "architectures": [type(model).__name__],
        "torch_dtype": str(next((p.dtype for p in model.parameters()), "")).removeprefix("torch."),
        "model": node,
        "transform": values["transform"],
        "task": values["task"],
        **({} if samples.untried else describe_network_inputs(samples, values["data"]["augment"])),
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }


def describe_network_inputs(samples: RealSamples, augment: dict[str, Any]) -> dict[str, Any]:
    served, first, scale = samples.served, samples.inputs[0][0], samples.served.scale
    names = [key.removeprefix("data.augment.") for key, _, _ in served.changes]
    return {
        "inputs": samples.names,
        "input_shape": ["batch", *first.shape[1:]],
        "input_dtype": str(first.dtype).removeprefix("torch."),
        "input_scaling": {
            **({} if scale is None else {"divide_by": 255, "mean": scale.mean, "std": scale.std}),
            **{name: augment[name] for name in names},
        },
    }
