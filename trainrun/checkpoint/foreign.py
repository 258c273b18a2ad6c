"""A torch file of somebody else's, read in a process of its own whose memory and time are limited.

A `.pt` file is a zip archive around a pickle, so torch's own reader is given only what has passed plainer
checks: stored entries, honest sizes, CRC-32. It reads with `weights_only=True`, which refuses code but no
giants: a tensor of 602 bytes with 2^38 elements, a list 200,000 deep, a tree with 2^40 leaves. Against those
stand the limits of the process, and what comes out must be a flat dict of tensors whose memory is there.

`python -c "... main(...)"` is what `trainrun import` starts; one line of JSON on stdout is the answer.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import stat
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from trainrun.checkpoint.tensor_file import DTYPES, stream
from trainrun.errors import CheckpointError

TORCH_NEEDED = (2, 10)  # older ones run code in spite of weights_only (CVE-2025-32434, CVE-2026-24747)
MAX_ENTRIES = 200_000
MAX_PICKLE_BYTES = 16 * 2**20
MAX_DEPTH = 8  # words that lead to the weights
MAX_NAME = 1000  # letters of a tensor's name
SPARE_BYTES = 256 * 2**20  # of address space, added to twice the file
MIN_SECONDS, BYTES_PER_SECOND = 20, 20 * 2**20
SHOWN = 6
SCRIPT = ("constants.pkl", "code", "extra")  # of a TorchScript archive


def main(source: str, target: str, keys: list[str]) -> None:
    """Read `source`, write its tensors to the new file `target`, and print what was found, or the fault."""
    torch.set_num_threads(1)
    try:
        check_torch(torch.__version__)
        with open_source(Path(source)) as file:
            size = os.fstat(file.fileno()).st_size
            limit_process(size)
            answer: dict[str, Any] = convert(file, size, Path(target), keys)
    except CheckpointError as error:
        answer = {"fault": str(error)}
    except (MemoryError, RecursionError) as error:
        answer = {
            "fault": f"asks for more {'memory' if isinstance(error, MemoryError) else 'depth'} than its size allows"
        }
    print(json.dumps(answer), flush=True)
    os._exit(0)  # what was read may take as long to be taken down as it likes


def check_torch(version: str) -> None:
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < TORCH_NEEDED:
        raise CheckpointError(
            f"torch {version} is not safe on foreign files; install {'.'.join(map(str, TORCH_NEEDED))} or newer"
        )


def open_source(path: Path) -> BinaryIO:
    """A plain file; a pipe would never end."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError("not a plain file")
    return file


def limit_process(size: int) -> None:
    """Limit address space, processor time and file size; forbid new processes and core dumps."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + MIN_SECONDS + size // BYTES_PER_SECOND
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: 2 * size + SPARE_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    pages = Path("/proc/self/statm")
    if pages.exists():  # elsewhere the system keeps no count of it
        limits[resource.RLIMIT_AS] = (
            int(pages.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            + 2 * size
            + SPARE_BYTES
        )
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))


def convert(file: BinaryIO, size: int, target: Path, keys: list[str]) -> dict[str, Any]:
    """Raises CheckpointError for whatever is wrong with the file."""
    check_archive(file, size)
    file.seek(0)
    tensors = checked_tensors(weights_in(load(file), keys), size)
    not_finite = [name for name, tensor in tensors.items() if not all_finite(tensor)]
    with open(target, "xb") as out:
        for chunk in stream(tensors):
            out.write(chunk)
    return {"tensors": len(tensors), "not_finite": not_finite[:SHOWN], "num_not_finite": len(not_finite)}


def check_archive(file: BinaryIO, size: int) -> None:
    """A zip archive as torch writes it, and nothing that only looks like one."""
    if file.read(4) != b"PK\x03\x04":
        raise CheckpointError(
            "not a zip archive, as torch.save writes since 1.6; where it comes from a source that you trust, load it "
            "there and save it again with torch.save, or with safetensors"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            check_entries(archive, size)
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        raise CheckpointError(f"a damaged archive ({error})") from error
    except RuntimeError as error:  # an entry with a password
        raise CheckpointError(f"an archive that torch did not write ({error})") from error
    if damaged is not None:
        raise CheckpointError(f"a damaged archive (CRC-32 of {damaged[:200]!r})")


def check_entries(archive: zipfile.ZipFile, size: int) -> None:
    entries = archive.infolist()
    paths = [PurePosixPath(entry.filename) for entry in entries]
    folders = {path.parts[0] for path in paths if path.parts}
    if len(entries) > MAX_ENTRIES or len({entry.filename for entry in entries}) != len(entries):
        raise CheckpointError(f"more than {MAX_ENTRIES} entries, or two of one name")
    if (
        len(folders) != 1
        or any(path.is_absolute() or ".." in path.parts for path in paths)
        or archive.comment
    ):
        raise CheckpointError("an archive that torch did not write")
    inside = {path.parts[1]: entry for path, entry in zip(paths, entries, strict=True) if len(path.parts) > 1}
    if any(name in inside for name in SCRIPT):
        raise CheckpointError("a TorchScript program, which is code; ask for its state_dict")
    if "data.pkl" not in inside:
        raise CheckpointError("an archive without data.pkl: not written by torch.save")
    if inside["data.pkl"].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"more than {MAX_PICKLE_BYTES} bytes beside the tensors")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise CheckpointError(
                f"compressed entries ({entry.filename[:200]!r}), which torch does not write"
            )
    if sum(entry.file_size for entry in entries) > size:
        raise CheckpointError("the entries are larger than the file")


def load(file: BinaryIO) -> Any:
    """The object in the file. Torch has a dozen exceptions for bad ones; all of them mean the same here."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    except (MemoryError, RecursionError):
        raise
    except pickle.UnpicklingError as error:
        told = str(error).partition("GLOBAL ")[2].partition(" ")[0]
        what = f" ({told[:100]})" if told else ""
        raise CheckpointError(
            f"holds more than tensors and plain values{what}, which is never run; save its state_dict alone"
        ) from error
    except Exception as error:
        if "allocate" in str(error):
            raise MemoryError from error
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(f"a damaged pickle ({type(error).__name__}: {text})") from error


def weights_in(value: Any, keys: list[str]) -> dict[Any, Any]:
    """What lies behind the keys, which must be a dict."""
    if len(keys) > MAX_DEPTH:
        raise CheckpointError(f"--key: more than {MAX_DEPTH} of them")
    for number, key in enumerate(keys):
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(map(repr, names_of(value))) or "nothing"
            raise CheckpointError(
                f"--key {key}: not there; {'/'.join(keys[:number]) or 'the file'} has {known}"
            )
        value = value[key]
    if not isinstance(value, dict):
        raise CheckpointError(f"holds a {type(value).__name__}, not a dict of tensors")
    return value


def names_of(value: Any) -> list[str]:
    return [str(name)[:80] for name in list(value)[:SHOWN]] if isinstance(value, dict) else []


def checked_tensors(found: dict[Any, Any], size: int) -> dict[str, Tensor]:
    """Named dense tensors whose values are all in the file."""
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            inner = [key for key, item in found.items() if isinstance(key, str) and is_weights(item)]
            hint = f"; choose with --key {inner[0][:80]}" if inner else ""
            raise CheckpointError(f"{str(name)[:80]!r} is a {type(value).__name__}, not a tensor{hint}")
        if fault := tensor_fault(name, value):
            raise CheckpointError(f"{name[:80]!r} {fault}")
    if not found:
        raise CheckpointError("holds no tensor")
    total = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    if total > 2 * size:  # one tensor under two names is written twice, under a thousand it is an attack
        raise CheckpointError(f"its tensors would take {total:,} bytes, the file has {size:,}")
    return {name: tensor.detach() for name, tensor in found.items()}


def is_weights(value: Any) -> bool:
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(item, Tensor) for item in value.values())
    )


def tensor_fault(name: str, tensor: Tensor) -> str:
    if len(name) > MAX_NAME or name == "__metadata__" or not name.isprintable():
        return "is no name of a tensor"
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"is a {type(tensor).__name__}, no plain tensor"
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        return "has no plain memory"
    if tensor.dtype not in DTYPES:
        return f"is {tensor.dtype}, which safetensors cannot hold"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return f"of {tensor.numel():,} elements has a storage of {tensor.untyped_storage().nbytes():,} bytes"
    return ""


def all_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or tensor.element_size() < 2 or bool(tensor.isfinite().all())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
