"""No false alarm: `trainrun verify` on twenty configs that are as they should be.

    python scripts/check_verify.py [--only NUMBER ...]

Prints a line for each, and the checks that failed; exit code 1 if one did. About a quarter of a minute each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from trainrun import cli

TEXT = "data=text data.path={folder}/text.txt model=gpt model.width=32 task=language_modeling"
LINES = "data.train._target_=check_verify.Lines data.val._target_=check_verify.Lines data.val.seed=1"
CONFIGS = (
    "",
    "model=cnn",
    "model=cnn model.norm=layer optimizer=sgd optimizer.momentum=0.9 trainer.channels_last=true",
    "model=resnet model.width=8 trainer.gradient_clip_val=1.0",
    "model=mlp model.dropout=0.3 trainer.ema=true",
    "optimizer=muon optimizer.lr=0.01 scheduler=wsd",
    "precision=bf16-mixed scheduler=warmup_cosine scheduler.warmup_steps=5",
    "precision=16-mixed trainer.accumulate_grad_batches=4 trainer.gradient_clip_val=0.5",
    "precision=bf16-true precision.master_weights=true",
    "precision=64-true scheduler=plateau",
    "scheduler=onecycle data.drop_last=true",
    "data.augment.mixup._target_=trainrun.data.augment.mix.MixUp data.augment.mixup.num_classes=10",
    "model=cnn data.augment.crop._target_=trainrun.data.augment.crop.RandomCrop data.engine=workers data.num_workers=2",
    "task.loss._target_=torch.nn.CrossEntropyLoss task.loss.label_smoothing=0.1 data.engine=threads",
    "model=vae task=vae",
    "model=resnet model.width=8 trainer.gradient_checkpointing=full trainer.nan_policy=skip",
    f"{TEXT}",
    f"{TEXT} precision=bf16-mixed task.loss_chunks=4",
    f"{LINES} model=check_verify.Reader data.padding=longest",
    f"{LINES} model=check_verify.Reader data.padding=bucket data.max_sequence_length=12",
)


class Lines:
    """Tokens of unequal number, and a class."""

    def __init__(self, seed: int = 0, count: int = 200) -> None:
        self._seed, self._count = seed, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed * self._count + index)
        tokens = torch.randint(1, 30, (1 + index % 19,), generator=generator)
        return {"input_ids": tokens, "label": tokens[0] % 3}


class Reader(torch.nn.Module):
    """A mean over the real positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        weights = mask.to(self.tokens.weight.dtype)
        total = (self.tokens(tokens) * weights[..., None]).sum(1)
        found: torch.Tensor = self.head(total / weights.sum(1, keepdim=True))
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers, from 1")
    given = parser.parse_args()
    alarms = 0
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "text.txt").write_text("it was the best of times, it was the worst of times. " * 200)
        for number, words in enumerate(CONFIGS, start=1):
            if given.only and number not in given.only:
                continue
            began, said, told = time.perf_counter(), io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
                code = cli.main(["verify", *words.format(folder=name).split()])
            lines = said.getvalue().splitlines()
            failed = [line for line in lines if line.startswith("FAIL")] or (
                [told.getvalue()] if code else []
            )
            passed = sum(line.startswith("pass") for line in lines)
            alarms += bool(failed)
            print(f"{number:2} {passed:2} passed {time.perf_counter() - began:5.1f} s  {words}", flush=True)
            for line in failed:
                print(f"     {line.strip()}", flush=True)
    print(f"{alarms} of {len(given.only or CONFIGS)} with a false alarm")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
