"""CheckpointManager with wrong bytes: none is ever loaded, the one before it is, and one line says why."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from faults.corpus_case import BASE, Case, call, room, train_base
from trainrun.checkpoint.files import FileLayer, format_folder_name, list_committed_steps
from trainrun.checkpoint.load import LoadedCheckpoint, load_latest, read_checkpoint
from trainrun.checkpoint.save import (
    Manifest,
    build_part,
    commit_checkpoint,
    make_temporary_folder,
    write_part,
)
from trainrun.errors import CheckpointError
from trainrun.parallel.single import Single

STEPS = (2, 4, 6)
RUN_ID = "two-ranks"
COMMAND_SHARE = 50  # one case of so many goes through the real command, and its result is compared

Damage = Callable[[Path, random.Random], None]


def with_base(place: Path) -> None:
    """A run of one rank, the same two steps longer, and a folder of checkpoints of two ranks."""
    train_base(place)
    longer = place / "longer"
    shutil.copytree(place / BASE, longer)
    said = call(["resume", str(longer), "trainer.max_steps=8"])
    assert said.code == 0, said.text
    for step in STEPS:
        save_two_ranks(place / "two", step)


def save_two_ranks(root: Path, step: int) -> None:
    files = FileLayer()
    root.mkdir(exist_ok=True)
    temporary = root / make_temporary_folder(root, step, files)
    written = {}
    for rank in range(2):
        own = {"seed": [rank, step], "x": torch.arange(9) + rank}
        part = build_part(rank, {"w": torch.full((50,), float(step))}, own)
        written |= write_part(temporary, rank, part, files)
    commit_checkpoint(temporary, Manifest(RUN_ID, step, 0, 2, "periodic", None, {}, written), files)


def flip(folder: Path, draw: random.Random) -> None:
    path = any_file(folder, draw)
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(folder: Path, draw: random.Random) -> None:
    path = any_file(folder, draw)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def lengthen(folder: Path, draw: random.Random) -> None:
    path = any_file(folder, draw)
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 5000)))


def blank(folder: Path, draw: random.Random) -> None:
    """A page of zeros, as a disk leaves that lost power."""
    path = any_file(folder, draw)
    data = path.read_bytes()
    start = draw.randrange(len(data)) // 4096 * 4096
    zeros = bytes(min(4096, len(data) - start))
    assert data[start : start + 4096] != zeros
    path.write_bytes(data[:start] + zeros + data[start + 4096 :])


def empty(folder: Path, draw: random.Random) -> None:
    any_file(folder, draw).write_bytes(b"")


def remove(folder: Path, draw: random.Random) -> None:
    any_file(folder, draw).unlink()


def add(folder: Path, draw: random.Random) -> None:
    """No damage: it is in every folder."""
    (folder / draw.choice(["rank-00007.json", "state.json.bak", "x"])).write_bytes(b"{}")


def swap_inside(folder: Path, draw: random.Random) -> None:
    one, other = draw.sample(sorted(path for path in folder.iterdir()), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def take_older(folder: Path, draw: random.Random) -> None:
    """One file of another step, its manifest for example."""
    older = older_than(folder, draw)
    names = [
        path.name
        for path in sorted(folder.iterdir())
        if path.read_bytes() != (older / path.name).read_bytes()
    ]
    name = draw.choice(names)
    shutil.copyfile(older / name, folder / name)


def whole_other(folder: Path, draw: random.Random) -> None:
    """Another step under this step's name: every hash in it fits."""
    older = older_than(folder, draw)
    shutil.rmtree(folder)
    shutil.copytree(older, folder)


def older_than(folder: Path, draw: random.Random) -> Path:
    return draw.choice(
        [path for step in STEPS if (path := folder.with_name(format_folder_name(step))).name < folder.name]
    )


def link(folder: Path, draw: random.Random) -> None:
    path = any_file(folder, draw)
    path.rename(folder.parent / "moved")
    path.symlink_to(folder.parent / "moved")


def folder_for_file(folder: Path, draw: random.Random) -> None:
    path = any_file(folder, draw)
    path.unlink()
    path.mkdir()


DAMAGES: tuple[Damage, ...] = (
    flip, flip, flip, cut, cut, lengthen, blank, empty, remove, swap_inside, take_older, whole_other, link,
    folder_for_file,
)  # fmt: skip


def any_file(folder: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path for path in folder.iterdir() if path.is_file()))


def cases(count: int = 200, seed: int = 0) -> list[Case]:
    """expect: the steps that are damaged. Every kind of damage comes in turn, on one to three checkpoints."""
    found = []
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        bad = STEPS[-draw.choice([1, 1, 1, 2, 2, 3]) :]
        damage = DAMAGES[number % len(DAMAGES)]
        found.append(Case(f"{seed}-{number}-{damage.__name__}", maker(damage, bad, draw), (number, bad)))
    return found


def maker(damage: Damage, bad: tuple[int, ...], draw: random.Random) -> Callable[[Path], None]:
    def build(checkpoints: Path) -> None:
        for step in reversed(bad):
            damage(checkpoints / format_folder_name(step), draw)
        for folder in checkpoints.glob("step-*"):
            add(folder, draw)

    return build


def check(case: Case, place: Path) -> str:
    number, bad = case.expect
    if case.name.endswith(("whole_other", "take_older")):  # nothing older than the first
        bad = tuple(step for step in bad if step > STEPS[0])
        case = case._replace(build=maker(DAMAGES[number % len(DAMAGES)], bad, random.Random(case.name)))
    with room(place, case.name) as folder:
        if number % COMMAND_SHARE == 1:
            return check_command(case, place, folder, bad)
        root = folder / "checkpoints"
        two = number % 3 == 2
        shutil.copytree(place / "two" if two else place / BASE / "checkpoints", root)
        case.build(root)
        return check_loading(root, bad, RUN_ID if two else run_id_of(place))


def run_id_of(place: Path) -> str:
    return read_checkpoint(place / BASE / "checkpoints" / format_folder_name(STEPS[0])).manifest.run_id


def check_loading(root: Path, bad: tuple[int, ...], run_id: str) -> str:
    notes: list[str] = []
    left = [step for step in STEPS if step not in bad]
    before = {step: read_checkpoint(root / format_folder_name(step)) for step in left}
    try:
        loaded = load_latest(root, run_id, Single(torch.device("cpu")), FileLayer(), notes.append)
    except CheckpointError as error:
        return "" if not left and "no intact checkpoint is left" in str(error) else f"refused all: {error}"
    if loaded is None or not left:
        return "began from zero without a word" if loaded is None else f"loaded step {loaded.manifest.step}"
    if loaded.manifest.step != left[-1]:
        return f"loaded step {loaded.manifest.step}, the newest good one is {left[-1]}"
    if not same(loaded, before[left[-1]]):
        return "other values than were saved"
    aside = [path.name for path in root.glob(".bad-step-*")]
    notes = [note for note in notes if "ignored files that do not belong to the checkpoint" not in note]
    if len(notes) != len(bad) or len(aside) != len(bad) or list_committed_steps(root) != left:
        return f"{len(notes)} lines and {len(aside)} folders set aside for {len(bad)} damaged ones: {notes}"
    return ""


def same(one: LoadedCheckpoint, other: LoadedCheckpoint) -> bool:
    return equal(one.shared, other.shared) and equal(one.own, other.own)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(
            one.view(torch.uint8) if one.ndim else one, other.view(torch.uint8) if one.ndim else other
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other or (one != one and other != other))


def check_command(case: Case, place: Path, folder: Path, bad: tuple[int, ...]) -> str:
    """A resume ends in the bits of the run that was never damaged, or says that nothing is left.

    But for what validation measured: the run that is resumed has validated at step 6, where it ended once.
    """
    run = folder / "run"
    shutil.copytree(place / BASE, run)
    case.build(run / "checkpoints")
    said = call(["resume", str(run), "trainer.max_steps=8"])
    if len(bad) == len(STEPS):
        good = said.code == 2 and "no intact checkpoint is left" in said.text
        return "" if good else f"{said.code}: {said.text}"
    lines = [line for line in said.text.splitlines() if "was set aside as .bad-" in line]
    if said.code != 0 or len(lines) != len(bad):
        return f"{said.code}: {said.text}"
    ends = [read_checkpoint(root / "checkpoints" / format_folder_name(8)) for root in (run, place / "longer")]
    trees = [{name: value for name, value in end.shared.items() if name != "train"} for end in ends]
    counts = [[end.shared["train"][name] for name in ("step", "epoch", "batches", "items")] for end in ends]
    randoms = [end.own["random"] for end in ends]
    return "" if all(equal(*pair) for pair in (trees, counts, randoms)) else "the resumed run has other bits"
