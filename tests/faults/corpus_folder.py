"""Wrong content in every file of a run folder but the checkpoints: the run goes on to the same bits, or is refused."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from faults.corpus_case import BASE, SMALL, Case, call, room, train_base
from faults.corpus_damage import equal
from trainrun.checkpoint.files import format_folder_name
from trainrun.checkpoint.load import read_checkpoint

WORDS = (*SMALL, "trainer.max_steps=6")
LAST = 6
BROKEN = "broken"  # the same run, killed after step 4
FILES = (
    "status.json", "overrides.txt", "RUN.json", ".RUN.json", "metrics.jsonl", "config.yaml", "environment.json",
    "run.log", "samples.safetensors", "report.html", ".lock", "checkpoints/best.json", "plots", "seal-*.txt",
)  # fmt: skip
ABSENT = (
    ".config-before.yaml",
    ".overrides-before.txt",
    ".job.json",
    "nonfinite",
    "stacks-rank0.txt",
    "evaluation-val.json",
)
NEEDED = (
    "config.yaml",
    ".config-before.yaml",
    "environment.json",
    "seal-*.txt",
    ".lock",
)  # may be refused, in one line
ODD = (None, "x", [], {}, [[1]], -1, 2**70, 1.5, True, 1e300, "nan", {"a": {"b": 1}}, "\x1b[2J", "\ud800")

Damage = Callable[[Path, random.Random], None]


def with_base(place: Path) -> None:
    if not (place / BASE).exists():
        train_base(place)
    broken = place / BROKEN
    shutil.copytree(place / BASE, broken)
    shutil.rmtree(broken / "checkpoints" / format_folder_name(LAST))
    status = json.loads((broken / "status.json").read_text()) | {"state": "running", "exit_code": None}
    (broken / "status.json").write_text(json.dumps(status, indent=2))


def replaced(path: Path, data: bytes) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.write_bytes(data)


def content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b'{"a": 1}\n'


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(content(path) or b"x")
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    replaced(path, bytes(data))


def cut(path: Path, draw: random.Random) -> None:
    data = content(path)
    replaced(path, data[: draw.randrange(len(data) + 1)])


def noise(path: Path, draw: random.Random) -> None:
    replaced(path, draw.randbytes(draw.randrange(1, 3000)))


def written(text: bytes) -> Damage:
    def write(path: Path, draw: random.Random) -> None:
        replaced(path, text)

    write.__name__ = text.decode()[:5].strip() or "empty"
    return write


def folder(path: Path, draw: random.Random) -> None:
    if path.is_dir():
        replaced(path, b"a file")
        return
    path.unlink(missing_ok=True)
    path.mkdir()
    if draw.random() < 0.5:
        (path / "inside").write_text("x")


def loop(path: Path, draw: random.Random) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def missing(path: Path, draw: random.Random) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def odd(path: Path, draw: random.Random) -> None:
    """Sound JSON, where it is JSON, with a value that no run writes."""
    lines = content(path).split(b"\n")
    if path.suffix != ".jsonl":
        lines = [content(path)]
    number = draw.randrange(max(1, len(lines) - 1))
    try:
        value = json.loads(lines[number])
    except ValueError:
        flip(path, draw)
        return
    places = list(leaves(value))
    if not places:
        return
    holder, key = draw.choice(places)
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(ODD)
    lines[number] = json.dumps(value).encode()
    replaced(path, b"\n".join(lines))


def leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a tree, with what holds it."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from leaves(value[key])


DAMAGES: tuple[Damage, ...] = (
    flip, flip, flip, flip, odd, odd, odd, odd, cut, noise, written(b""), written(b"null\n"), written(b"[]"),
    written(b"7"), written(b"[" * 5000), folder, loop, missing,
)  # fmt: skip


def cases(count: int = 1000, seed: int = 0) -> list[Case]:
    """expect: the file. Every damage comes to every file in turn."""
    every = [(name, damage) for damage in DAMAGES for name in (*FILES, *ABSENT)]
    random.Random(seed).shuffle(every)
    found = []
    for number in range(count):
        name, damage = every[number % len(every)]
        draw = random.Random(f"{seed}-{number}")
        build = maker(name, damage, draw)
        found.append(Case(f"{seed}-{number}-{name}-{damage.__name__}", build, (number, name)))
    return found


def maker(name: str, damage: Damage, draw: random.Random) -> Callable[[Path], None]:
    return lambda run: damage(next(run.glob(name), run / name), draw)


def check(case: Case, place: Path) -> str:
    """The commands that read change nothing that is needed; then the run goes on, by one of the two ways."""
    number, name = case.expect
    with room(place, case.name) as inside:
        run = inside / "run"
        shutil.copytree(place / BROKEN, run)
        case.build(run)
        before = os.getcwd()
        with contextlib.ExitStack() as leaving:
            leaving.callback(os.chdir, before)
            for words in (["evaluate", str(run)], ["report", str(run)])[: 2 if number % 4 == 0 else 1]:
                if fault := plain(words, name in NEEDED or words[0] == "report"):
                    return fault
            words = [*WORDS, f"output_dir={run}"] if number % 2 else ["resume", str(run)]
            return plain(words, name in NEEDED) or same(run, place)


def plain(words: list[str], may_refuse: bool) -> str:
    """What is wrong with the end of a command."""
    try:
        said = call(words)
    except Exception as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        at = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame is not None else ""
        return f"{words[0]}: a traceback: {type(error).__name__}: {str(error)[:300]} ({at})"
    if said.code == 0 or (said.code == 2 and may_refuse and len(said.text) < 1500):
        return ""
    return f"{words[0]}: exit code {said.code}: {said.text[:600]}"


def same(run: Path, place: Path) -> str:
    """Whether the run has come to the bits of the one that nothing befell; one that was refused has not moved."""
    found = run / "checkpoints" / format_folder_name(LAST)
    if not found.is_dir():
        return ""
    ends = [read_checkpoint(root / "checkpoints" / format_folder_name(LAST)) for root in (run, place / BASE)]
    trees = [{name: value for name, value in end.shared.items() if name != "train"} for end in ends]
    return (
        "" if equal(*trees) and torch.equal(*[end.own["random"]["torch"] for end in ends]) else "other bits"
    )
