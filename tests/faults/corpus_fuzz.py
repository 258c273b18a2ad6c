"""Parsers against an attacker who can compute hashes: whatever stands in a checkpoint, it is read or refused.

Manifest, state and safetensors header are changed, then sealed again. Nothing but a CheckpointError may come of it,
within a second and with little memory; a tree that is accepted goes on into the parts of a run, with the same rule.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from faults.corpus_case import BASE, Case, train_base
from trainrun.checkpoint.format import read_checkpoint
from trainrun.checkpoint.manifest import MANIFEST, folder_name
from trainrun.errors import CheckpointError
from trainrun.parts import Parts
from trainrun.restore import parts_of
from trainrun.rundir import RunDir

STEP = folder_name(6)
MOST_SECONDS, MOST_BYTES = 1.0, 64 * 2**20  # beside twice the files
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**53,
    -(2**31),
    1e308,
    0.5,
    "",
    "x",
    "../../x",
    "\u0000",
    "\ud800",
    [],
    {},
    [[]],
    [{}],
    {"$tensor": ["nothing"]},
    {"$tensor": []},
    {"$int": "0x" + "f" * 400},
    {"$int": "7"},
    {"$float": "7ff0000000000000"},
    {"$bytes": "00"},
    {"$bytes": "0"},
    {"$tuple": [1]},
    {"$dict": [["a", 1], ["a", 2]]},
    {"$dict": [[[], 1]]},
    {"$what": 1},
    {"$counter": [["a", "b"]]},
    {"$str": "ff"},
    {"__reduce__": ["os.system", "touch executed"]},
    {"_target_": "os.system"},
    [1] * 50,
    "y" * 5000,
    {"a": {"b": {"c": {}}}},
)
TEXTS = (
    "[" * 5000,
    '{"a":' * 300,
    "NaN",
    "1e999",
    "9" * 5000,
    '"' + "\\u0000" * 50,
    '{"a":1,"a":2}',
    "[]," * 3000,
    "\x00",
    "'",
    '"\\' * 2000,
    "-",
    "1.",
    "01",
    "tru",
    "/*",
    "\ufeff",
)

_parts: dict[Path, Parts] = {}


def with_base(place: Path) -> None:
    train_base(place)
    _parts[place] = parts_of(RunDir(place / BASE), "last", [])[0]


def cases(count: int = 2000, seed: int = 0) -> list[Case]:
    """expect: which files of the checkpoint are changed."""
    found = []
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        name = draw.choice([MANIFEST, "state.json", "state.json", "shared.safetensors"])
        change = draw.choice([change_value, change_value, change_value, change_text, change_bytes])
        found.append(Case(f"{seed}-{number}-{name}-{change.__name__}", maker(name, change, draw), name))
    return found


def maker(
    name: str, change: Callable[[bytes, random.Random], bytes], draw: random.Random
) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        path = folder / name
        if name == MANIFEST:
            text = change(path.read_bytes()[:-65], draw)
            path.write_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")
            return
        data = path.read_bytes()
        if name.endswith(".json"):
            path.write_bytes(change(data, draw))
        else:
            path.write_bytes(changed_header(data, change, draw))
        seal(folder)

    return build


def changed_header(
    data: bytes, change: Callable[[bytes, random.Random], bytes], draw: random.Random
) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, body = change(data[8 : 8 + length], draw), data[8 + length :]
    told = draw.choice([len(header)] * 8 + [0, length, len(header) + 1, 2**24 + 1, 2**63])
    return told.to_bytes(8, "little") + header + body


def seal(folder: Path) -> None:
    """Sizes and hashes fit again."""
    path = folder / MANIFEST
    value = json.loads(path.read_bytes()[:-65])
    for name in value["files"]:
        data = (folder / name).read_bytes()
        value["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps(value, indent=1).encode() + b"\n"
    path.write_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")


def change_value(text: bytes, draw: random.Random) -> bytes:
    """One to three values replaced, taken away, doubled, or given another name."""
    tree = json.loads(text)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        holder, key = any_place(tree, draw)
        if holder is None:
            continue
        kind = draw.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice(["a", "step", "model", "dtype", "shape", "data_offsets", "$tensor"])] = (
                holder.pop(key)
            )
        elif kind == 2 and isinstance(holder, list):
            holder.append(deepcopy(holder[key]))
        elif kind == 3 and type(holder[key]) is int:
            holder[key] += draw.choice([-1, 1, 8, -(2**40), 2**40])
        else:
            holder[key] = deepcopy(draw.choice(STRANGE))  # which a later change may reach into
    return json.dumps(tree).encode()


def any_place(tree: Any, draw: random.Random) -> tuple[Any, Any]:
    """A holder and its key or index, each level as likely to be the last one as to lead on."""
    holder, key = None, None
    value = tree
    while isinstance(value, dict | list) and value:
        holder, key = (
            value,
            draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value)),
        )
        value = value[key]
        if draw.random() < 0.2:
            break
    return holder, key


def change_text(text: bytes, draw: random.Random) -> bytes:
    """A piece of text where none belongs."""
    start = draw.randrange(len(text))
    stop = start + draw.choice([0, 0, 1, 5])
    return text[:start] + draw.choice(TEXTS).encode("utf-8", "surrogatepass") + text[stop:]


def change_bytes(text: bytes, draw: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(draw.choice([1, 1, 4, 30])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.randrange(1, len(data))] if draw.random() < 0.1 else data)


def check(case: Case, place: Path) -> str:
    folder = place / "checkpoints" / STEP
    if not folder.exists():
        shutil.copytree(place / BASE / "checkpoints" / STEP, folder)
    for path in folder.iterdir():  # quicker than a new folder for every case
        path.write_bytes((place / BASE / "checkpoints" / STEP / path.name).read_bytes())
    case.build(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    before, began = peak_bytes(), time.process_time()
    try:
        loaded = read_checkpoint(folder)
        _parts[place].load_tree(folder.name, loaded.shared, loaded.own)
    except CheckpointError as error:
        if len(str(error)) > 4000:
            return f"a message of {len(str(error))} letters"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    seconds, grown = time.process_time() - began, peak_bytes() - before
    if seconds > MOST_SECONDS or grown > 2 * size + MOST_BYTES:
        return f"{seconds:.1f} s, {grown:,} bytes"
    if (place / "executed").exists() or os.path.lexists("executed"):
        return "ran code"
    return ""


def peak_bytes() -> int:
    """The largest that this process has ever been."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
