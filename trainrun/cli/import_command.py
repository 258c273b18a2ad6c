"""`trainrun import FILE.pt DEST --untrusted`: the weights of a foreign torch file as safetensors."""

from __future__ import annotations

import os
import pickle
import secrets
import shlex
import warnings
import zipfile
from pathlib import Path
from typing import Any

from trainrun.cli.run_arguments import Parser
from trainrun.errors import EXIT_DONE, CheckpointError, ConfigError
from trainrun.output import say

TORCH_NEEDED = (2, 10)  # older ones run code in spite of weights_only (CVE-2025-32434, CVE-2026-24747)
SHOWN = 6


def main(argv: list[str]) -> int:
    """Write DEST and print how a run begins with it."""
    words = import_parser().parse_args(argv)
    source, dest = Path(words.file).expanduser(), Path(words.dest).expanduser()
    if not source.is_file():
        raise ConfigError(f"{words.file}: {'not a plain file' if source.exists() else 'no such file'}")
    if source.suffix == ".safetensors":
        raise ConfigError(
            f"{source}: is safetensors already; begin a run with it: trainrun init_from={shlex.quote(str(source))}"
        )
    if not words.untrusted:
        raise ConfigError(
            f"{source}: a torch file is a pickle, which can hold a program; "
            f"{shlex.join(['trainrun', 'import', str(source), str(dest)])} --untrusted reads it with "
            "torch.load(weights_only=True), which takes tensors and plain values only"
        )
    if dest.suffix != ".safetensors":
        raise ConfigError(f"{dest}: must end in .safetensors")
    if dest.exists():
        raise ConfigError(f"{dest}: is there already; name another")
    if not dest.absolute().parent.is_dir():
        raise ConfigError(f"{dest}: the folder {dest.parent} does not exist")
    contents = write_safetensors(source, dest.absolute(), words.key)
    say(f"{dest}: {contents['tensors']:,} tensors, {dest.stat().st_size / 1e6:,.1f} MB")
    if contents["num_not_finite"]:
        say(
            f"warning: {contents['num_not_finite']} tensors hold nan or inf: {', '.join(contents['not_finite'])}"
        )
    say(f"begin a run with it: trainrun init_from={shlex.quote(str(dest))} model=...")
    return EXIT_DONE


def import_parser() -> Parser:
    parser = Parser(
        prog="trainrun import", allow_abbrev=False,
        description="Turns the weights in a torch file (.pt, .pth, .bin, .ckpt) into safetensors. Runs nothing of it.",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="a file that torch.save wrote")
    parser.add_argument("dest", metavar="DEST", help="a new .safetensors file")
    parser.add_argument(
        "--untrusted", action="store_true", help="read it, whoever made it: tensors only, nothing is run"
    )
    parser.add_argument(
        "--key", action="append", default=[], metavar="NAME",
        help="where the dict of tensors is, as --key state_dict; again for a dict in a dict",
    )  # fmt: skip
    return parser


def write_safetensors(source: Path, dest: Path, keys: list[str]) -> dict[str, Any]:
    """Write the tensors by way of a temporary file; what was found. Raises CheckpointError for whatever is wrong."""
    from trainrun.checkpoint.files import FileLayer
    from trainrun.checkpoint.save import DTYPES, flatten, stream

    temporary = dest.with_name(f".{dest.name}.{secrets.token_hex(4)}.tmp")
    try:
        tensors = weights_in(read_torch_file(source), keys)
        flatten(list(tensors.values()))  # raises TypeError for what a file cannot hold
        if wide := [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES]:
            raise TypeError(f"{wide[0][:80]!r} is {tensors[wide[0]].dtype}")
        names = [name for name, tensor in tensors.items() if not all_finite(tensor)]
        FileLayer().write(temporary, stream(tensors))
        os.link(temporary, dest)  # unlike a rename it replaces nothing
    except OSError as error:
        raise ConfigError(f"{dest}: cannot write there ({error.strerror})") from error
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    except (TypeError, RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{source}: holds a tensor that safetensors cannot ({first_line_of(error)})"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return {"tensors": len(tensors), "not_finite": names[:SHOWN], "num_not_finite": len(names)}


def all_finite(tensor: Any) -> bool:
    """Return whether all numbers are finite; types of one byte have no function for it."""
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    return bool((tensor.float() if narrow else tensor).isfinite().all())


def read_torch_file(source: Path) -> Any:
    """Read a file by torch's reader of plain values and tensors, which runs no code."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_NEEDED:
        needed = ".".join(map(str, TORCH_NEEDED))
        raise CheckpointError(
            f"torch {torch.__version__} is not safe on foreign files; install {needed} or newer"
        )
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive:
                if damaged := archive.testzip():  # torch compares no CRC-32
                    raise ValueError(f"CRC-32 of {damaged[:200]!r}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other protocols, and TorchScript, which it refuses
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = str(error).partition("GLOBAL ")[2].partition(" ")[0][:100]
        content = f"holds more than tensors and plain values{f' ({name})' if name else ''}, or no torch file"
        raise CheckpointError(f"{content}; nothing of it was run: ask for its state_dict alone") from error
    except Exception as error:  # torch has a dozen kinds for damaged files
        raise CheckpointError(f"cannot be read ({type(error).__name__}: {first_line_of(error)})") from error


def weights_in(value: Any, keys: list[str]) -> dict[str, Any]:
    """The dict of tensors behind the keys."""
    from torch import Tensor

    for number, key in enumerate(keys):
        if not isinstance(value, dict) or key not in value:
            names = [repr(str(name)[:80]) for name in list(value)[:SHOWN]] if isinstance(value, dict) else []
            where = "/".join(keys[:number]) or "the file"
            raise CheckpointError(f"--key {key}: not there; {where} has {', '.join(names) or 'nothing'}")
        value = value[key]
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"holds a {type(value).__name__}, not a dict of tensors")
    for name, tensor in value.items():
        if not isinstance(name, str) or not name.isprintable() or name == "__metadata__":
            raise CheckpointError(f"{str(name)[:80]!r} is no name of a tensor")
        if not isinstance(tensor, Tensor):
            inner = [key for key, item in value.items() if isinstance(item, dict)]
            hint = f"; choose with --key {inner[0]}" if inner else ""
            raise CheckpointError(f"{name[:80]!r} is a {type(tensor).__name__}, not a tensor{hint}")
        if tensor.layout.__str__() == "torch.strided" and tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{name[:80]!r} shows more elements than the file has")
    return value


def first_line_of(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
