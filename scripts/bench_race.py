"""What the usual recipes gain, as a race to one metric: from a cautious start to recipes and presets.

    python scripts/bench_race.py fashion        a CNN on a part of Fashion-MNIST (Debian: dataset-fashion-mnist)
    python scripts/bench_race.py bible          an LSTM on verses (Debian: bible-kjv), with batches by length
    python scripts/bench_race.py gpt            a small GPT on blocks of the same text
    python scripts/bench_race.py WORK --usual   the presets beside the settings that a run has without any
    python scripts/bench_race.py techniques     each technique of the recipe alone, on the CNN
    python scripts/bench_race.py PAIR           threads, ranks, pinned, load, length: settings against each other

Each prints its `trainrun race` command and runs it. --seeds 2 is meant for five minutes a work on two quiet cores.
--tuned adds the preset that `trainrun autotune --allow numeric` finds. --only names racers. Results: FOLDER/WORK.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import as_the_command  # noqa: E402,F401  # ahead of torch

from trainrun.runtime.python_module import module_command  # noqa: E402

BIBLE = "bible -f -l2000 Ge1:1-Re22:21 </dev/null | cut -d' ' -f2- > book.txt"
START = (
    "data.batch_size=1 data.num_workers=2 precision=32-true monitor.log_every_n_steps=20 "
    "trainer.val_check_interval=0.05"
)
RECIPE = (  # the rate follows the batch
    "scheduler.lr_scaling=sqrt scheduler.base_batch_size=1 precision=auto "
    "monitor.log_every_n_steps=100 trainer.val_check_interval=1.0"
)
SEQUENCES = "data.padding=bucket data.max_sequence_length=192"
TEXT = "data=text data.path=book.txt task=language_modeling trainer.num_threads=1"
PRESETS = {"fast": "preset=fast", "max-perf": "preset=max-perf"}
USUAL_PRESETS = {**PRESETS, "memory-limited": "preset=memory-limited"}


class Work(NamedTuple):
    """common: settings of all racers. until: the target. recipe: what the recipe has beyond RECIPE. epochs: of the
    first racer, and of the others, whose epochs have fewer steps. batch: of the recipe."""

    common: str
    until: str
    recipe: str = ""
    epochs: tuple[int, int] = (1, 4)
    every: int = 0
    batch: int = 16


WORKS = {
    "fashion": Work(
        "data=fashion_mnist model=cnn data.train.val_fraction=0.02 trainer.limit_train_batches=0.05 "
        "trainer.num_threads=1", "val/acc=0.75", every=294,
    ),
    "bible": Work(f"{TEXT} data.train.kind=lines data.train.max_bytes=150000 model=lstm model.width=128 model.layers=1",
                  "val/loss=2.0", SEQUENCES, (1, 3), every=128),
    "gpt": Work(f"{TEXT} data.train.block_size=128 data.train.max_bytes=150000 model=gpt model.layers=2 model.width=64 "
                "model.heads=4", "val/loss=2.5", "", (1, 3), every=105, batch=4),
}  # fmt: skip
PAIRS = {  # two settings against each other: common settings, the racers, the target
    "threads": (WORKS["fashion"].common.replace("trainer.num_threads=1", "trainer.max_epochs=2"), "val/acc=0.7",
                ["trainer.num_threads=1", "trainer.num_threads=2"]),
    "ranks": (f"{WORKS['fashion'].common} trainer.max_epochs=2", "val/acc=0.7",
              ["parallel=single", "parallel=ddp parallel.devices=2 data.batch_size=64"]),
    "pinned": (f"{WORKS['fashion'].common} trainer.max_epochs=2 data.engine=workers data.num_workers=1", "val/acc=0.7",
               ["data.pin_memory=false", "data.pin_memory=true"]),
    "load": ("data.train._target_=faulty_parts.Table data.train.rows=3200 data.train.width=64 data.val=${data.train} "
             "data.train.wait=0.000625 model=faulty_parts.Waiting data.batch_size=32 trainer.max_epochs=2 "
             "trainer.num_threads=1 data.val_batch_size=32 --every 6400", "val/loss=10",
             ["data.num_workers=0", "data.num_workers=auto"]),
    "length": (f"{WORKS['bible'].common} data.batch_size=16 scheduler.lr_scaling=sqrt scheduler.base_batch_size=1 "
               "trainer.max_epochs=2 --every 500", "val/loss=2.1",
               ["data.padding=longest", "data.padding=longest data.max_sequence_length=192",
                "data.padding=longest data.max_sequence_length=192 data.truncate=split", "data.padding=bucket"]),
}  # fmt: skip
TECHNIQUES = {  # of the recipe, each alone on the start
    "batch 4": "data.batch_size=4",
    "workers 4": "data.num_workers=4",
    "no workers": "data.num_workers=0",
    "bf16": "precision=bf16-mixed",
    "accumulation": "trainer.accumulate_grad_batches=4",
    "compiled": "trainer.compile=model",
    "log every 500": "monitor.log_every_n_steps=500",
    "validation once": "trainer.val_check_interval=1.0",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=[*WORKS, *PAIRS, "techniques"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--until", help="another target")
    parser.add_argument("--only", nargs="+", help="of recipe, fast, max-perf, or of the techniques")
    parser.add_argument(
        "--usual", action="store_true", help="begin with the usual settings, which the presets change"
    )
    parser.add_argument("--tuned", action="store_true", help="also the preset of autotune")
    parser.add_argument("--out", type=Path, default=Path("race-bench"), metavar="FOLDER")
    typed = parser.parse_args()
    folder = typed.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if typed.work in ("bible", "gpt", "length") and not has_text(folder):
        print("no text: install Debian's bible-kjv, or put a book.txt into", folder)
        return 2
    if typed.work in PAIRS:
        common, until, racers = PAIRS[typed.work]
        words = [*racers, "--with", *common.split()]
    else:
        words, until = race_of(typed, folder)
    name = f"{typed.work}-usual" if typed.usual else typed.work
    words += ["--until", typed.until or until, "--seeds", str(typed.seeds), "--out", str(folder / name)]
    return run(["race", *words], folder)


def has_text(folder: Path) -> bool:
    """Return whether the folder has the text; write it if the command that prints it is installed."""
    if (folder / "book.txt").exists():
        return True
    return subprocess.run(BIBLE, shell=True, cwd=folder, check=False).returncode == 0


def race_of(typed: argparse.Namespace, folder: Path) -> tuple[list[str], str]:
    """Return the words of a race of a work or of the techniques, and its target."""
    if typed.work == "techniques":
        work, first = WORKS["fashion"], f"{START} trainer.max_epochs=1"
        chosen = [words for name, words in TECHNIQUES.items() if wanted(name, typed.only)]
        racers = [first, *(without_repeats(f"{first} {words}") for words in chosen)]
    else:
        work = WORKS[typed.work]
        first, others = (f"trainer.max_epochs={epochs}" for epochs in work.epochs)
        ways = USUAL_PRESETS if typed.usual else {"recipe": recipe_of(work), **PRESETS}
        if typed.tuned:
            ways = {**ways, "tuned": f"preset={tuned_preset(typed.work, work, folder)}"}
        chosen = [words for name, words in ways.items() if wanted(name, typed.only)]
        beside = others if typed.usual else f"{START} {first}"
        racers = [beside, *(f"{words} {others}" for words in chosen)]
        if typed.usual:  # the target is what the usual settings reach
            until = work.until.partition("=")[0]
            return [*racers, "--with", *work.common.split()], until
    return [*racers, "--with", *work.common.split(), "--every", str(work.every)], work.until


def recipe_of(work: Work) -> str:
    """Return the settings of the recipe for a work."""
    return f"data.batch_size={work.batch} {RECIPE} {work.recipe}".strip()


def wanted(name: str, only: list[str] | None) -> bool:
    return only is None or name in only


def without_repeats(words: str) -> str:
    """Return settings of which each key has its last value."""
    values = dict(word.partition("=")[::2] for word in words.split())
    return " ".join(f"{key}={value}" for key, value in values.items())


def tuned_preset(name: str, work: Work, folder: Path) -> str:
    preset = f"tuned-{name}"
    run(["autotune", *work.common.split(), "--allow", "numeric", "--budget", "60", "--name", preset], folder)
    return preset


def run(words: list[str], folder: Path) -> int:
    """Run a command of trainrun in a folder, beside this script's modules."""
    print("trainrun", shlex.join(words), flush=True)
    paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        module_command("trainrun", *words), cwd=folder, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
