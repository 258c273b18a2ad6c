"""Golden set: twelve configurations of 50 steps each, compared bit for bit with those of an earlier commit.

    python scripts/golden.py                     # this tree against FROZEN
    python scripts/golden.py --against HEAD~1    # against another commit
    python scripts/golden.py --only ranks ema    # some of them

Both trees run on this machine, one after the other: bits depend on the CPU. Compared are the loss of every step, every
validation, and a SHA-256 of every tensor of the last checkpoint (weights, average, optimizer, random states). The
commands are the same for both, so that a setting that was renamed has to be understood by its former name.
Exit code 1 if anything differs. About four minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FROZEN = "8838bb1"  # before anything was taken away for the sake of size
STEPS = 50
COMMON = [
    "monitor.log_every_n_steps=1", "monitor.plots=false", "monitor.hardware=false",
    "trainer.num_threads=1", "parallel.accelerator=cpu",
]  # fmt: skip
GPT = [
    "model=gpt",
    "task=language_modeling",
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.context=64",
]
TEXT = [*GPT, "data=text", "data.train.block_size=32", "trainer.limit_val_batches=5", "data.batch_size=8"]
SEQUENCES = [*GPT, "model.vocab_size=64", "data=custom", "data.train._target_=lines.load", "+data.train.split=train",
             "+data.val._target_=lines.load", "+data.val.split=val", "data.batch_size=8"]  # fmt: skip
CASES: dict[str, list[str]] = {
    "digits": ["data.engine=resident"],
    "workers": ["data.engine=workers", "data.num_workers=2",
                "data.augment.crop._target_=trainrun.data.augment.crop.RandomCrop"],
    "threads": ["data.engine=threads", "data.num_threads=2", "model=cnn", "model.width=8"],
    "resnet": ["model=resnet", "model.width=8", "data.batch_size=16", "trainer.channels_last=true", "optimizer=sgd"],
    "bf16": ["precision=bf16-mixed", "trainer.gradient_clip_val=0.5"],
    "fp16": ["precision=16-mixed", "trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.5"],
    "16 bits": ["precision=bf16-true", "scheduler=warmup_cosine"],
    "ranks": ["parallel=ddp", "parallel.devices=2", "trainer.accumulate_grad_batches=2"],
    "ema": ["trainer.ema=true", "trainer.ema.decay=0.9", "optimizer=muon", "scheduler=onecycle"],
    "bucket": [*SEQUENCES, "data.padding=bucket", "model.dropout=0.1"],
    "pack": [*SEQUENCES, "data.padding=pack"],
    "checkpointing": [*TEXT, "trainer.gradient_checkpointing=full", "model.dropout=0.1"],
}  # fmt: skip
RESUMED = {
    "digits": 20,
    "fp16": 17,
    "ranks": 31,
    "bucket": 23,
}  # stopped in the middle of an epoch after so many steps
LINES = '''
import numpy as np
from torch.utils.data import Dataset


class Lines(Dataset):
    """Sequences of 4 to 64 whole numbers below 64, each followed by its successor most of the time."""

    def __init__(self, seed, size):
        draw = np.random.default_rng(seed)
        self.rows = []
        for _ in range(size):
            steps = (draw.random(int(draw.integers(4, 65))) < 0.2) * draw.integers(0, 64)
            self.rows.append(((int(draw.integers(0, 64)) + np.cumsum(1 + steps)) % 64).astype(np.int64))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def load(split):
    return Lines(0 if split == "train" else 1, 600 if split == "train" else 100)
'''

Result = dict[str, str]


def run_case(tree: Path, name: str, folder: Path) -> Result:
    """The losses, validations and tensors of one case, run by the command of `tree`."""
    (folder / "lines.py").write_text(LINES)
    run = folder / f"run-{name}"
    words = [*CASES[name], *COMMON, f"hydra.run.dir={run}"]
    if name in RESUMED:
        command(tree, folder, [*words, f"trainer.max_steps={RESUMED[name]}"])
        command(tree, folder, ["resume", str(run), f"trainer.max_steps={STEPS}"])
    else:
        command(tree, folder, [*words, f"trainer.max_steps={STEPS}"])
    return read_run(run)


def command(tree: Path, folder: Path, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainrun", *words], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{tree}: trainrun {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def read_run(run: Path) -> Result:
    from safetensors import safe_open

    result: Result = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key in ("train/loss", "val/loss", "lr"):
            if key in row and row["kind"] in ("train", "eval", "val"):
                result[f"{row['kind']} {key} at step {row['step']}"] = repr(row[key])
    newest = max((run / "checkpoints").glob("step-*"))
    for path in sorted(newest.glob("*.safetensors")):
        with safe_open(path, "np" if not has_bf16(path) else "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_tensor(key)
                result[f"{path.stem} {key}"] = digest(tensor)
    if len(result) < 100:
        raise SystemExit(
            f"{run}: only {len(result)} values were found; does the run folder look different now?"
        )
    return result


def has_bf16(path: Path) -> bool:
    return b'"BF16"' in path.read_bytes()[:1_000_000]


def digest(tensor: object) -> str:
    """A SHA-256 of type, shape and bytes of a NumPy array or a torch tensor."""
    import torch

    tensor = torch.as_tensor(tensor)
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def checked_out(revision: str, folder: Path) -> Path:
    """A copy of the tree at `revision`, read from this checkout's own history."""
    tree, root = folder / "tree", Path(__file__).resolve().parents[1]
    tree.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=root, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", default=FROZEN)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        folder = Path(name)
        before = checked_out(asked.against, folder)
        for case in asked.only:
            results = []
            for side, tree in (("before", before), ("after", Path(__file__).resolve().parents[1])):
                (folder / side).mkdir(exist_ok=True)
                results.append(run_case(tree, case, folder / side))
            old, new = results
            wrong = [key for key in old if old[key] != new.get(key)]
            different += bool(wrong)
            print(
                f"{case:14} {len(old):4} values  {'equal' if not wrong else f'{len(wrong)} DIFFERENT'}",
                flush=True,
            )
            for key in wrong[:5]:
                print(f"    {key}: {old[key][:24]} -> {new.get(key, 'missing')[:24]}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
