"""Forecast against measured peak of memory on the CPU, for reference models; see README, "Speed".

    python scripts/bench_memory.py [--more | name ...]

Each model trains in a process of its own, whose allocator gives memory back at once, so that the
resident set is what lives. The base is the resident set after a step of two samples, which loads code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENS = ["data=text", "task=language_modeling", "data.train.max_bytes=200000"]
CASES = {
    "mlp": ["model.hidden=[4096,4096,4096,4096]", "data.batch_size=512"],
    "cnn": ["model=cnn", "data=synthetic", "data.shape=[1,64,64]", "data.batch_size=256"],
    "gpt": ["model=gpt", *TOKENS, "data.train.block_size=128", "model.size=0.8M", "data.batch_size=48"],
    "lstm": ["model=lstm", *TOKENS, "data.train.block_size=128", "model.width=256", "data.batch_size=96"],
    "vae": ["model._target_=bench_memory.vae", "model.width=16384", "task._target_=bench_memory.Evidence",
            "data.batch_size=1024"],
}  # fmt: skip
LSTM = ["model=lstm", *TOKENS]
GPT = ["model=gpt", *TOKENS]
MORE = {  # other lengths, sizes, types and updates
    "mlp sgd": ["model.hidden=[2048,2048]", "data.batch_size=512", "optimizer=sgd", "optimizer.momentum=0"],
    "cnn bf16": ["model=cnn", "data=synthetic", "data.shape=[3,48,48]", "data.batch_size=128", "precision=bf16"],
    "gpt long": [*GPT, "model.context=1024", "data.train.block_size=1024", "data.batch_size=4"],
    "gpt plain": [*GPT, "model.attention=plain", "data.batch_size=8"],
    "gpt bf16": [*GPT, "precision=bf16", "data.batch_size=16"],
    "gpt vocabulary": ["model=gpt", "model.vocab_size=20000", *TOKENS, "data.train.block_size=128",
                       "model.context=128", "task.loss_chunks=1", "data.batch_size=8"],
    "gpt chunks": ["model=gpt", "model.vocab_size=20000", *TOKENS, "data.train.block_size=128",
                   "model.context=128", "task.loss_chunks=8", "data.batch_size=16"],
    "gpt accumulate": [*GPT, "trainer.accumulate_grad_batches=3", "data.batch_size=8"],
    "gpt recomputed": [*GPT, "trainer.gradient_checkpointing=full", "data.batch_size=16"],
    "lstm long": [*LSTM, "data.train.block_size=768", "model.width=128", "data.batch_size=16"],
    "lstm wide": [*LSTM, "data.train.block_size=64", "model.width=768", "data.batch_size=32", "optimizer=sgd"],
    "lstm deep": [*LSTM, "data.train.block_size=128", "model.layers=3", "model.dropout=0.1", "data.batch_size=32"],
    "lstm bf16": [*LSTM, "data.train.block_size=128", "data.batch_size=96", "precision=bf16"],
    "lstm accumulate": [*LSTM, "data.train.block_size=128", "trainer.accumulate_grad_batches=2", "data.batch_size=48"],
}  # fmt: skip


def vae(width: int = 2048, latent: int = 64) -> Any:
    """A plain variational autoencoder of digits, whose output is reconstruction, mean and logarithm of variance."""
    import torch
    from torch import nn

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2 * latent)
            )
            self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, 1)
            return self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance

    return Vae()


class Evidence:
    """Squared error and divergence, summed over samples."""

    def count(self, batch: Any) -> int:
        return len(batch[0])

    def step(self, model: Any, batch: Any) -> Any:
        from trainrun.interfaces import StepOutput

        found, mean, log_variance = model(batch[0])
        error = (found - batch[0].flatten(1)).square().sum()
        return StepOutput(error + 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum())


def resident_bytes(peak: bool) -> int:
    """peak: since it was forgotten."""
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def forget_peak() -> None:
    """Or making the data would count, before the first step."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def child(words: list[str]) -> dict[str, Any]:
    import torch

    from trainrun import loop
    from trainrun.build.parts import Site, build_parts
    from trainrun.data.pieces import num_rows, rows_of
    from trainrun.parallel.single import Single
    from trainrun.process.signals import StopFlag
    from trainrun.rundir import RunDir
    from trainrun.start.forecast import forecast
    from trainrun.words.compose import compose_run

    config = compose_run([*words, "trainer.num_threads=1", "checkpoint.enabled=false"]).config
    parts, _ = build_parts(
        config, Site(RunDir(Path("nowhere")), "bench", Single(torch.device("cpu")), StopFlag(), [])
    )
    window = next(iter(loop.windows_from(parts, loop.TrainState())))

    def step(rows: Any) -> None:
        with parts.precision.autocast():
            out = parts.task.step(parts.model, rows)
        parts.precision.backward(out.loss_sum, 1.0)

    count = num_rows(window[0].data)
    accumulates = config.trainer.accumulate_grad_batches > 1
    found = forecast(parts.model, step, window[0].data, parts.optimizer, accumulates)
    few = [window[0]._replace(data=rows_of(window[0].data, 0, 2, count))]
    base = resident_bytes(peak=False)
    forget_peak()
    loop.train_step(parts, few, False)
    code = resident_bytes(peak=False) - base - found.state  # code and workspaces, loaded by a first step
    for _ in range(2):
        loop.train_step(parts, window, False)
    measured = resident_bytes(peak=True) - base - max(code, 0)
    return {"forecast": found.coming, "measured": measured, "code": code}


def names_of(words: list[str]) -> list[str]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--more", action="store_true", help="other lengths, sizes, types and updates")
    known = ", ".join([*CASES, *MORE])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {known}; without: the first {len(CASES)}"
    )
    given = parser.parse_args(words)
    if unknown := [name for name in given.names if name not in CASES | MORE]:
        parser.error(f"{unknown[0]}: no such case; known are {known}")
    return given.names or list(MORE if given.more else CASES)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2:])))
        return
    trim = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    cases = CASES | MORE
    for name in names_of(sys.argv[1:]):
        command = [sys.executable, __file__, "--child", *cases[name]]
        env = os.environ | trim | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        row = json.loads(done.stdout.splitlines()[-1])
        ratio = row["forecast"] / row["measured"]
        print(
            f"{name:15} forecast {row['forecast'] / 1e6:8.1f} MB  measured {row['measured'] / 1e6:8.1f} MB  {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
