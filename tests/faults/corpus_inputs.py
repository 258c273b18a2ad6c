"""Bad input by the command itself: one short message that names what is wrong, the right exit code, no traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy

from faults.corpus_case import BASE, SMALL, Case, call, room, train_base
from trainrun.checkpoint.files import format_folder_name

MOST_SECONDS = (
    30.0  # of the processor; most take a tenth of one, and what hangs or unfolds for ever takes them all
)
MOST_LETTERS = 1500
STEP = f"checkpoints/{format_folder_name(6)}"


class Expect(NamedTuple):
    words: list[str]
    said: str
    code: int = 2


def with_base(place: Path) -> None:
    train_base(place)


def check(case: Case, place: Path) -> str:
    before = Path.cwd()
    with room(place, case.name) as folder:
        os.chdir(folder)
        try:
            case.build(folder)
            said = call(case.expect.words)
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            os.chdir(before)
    if said.code != case.expect.code or case.expect.said not in said.text:
        return f"exit code {said.code}, said {said.text[:500]!r}, not {case.expect.said!r}"
    if "Traceback" in said.text or len(said.text) > MOST_LETTERS or said.seconds > MOST_SECONDS:
        return f"{len(said.text)} letters after {said.seconds:.1f} s: {said.text[:300]}"
    return ""


def cases() -> list[Case]:
    found = []
    for number, (build, words, said) in enumerate([*WORDS, *CONFIGS, *DATA, *RUNS]):
        typed = {word.partition("=")[0] for word in words}
        small = [word for word in SMALL if word.partition("=")[0] not in typed]
        full = words if words[0] in ("resume", "evaluate", "predict", "report") else [*words, *small]
        found.append(Case(f"{number}-{words[0][:40]}".replace("\x00", "NUL"), build, Expect(full, said)))
    return found


def nothing(folder: Path) -> None:
    pass


def conf(text: str | bytes, name: str = "conf/model/mine.yaml") -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return build


def run_with(name: str, content: str | bytes | None) -> Callable[[Path], None]:
    """A copy of the run, one file of it replaced; None takes it away."""

    def build(folder: Path) -> None:
        shutil.copytree(folder.parent / BASE, folder / "run")
        path = folder / "run" / name
        if content is None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        if name == "RUN.json":  # it would be read from its copy
            shutil.copyfile(path, folder / "run" / ".RUN.json")

    return build


def config_with(line: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        shutil.copytree(folder.parent / BASE, folder / "run")
        with (folder / "run" / "config.yaml").open("a") as file:
            file.write(line)

    return build


def file_with(name: str, content: str | bytes) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return build


def arrays(**named: numpy.ndarray) -> Callable[[Path], None]:  # type: ignore[type-arg]
    return lambda folder: numpy.savez(folder / "a.npz", **named)  # type: ignore[arg-type]


X, Y = numpy.ones((64, 4), numpy.float32), numpy.arange(64) % 3
Row = tuple[Callable[[Path], None], list[str], str]
WORDS: list[Row] = [  # limits and choices of every setting: tests/config
    (nothing, [word], said)
    for word, said in (
        ("optimizer.lr=fast", "optimizer.lr"),
        ("trainer.max_epochs=1.5", "trainer.max_epochs=1.5"),
        ("trainer.max_epochs=true", "max_epochs"),
        ("optimizer.lr=.nan", "optimizer.lr"),
        ("optimizer.lr=1e400", "optimizer.lr"),
        ("seed=99999999999", "seed"),
        ("data.batch_size=", "data.batch_size"),
        ("run_name=${nothing}", "nothing"),
        ("run_name=${run_name}", "run_name"),
        ("run_name=???", "run_name"),
        ("data.global_batch_size=33", "data.global_batch_size=33"),
        ("=3", "key=value"),
        ("a=b=c", "a=b=c"),
        ("model.hidden=[8", "model.hidden"),
        ("init_from=nothing.safetensors", "nothing.safetensors"),
        ("model._target_=nothing.Net", "nothing"),
        ("model._target_=3", "model._target_"),
        ("model._target_=os.path.join", "os.path.join"),
        ("user.x=${oc.env:NO_SUCH_THING}", "NO_SUCH_THING"),
        ("user.x=${no.such:1}", "no.such"),
        ("data.path=\x00", "data.path"),
        ("ckpt_path=.", "."),
    )
]
CONFIGS: list[Row] = [
    (conf(text), ["model=mine"], said)
    for text, said in (
        ("_target_: torch.nn.Linear\n\tx: 1\n", "line 2"),
        ("a: [1\n", "mine.yaml"),
        ("", "model"),
        ("- 1\n- 2\n", "mine.yaml"),
        ("just words\n", "mine.yaml"),
        (b"_target_: \xff\n", "UTF-8"),
        (b"_target_: a\x00b\n", "mine.yaml"),
        ("_target_: a.B\n_target_: a.C\n", "_target_"),
        ("_target_: !!python/name:os.system\n", "mine.yaml"),
        ("a: " + "[" * 2000 + "]" * 2000, "64"),
        ("a: [" + "1," * 60_000 + "]", "values"),
        ("a: '" + "x" * 300_000 + "'", "mine.yaml"),
        ("a: &a [*a]\n", "itself"),
        (
            "".join([f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9) if i else 1}]\n" for i in range(12)]),
            "values",
        ),
    )
]
DATA: list[Row] = [
    (build, words, said)
    for build, words, said in (
        (nothing, ["data=csv", "data.path=nothing.csv", "data.train.target=y"], "nothing.csv"),
        (file_with("a.csv", ""), ["data=csv", "data.path=a.csv", "data.train.target=y"], "a.csv"),
        (file_with("a.csv", "x,y\n"), ["data=csv", "data.path=a.csv", "data.train.target=y"], "a.csv"),
        (
            file_with("a.csv", "x,y\n1,2\n3\n"),
            ["data=csv", "data.path=a.csv", "data.train.target=y"],
            "a.csv",
        ),
        (file_with("a.csv", "x,y\n1,2\n3,4\n"), ["data=csv", "data.path=a.csv", "data.train.target=z"], "z"),
        (
            file_with("a.csv", b"x,y\n1,\xff\n"),
            ["data=csv", "data.path=a.csv", "data.train.target=y"],
            "a.csv",
        ),
        (file_with("a.npz", "no archive"), ["data=arrays", "data.path=a.npz"], "a.npz"),
        (arrays(x_train=X), ["data=arrays", "data.path=a.npz"], "y_train"),
        (arrays(x_train=X, y_train=Y[:5], x_val=X, y_val=Y), ["data=arrays", "data.path=a.npz"], "64"),
        (arrays(x_train=X, y_train=Y + 9), ["data=arrays", "data.path=a.npz", "data.num_classes=3"], "data"),
        (arrays(x_train=X, y_train=Y - 5), ["data=arrays", "data.path=a.npz", "data.num_classes=3"], "data"),
        (
            arrays(x_train=X[:0], y_train=Y[:0]),
            ["data=arrays", "data.path=a.npz", "data.num_classes=3"],
            "data",
        ),
        (
            file_with("f/train.txt", ""),
            ["data=text", "data.path=f", "model=gpt", "task=language_modeling", "model.hidden=[8]"],
            "model.hidden",
        ),
        (
            file_with("f/a/1.jpg", "no picture"),
            ["data=image_folder", "data.path=f", "data.shape=[3,8,8]"],
            "data",
        ),
        (file_with("f/x", ""), ["data=image_folder", "data.path=f", "data.shape=[3,8,8]"], "f"),
        (file_with("a.lmdb", "no base"), ["data=lmdb", "data.path=a.lmdb"], "a.lmdb"),
        (file_with("a.h5", "no file"), ["data=hdf5", "data.path=a.h5"], "a.h5"),
        (
            file_with("a.parquet", "no file"),
            ["data=parquet", "data.path=a.parquet", "data.train.target=y"],
            "a.parquet",
        ),
        (file_with("a.tfrecord", "no file"), ["data=tfrecord", "data.path=a.tfrecord"], "a.tfrecord"),
        (file_with("a.tar", "no file"), ["data=webdataset", "data.path=a.tar"], "a.tar"),
        (file_with("train-images-idx3-ubyte", "no"), ["data=idx", "data.path=."], "idx"),
        (file_with("out", "a file"), ["output_dir=out/run"], "output_dir="),
        (file_with("w.safetensors", "no"), ["init_from=w.safetensors"], "w.safetensors"),
        (
            file_with("w.safetensors", (99).to_bytes(8, "little") + b"{}"),
            ["init_from=w.safetensors"],
            "99 bytes",
        ),
        (file_with("w.pt", "no"), ["init_from=w.pt"], "w.pt"),
        (file_with("w.pt", "no"), ["ckpt_path=w.pt"], "w.pt"),
    )
]
RUNS: list[Row] = [
    (run_with("config.yaml", text), [verb, "run", "--trust"], said)
    for verb in ("evaluate", "resume")
    for text, said in (
        ("", "model"),
        ("[1]\n", "config"),
        ("x\n", "config"),
        (b"\xff\xfe", "UTF-8"),
        ("a: [", "line"),
        ("model: 3\n", "model"),
        ("model: {_target_: 3}\n", "model"),
        ("a: 1\nmodel: {a: 1}\n", "config"),
        ("trainer: {max_epochs: many}\nmodel: {a: 1}\n", "max_epochs"),
        ("trainer: 3\nmodel: {a: 1}\n", "TrainerConfig"),
        ("model: {_target_: torch.nn.Linear}\ndata: {batch_size: 2020-01-01}\n", "config"),
        ("model: {a: 1}\nmodel: {a: 2}\n", "config"),
    )
]
RUNS += [
    (run_with("RUN.json", text), ["resume", "run", "trainer.max_steps=8"], "RUN.json")
    for text in ("", "[]", "{}", "[" * 100_000, '{"run_id": 3}', b"\xff", "{" + " " * 5_000_000 + "}")
]
RUNS += [
    (
        run_with("RUN.json", json.dumps({"run_id": "other"})),
        ["resume", "run", "trainer.max_steps=8", "--trust"],
        "other",
    ),
    (run_with("checkpoints", None), ["evaluate", "run"], "no checkpoint"),
    (run_with(f"{STEP}/MANIFEST.json", ""), ["evaluate", "run", "--which", "last"], "MANIFEST.json"),
    (run_with(f"{STEP}/MANIFEST.json", None), ["evaluate", "run", "--which", "last"], "MANIFEST.json"),
    (run_with(f"{STEP}/state.json", "{}"), ["evaluate", "run", "--which", "last"], "state.json"),
    (
        run_with(f"{STEP}/shared.safetensors", None),
        ["evaluate", "run", "--which", "last"],
        "shared.safetensors",
    ),
    (run_with("metrics.jsonl", "{\n"), ["report", "run"], "line 1"),
    (run_with("metrics.jsonl", "[" * 100_000 + "\n"), ["report", "run"], "line 1"),
    (run_with("metrics.jsonl", b"\xff\n"), ["report", "run"], "line 1"),
    (run_with("metrics.jsonl", None), ["report", "run"], "metrics.jsonl"),
    (config_with("nonsense: 1\n"), ["evaluate", "run", "--trust"], "nonsense"),
    (config_with("# by hand\n"), ["evaluate", "run"], "config.yaml"),
    (nothing, ["evaluate", "nowhere"], "nowhere"),
    (nothing, ["resume", "."], "."),
]
