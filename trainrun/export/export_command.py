"""`trainrun export RUN_DIR --to onnx`: the trained network in formats that others read, tried on real samples."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trainrun.assemble.resumption import network_of
from trainrun.checkpoint.load import read_checkpoint, resolve
from trainrun.checkpoint.weights import BASE
from trainrun.cli.run_arguments import add_checkpoint, checkpoint_of, parse, run_parser
from trainrun.config.mistakes.value_words import nearest
from trainrun.errors import EXIT_DONE, ConfigError, TrainingError
from trainrun.export.formats import FORMATS, Order, Runner
from trainrun.export.network_facts import describe_network
from trainrun.export.served import (
    CPU,
    Call,
    RealSamples,
    Served,
    as_tuple,
    changes_outside,
    half,
    served_samples,
)
from trainrun.output import say
from trainrun.parallel.single import Single
from trainrun.precision.other_types import cast_inputs
from trainrun.runs.exceptional.go_on import open_run
from trainrun.runs.resume import trusted_config
from trainrun.sampling.run_tokenizer import with_tokenizer

TOLERANCE = 1e-4
TOLERANCE_OF_BYTES = 0.05  # numbers between two bytes may fall to either side
LEAST = 0.1
GRAPHS = ("onnx", "torch.export")  # the others hold weights for the same code


def main(argv: list[str]) -> int:
    """Write every format that `--to` names, and compare what it computes with the network itself."""
    parser = run_parser(
        "export", "The trained network in other formats, each tried on samples of the run's data."
    )
    add_checkpoint(parser)
    parser.add_argument("--to", required=True, help=f"one or more of {', '.join(FORMATS)}, with commas")
    parser.add_argument("--dynamic", choices=["batch"], help="batch: any number of samples at a time")
    parser.add_argument(
        "--merge", action="store_true", help="add LoRA's corrections to the weights they correct"
    )
    parser.add_argument("--out", help="a folder (default: RUN_DIR-export, beside the run)")
    parser.add_argument(
        "--tolerance", type=tolerance_of, help=f"of the largest output (default: {TOLERANCE:g}, or "
        f"{TOLERANCE_OF_BYTES:g} where inputs of layers are rounded to bytes)",
    )  # fmt: skip
    words = parse(parser, argv)
    formats = chosen_formats(words.to)
    run = open_run(words.run_dir)
    out = Path(words.out).expanduser() if words.out else run.root.with_name(f"{run.root.name}-export")
    if run.root in (out.resolve(), *out.resolve().parents):
        raise ConfigError(
            f"--out {words.out}: lies in the folder of the run, which holds nothing else; name another"
        )
    config = trusted_config(run, words.overrides, words.trust)
    which = checkpoint_of(run, words.which)
    model = exported_model(network_of(run, config, which), words.merge)
    loaded = read_checkpoint(resolve(run.checkpoints, which))
    try:
        own = "bpe:" in str(config.data.train)
        read = with_tokenizer(config, run, Single(CPU), []) if own else config
        samples = served_samples(read, model, words.split, loaded)
    except Exception as error:  # of the data, the task or the model; weights alone are there all the same
        if set(formats) & set(GRAPHS) or words.split != "val":
            raise
        samples = RealSamples(Served(model, Call()), [], [], " ".join(str(error).split())[:300])
    outside = changes_outside(config, words.split)
    about = describe_network(run, config, model, samples) | ({"before_network": outside} if outside else {})
    shared = loaded.shared if config.checkpoint.adapter_only else {}
    about |= {BASE: shared[BASE]} if BASE in shared else {}
    adapter = frozenset(shared["model"]) if BASE in shared and not words.merge else None
    order = Order(samples, words.dynamic == "batch", about, adapter)
    tolerance = words.tolerance
    if tolerance is None:
        tolerance = TOLERANCE_OF_BYTES if rounds_inputs(model) else TOLERANCE
    for name in formats:
        write_checked(name, order, out, tolerance)
    for key in outside:
        say(f"note: {key} is not in the exported network; samples must go through it before")
    return EXIT_DONE


def write_checked(name: str, order: Order, out: Path, tolerance: float) -> None:
    """One format, which gets its name when it was checked; a failure leaves nothing of it."""
    file, write = FORMATS[name]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".unchecked-", dir=out) as folder:
            path, runner = write(order, Path(folder) / file)
            final = out / path.name
            told = check(name, final, runner, order, tolerance)
            size = size_of(path)
            if path.is_dir() and final.is_dir():  # with whatever else is there, as the `.git` of a hub
                for part in path.iterdir():
                    part.replace(final / part.name)
            else:
                path.replace(final)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--out {out}: cannot write there ({reason}); name another folder") from error
    say(f"{name}: {final} ({size}), {told}")


def tolerance_of(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ArgumentTypeError(f"{text}: must be a number above 0, as 1e-4")
    return found


def rounds_inputs(model: nn.Module) -> bool:
    from trainrun.smaller.int8 import Int8Layer

    return any(isinstance(layer, Int8Layer) and layer.mode != "int8-weight-only" for layer in model.modules())


def chosen_formats(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in FORMATS:
            raise ConfigError(
                f"--to {name}: no such format.{nearest(name, FORMATS)} There are {', '.join(FORMATS)}"
            )
    return names


def exported_model(model: nn.Module, merge: bool) -> nn.Module:
    """In numbers that every runtime has, without adapters where that is asked for."""
    if merge:
        from trainrun.transform.lora import LoraLinear, merge_lora

        if not any(isinstance(layer, LoraLinear) for layer in model.modules()):
            raise ConfigError("--merge: this run has no LoRA layers (transform.lora); leave it out")
        model = merge_lora(model)
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()):
        model = model.float()  # its inputs are rounded as before, and then made floats too
        model.register_forward_pre_hook(partial(cast_inputs, torch.float32), with_kwargs=True)
    from trainrun.smaller.int8 import in_floating_point

    return in_floating_point(model).eval()


@torch.no_grad()
def check(name: str, path: Path, runner: Runner, order: Order, tolerance: float) -> str:
    """Run what was written on real samples; what was found. Raises TrainingError where it computes something else."""
    samples = order.samples
    if samples.untried:
        return f"not tried on samples ({samples.untried})"
    pairs = [*zip(samples.inputs, samples.expected, strict=True), *([half(samples)] if order.dynamic else [])]
    try:
        worst = max(difference(runner(inputs), expected) for inputs, expected in pairs)
    except TrainingError:
        raise
    except Exception as error:
        raise TrainingError(f"{path}: does not run ({type(error).__name__}: {error})") from error
    count = sum(len(inputs[0]) for inputs in samples.inputs)
    if not worst <= tolerance:
        again = as_tuple(samples.served(*samples.inputs[0]))
        if not difference(again, samples.expected[0]) <= tolerance:
            raise TrainingError(
                f"{path}: was not kept: the network itself gives something else each time for the same samples; "
                "something in its forward is random, or counts, in evaluation too"
            )
        raise TrainingError(
            f"{path}: computes something else: on {count} samples of the run it differs by {worst:.2g} of the largest "
            f"output, and --tolerance is {tolerance:g}; it was not kept"
        )
    return f"largest difference {worst:.2g} of the largest output, on {count} samples"


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, as a part of the largest expected number of its output, or of LEAST of that of all where
    an output is nearly zero; infinite where shapes or NaNs differ."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return float("inf")
    worst, floor = 0.0, LEAST * max(map(largest, expected))
    for here, there in zip(found, expected, strict=True):
        here, there = here.double(), there.double()
        same = (here == there) | (here.isnan() & there.isnan())  # infinities too
        if not same.all():
            gap = float((here - there)[~same].abs().nan_to_num(nan=float("inf")).max())
            worst = max(worst, gap / max(largest(there), floor, 1e-12))
    return worst


def largest(output: Tensor) -> float:
    """What a difference is a part of; infinities do not count."""
    finite = output[output.isfinite()].abs()
    return float(finite.max()) if len(finite) else 0.0


def size_of(path: Path) -> str:
    """The bytes of a file, or of all in a folder, as people read them."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    num_bytes = sum(one.stat().st_size for one in files)
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
