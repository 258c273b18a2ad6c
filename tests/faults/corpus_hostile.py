"""Files and run folders of a stranger: none of them runs, imports, writes or overwrites anything outside its folder."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml

import trainrun
from faults.corpus_case import BASE, SMALL, Case, call, room, train_base
from trainrun.checkpoint.files import format_folder_name
from trainrun.checkpoint.weights import read_torch_weights
from trainrun.errors import CheckpointError, TrainrunError
from trainrun.folder.run_folder import RunDir
from trainrun.plots.history import read_config

MOST_SECONDS = (
    30.0  # of the processor; most take a tenth of one, and what hangs or unfolds for ever takes them all
)
CANARY = "what nobody may change"
PLANTED = "planted_module"  # importable, and never to be imported
MARK = "executed"  # a file that the attacks would make
TARGETS: dict[str, Any] = {
    "system": {"_target_": "os.system", "_args_": [f"touch {MARK}"]},
    "posix": {"_target_": "posix.system", "_args_": [f"touch {MARK}"]},
    "eval": {"_target_": "builtins.eval", "_args_": [f"open({MARK!r}, 'w')"]},
    "popen": {"_target_": "subprocess.Popen", "args": ["touch", MARK]},
    "planted": {"_target_": f"{PLANTED}.Net"},
    "planted-deep": {"_target_": f"trainrun.model.mlp.Mlp.{PLANTED}.Net"},
    "torch-load": {"_target_": "torch.load", "f": "evil.pt", "weights_only": False},
    "torch-serialization": {"_target_": "torch.serialization.load", "f": "evil.pt", "weights_only": False},
    "hub": {"_target_": "torch.hub.load", "repo_or_dir": ".", "model": "x", "source": "local"},
    "shell-of-torch": {"_target_": "torch.utils.collect_env.run", "command": f"touch {MARK}"},
    "compiler": {"_target_": "torch.utils.cpp_extension.load_inline", "name": "x", "cpp_sources": ""},
    "library": {"_target_": "torch.ops.load_library", "path": "evil.so"},
    "through-torch": {"_target_": "torch.nn.modules.module.torch.load", "f": "evil.pt"},
    "through-functional": {"_target_": "torch.nn.functional.importlib.import_module", "name": PLANTED},
    "numpy": {"_target_": "numpy.load", "file": "evil.npy", "allow_pickle": True},
    "handler": {"_target_": "logging.FileHandler", "filename": MARK},
    "path": {"_target_": "pathlib.Path.touch", "self": MARK},
    "own-command": {"_target_": "trainrun.cli.main.main", "argv": [f"model._target_={PLANTED}.Net"]},
    "own-train": {"_target_": "trainrun.runs.api.train", "_args_": [f"model._target_={PLANTED}.Net"]},
    "own-writer": {"_target_": "trainrun.folder.run_folder.write_text", "path": MARK, "text": "x"},
    "own-builder": {"_target_": "trainrun.instantiate.import_target", "target": "os.system", "key": "x"},
    "through-ours": {"_target_": "trainrun.model.mlp.torch.load", "f": "evil.pt"},
    "nested": {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "os.system", "_args_": [f"touch {MARK}"]}],
    },
    "partial": {"_target_": "torch.nn.Identity", "x": {"_target_": f"{PLANTED}.Net", "_partial_": True}},
    "list": {"_target_": "torch.nn.ModuleList", "modules": [[{"_target_": f"{PLANTED}.Net"}]]},
    "no-text": {"_target_": ["os.system"]},
    "blank": {"_target_": " os.system"},
    "dots": {"_target_": "...os.system"},
    "other-alphabet": {"_target_": "\u03bfs.system"},
    "newline": {"_target_": "torch.nn.Linear\nos.system"},
}
PLACES = ("task", "optimizer", "scheduler", "loop", "data.train", "data.transform", "data.collate_fn", "data.val",
          "monitor.x", "data.augment.x", "task.loss")  # fmt: skip
COMMANDS = (["evaluate"], ["predict"], ["resume", "trainer.max_steps=8"])
YAMLS = {
    "tag": "model: !!python/object/apply:os.system ['touch executed']\n",
    "tag-name": f"model: !!python/name:{PLANTED}.Net\n",
    "tag-module": f"model: !!python/module:{PLANTED}\n",
    "environment": "model: {_target_: torch.nn.Linear}\nrun_name: ${oc.env:HOME}\n",
    "resolver": "model: {_target_: torch.nn.Linear}\nrun_name: ${oc.decode:1}\n",
    "reference": "model: {_target_: torch.nn.Linear, a: '${run_name}'}\n",
    "hidden-target": "model: {_target_: '${user.x}'}\nuser: {x: os.system}\n",
    "bomb": "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12)),
    "merge-bomb": "a0: &a0 {x: 1, y: 2}\n"
    + "".join(f"a{i + 1}: &a{i + 1} {{p: *a{i}, q: *a{i}, r: *a{i}}}\n" for i in range(30)),
    "itself": "model: &m [*m]\n",
    "deep": "model: " + "[" * 3000 + "]" * 3000 + "\n",
    "deep-blocks": "".join(" " * i + f"a{i}:\n" for i in range(500)),
    "large": "model: {_target_: torch.nn.Linear}\nuser: [" + "1," * 300_000 + "1]\n",
    "many": "model: {_target_: torch.nn.Linear}\nuser: [" + "1," * 60_000 + "1]\n",
    "bytes": "model: {_target_: torch.nn.Linear}\n!!binary aGFsbG8=: 1\n",
}


class Payload:
    """Runs a command when it is unpickled by whoever runs what a pickle says."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARK}",)


class Importer:
    def __reduce__(self) -> tuple[Any, ...]:
        return __import__, (PLANTED,)


class Giant:
    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (2**40,)


def with_base(place: Path) -> None:
    train_base(place)
    (place / "canary").mkdir()
    (place / "canary" / "file").write_text(CANARY)
    (place / "planted").mkdir()
    (place / "planted" / f"{PLANTED}.py").write_text(f"open({MARK!r}, 'w').close()\nclass Net: ...\n")


def cases() -> list[Case]:
    """expect: a function of the prepared folder that makes the attack, and says what was wrong, or nothing."""
    found = [Case(f"target-{name}", with_target("model", node), attack_run) for name, node in TARGETS.items()]
    found += [
        Case(f"target-at-{place}", with_target(place, {"_target_": f"{PLANTED}.Net"}), attack_run)
        for place in PLACES
    ]
    found += [Case(f"yaml-{name}", with_yaml(text), attack_run) for name, text in YAMLS.items()]
    found += [Case(f"link-{name}", build, attack_links) for name, build in LINKS.items()]
    found += [Case(f"pipe-{name}", with_pipe(name), attack_pipe) for name in PIPES]
    found += [Case(f"torch-{name}", build, attack_torch_file) for name, build in TORCH_FILES.items()]
    found += [
        Case("pickle-in-place-of-a-checkpoint", TORCH_FILES["system"], attack_words),
        Case("distributed-checkpoint", distributed, attack_distributed),
        Case("pickled-arrays", pickled_arrays, attack_arrays),
        Case("sweep-that-leads-out", sweep, attack_sweep),
        Case("cache-outside", with_value("data.cache", "disk:../canary/cache"), attack_run),
    ]
    return found


def check(case: Case, place: Path) -> str:
    with room(place, case.name) as folder, guarded(place):
        case.build(folder)
        try:
            said: str = case.expect(folder)
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:300]}"
        return said or harm(place, folder)


@contextmanager
def guarded(place: Path) -> Iterator[None]:
    """The planted module can be imported; what hangs is ended."""
    before = list(sys.path)
    sys.path.append(str(place / "planted"))
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        sys.path[:] = before


def _late(*_: Any) -> None:
    raise TimeoutError("it hangs")


def harm(place: Path, folder: Path) -> str:
    """What an attack has done."""
    if [path.name for path in (place / "canary").iterdir()] != ["file"]:
        return "made files elsewhere"
    if (place / "canary" / "file").read_text() != CANARY:
        return "changed a file elsewhere"
    marks = {mark for where in (place, folder, Path.cwd().resolve()) if (mark := where / MARK).exists()}
    for mark in marks:
        mark.unlink(missing_ok=True)
    if sys.modules.pop(PLANTED, None) is not None:
        return f"imported {PLANTED}"
    return "ran code" if marks else ""


def copy_base(folder: Path) -> Path:
    run = folder / "run"
    shutil.copytree(folder.parent / BASE, run)
    return run


def with_target(key: str, node: Any) -> Callable[[Path], None]:
    return with_value(key, node)


def with_value(key: str, value: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        run = copy_base(folder)
        config = yaml.safe_load((run / "config.yaml").read_text())
        holder = config
        *path, last = key.split(".")
        for name in path:
            holder = holder[name]
        holder[last] = value
        (run / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))

    return build


def with_yaml(text: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (copy_base(folder) / "config.yaml").write_text(text)

    return build


def with_link(name: str, target: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        path = copy_base(folder) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(folder.parent / target)

    return build


STEP = f"checkpoints/{format_folder_name(6)}"
LINKS = {
    "metrics": with_link("metrics.jsonl", "canary/file"),
    "log": with_link("run.log", "canary/file"),
    "plots": with_link("plots", "canary"),
    "status": with_link("status.json", "canary/file"),
    "checkpoints": with_link("checkpoints", "canary"),
    "checkpoint": with_link(STEP, f"{BASE}/{STEP}"),
    "state": with_link(f"{STEP}/state.json", f"{BASE}/{STEP}/state.json"),
    "dangling": with_link("samples.safetensors", "canary/new"),
}
PIPES = (
    "config.yaml",
    "RUN.json",
    "status.json",
    "metrics.jsonl",
    "overrides.txt",
    f"{STEP}/state.json",
    f"{STEP}/MANIFEST.json",
)


def with_pipe(name: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        path = copy_base(folder) / name
        path.unlink()
        os.mkfifo(path)

    return build


def attack_run(folder: Path) -> str:
    """Every way to use a run folder says no, in few words, at once."""
    run = str(folder / "run")
    for command, *words in COMMANDS:
        if fault := refused(call([command, run, *words])):
            return f"{command}: {fault}"
    with suppress(TrainrunError):
        trainrun.load_model(run)
        return "load_model: loaded"
    with suppress(TrainrunError):
        read_config(RunDir(folder / "run"))  # what a comparison of runs does with it: reads
    return ""


def attack_links(folder: Path) -> str:
    return attack_run(folder) or refused(call(["report", str(folder / "run")]))


def attack_pipe(folder: Path) -> str:
    """Nobody waits for a pipe."""
    run = str(folder / "run")
    for words in (
        ["evaluate", run],
        ["resume", run, "trainer.max_steps=8"],
        ["report", run],
        ["predict", run, "--trust"],
    ):
        if fault := refused(call(words)):
            return f"{words[0]}: {fault}"
    return ""


def refused(said: Any) -> str:
    if (
        said.code == 2
        and "Traceback" not in said.text
        and len(said.text) < 1500
        and said.seconds < MOST_SECONDS
    ):
        return ""
    return f"exit code {said.code} after {said.seconds:.1f} s: {said.text[:300]}"


def attack_torch_file(folder: Path) -> str:
    try:
        read_torch_weights(folder / "evil.pt")
    except CheckpointError:
        return ""
    return "was taken"


def attack_words(folder: Path) -> str:
    """A pickle wherever a checkpoint or weights are asked for."""
    path, out = folder / "evil.pt", folder / "out.safetensors"
    run = copy_base(folder)
    for words in (
        [*SMALL, f"init_from={path}"], [*SMALL, f"ckpt_path={path}"],
        ["evaluate", str(run), "--which", str(path)], ["resume", str(path)], ["evaluate", str(path)],
    ):  # fmt: skip
        if fault := refused(call(words)):
            return f"{words[0]}: {fault}"
    shutil.copyfile(path, out)
    return refused(call([*SMALL, f"init_from={out}"]))


def distributed(folder: Path) -> None:
    (folder / "dcp").mkdir()
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Payload()))
    (folder / "dcp" / "__0_0.distcp").write_bytes(b"x")


def attack_distributed(folder: Path) -> str:
    said = call([*SMALL, f"ckpt_path={folder / 'dcp'}"])
    return refused(said) or ("" if "torch.distributed checkpoint" in said.text else said.text)


def pickled_arrays(folder: Path) -> None:
    bad = numpy.array([Payload()] * 40, dtype=object)
    for name in ("x_train.npy", "y_train.npy"):
        numpy.save(folder / name, bad, allow_pickle=True)
    numpy.savez(folder / "a.npz", x_train=bad, y_train=bad)


def attack_arrays(folder: Path) -> str:
    for path in (folder, folder / "a.npz"):
        if fault := refused(call([*SMALL, "data=arrays", f"data.path={path}", "data.num_classes=3"])):
            return fault
    return ""


def sweep(folder: Path) -> None:
    job = {"num": 0, "words": [*SMALL, "seed=1"], "folder": "../../canary", "result": {}}
    (folder / "sweep").mkdir()
    (folder / "sweep" / "sweep.json").write_text(json.dumps({"calls": [], "jobs": [job]}))


def attack_sweep(folder: Path) -> str:
    return refused(call(["--multirun", *SMALL, "seed=1", f"hydra.sweep.dir={folder / 'sweep'}"]))


def saved(value: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(value() if callable(value) else value, folder / "evil.pt")


def very_deep(folder: Path) -> None:
    """200,000 lists, one in the other, by hand: pickle itself cannot write them."""
    depth = 200_000
    write_zip(folder, b"\x80\x02}(X\x01\x00\x00\x00w" + b"]" * depth + b"a" * (depth - 1) + b"u.")


def write_zip(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / "evil.pt", "w") as archive:
        for name, data in {"data.pkl": content, "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"evil/{name}", data)


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        torch.save({"w": torch.arange(4096.0)}, folder / "evil.pt")
        data = (folder / "evil.pt").read_bytes()
        new = change(data)
        assert new != data
        (folder / "evil.pt").write_bytes(new)

    return build


def flip_value(data: bytes) -> bytes:
    place = data.index(struct.pack("<f", 1000.0))
    return data[:place] + b"\xff" + data[place + 1 :]


def script(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give it up
        torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(str(folder / "evil.pt"))


def meta_giant(folder: Path) -> None:
    torch.save({"w": torch.empty(2**50, device="meta")}, folder / "evil.pt")


TORCH_FILES: dict[str, Callable[[Path], None]] = {
    "system": saved({"w": torch.zeros(1), "x": Payload()}),
    "import": saved({"w": torch.zeros(1), "x": Importer()}),
    "bare-pickle": lambda folder: (folder / "evil.pt").write_bytes(pickle.dumps(Payload())),  # type: ignore[dict-item]
    "legacy": lambda folder: torch.save(Payload(), folder / "evil.pt", _use_new_zipfile_serialization=False),
    "module": saved(lambda: torch.nn.Linear(2, 2)),
    "stride-0": saved(lambda: {"w": torch.zeros(1).as_strided((2**38,), (0,))}),
    "meta": meta_giant,
    "giant-bytes": saved({"w": torch.zeros(1), "x": Giant()}),
    "very-deep": very_deep,
    "sparse": saved(lambda: {"w": torch.eye(3).to_sparse()}),
    "empty-dict": saved({}),
    "numbers": saved({"w": 1}),
    "strange-name": saved(lambda: {"a\nb": torch.zeros(1)}),
    "script": script,
    "bit": changed(flip_value),
    "cut": changed(lambda data: data[:-200]),
    "empty": lambda folder: (folder / "evil.pt").write_bytes(b""),  # type: ignore[dict-item]
    "text": lambda folder: (folder / "evil.pt").write_text("hello"),  # type: ignore[dict-item]
}
