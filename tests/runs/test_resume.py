"""A stopped run goes on bit for bit as if it had never stopped."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from approved import approve, approve_error
from faults.evidence import facts_of, same
from faults.forks import ForkedCommand, run_forked

import trainrun as package
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.cli.main import main

QUIET_COSINE = [
    "monitor.progress_bar=false", "monitor.hardware=false", "monitor.plots=false", "trainer.num_threads=1",
    "model.hidden=[4]", "scheduler=cosine", "monitor.log_every_n_steps=1",
]  # fmt: skip

# A dataset that draws random numbers for every sample, a network with dropout and running
# statistics, and a listener that sends a signal to its own process at a named step.
OWN = """
import os, random, signal
import numpy, torch
from torch import nn

class Noisy:
    def __init__(self, count=103, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 1, 6, 6, generator=generator)
        self.y = (self.x.mean(dim=(1, 2, 3)) > 0).long()
        self.num_classes = 2
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        noise = torch.randn(1, 6, 6) * 0.1 + random.random() * 0.1 + numpy.random.rand() * 0.1
        return self.x[index] + noise, self.y[index]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                                    nn.Dropout(0.3), nn.Linear(64, 2))
    def forward(self, x):
        return self.layers(x)

PROCESS = os.getpid()  # a trial before the training runs in a child

class NetThatStops(Net):
    # in a batch of a validation, on one rank, once: there is a note then
    def __init__(self, at=-1, rank="0"):
        super().__init__()
        self.at, self.rank, self.batches = at, rank, 0
    def forward(self, x):
        if not self.training:
            self.batches += 1
            is_due = self.batches == self.at and os.environ.get("RANK", "0") == self.rank
            if is_due and os.getpid() == PROCESS and not os.path.exists("note"):
                open("note", "w").close()
                os.kill(os.getpid(), signal.SIGINT)
        return super().forward(x)

class Stopper:
    def __init__(self, at, signal_name):
        self.at, self.number = at, getattr(signal, signal_name)
    def on_start(self, facts, step): self.started = step
    def on_step(self, step, epoch, row):
        if step == self.at and self.started < self.at:
            os.kill(os.getpid(), self.number)
"""
WORDS = [
    "data.train._target_=own.Noisy", "data.val._target_=own.Noisy", "data.val.seed=1", "model=own.Net",
    "data.batch_size=8", "trainer.max_epochs=3", "trainer.accumulate_grad_batches=2", "ema=true", "ema.decay=0.9",
    "scheduler=cosine", "scheduler.warmup_steps=3", "trainer.val_check_interval=0.5", "trainer.gradient_clip_val=1.0",
    "monitor.log_every_n_steps=1", "monitor.hardware=false", "monitor.plots=false", "monitor.progress_bar=false",
    "checkpoint.keep_last=9",
]  # fmt: skip


def changed(words: list[str], *new: str) -> list[str]:
    """The words with other values for some keys."""
    keys = {word.partition("=")[0] for word in new}
    return [word for word in words if word.partition("=")[0] not in keys] + list(new)


def stop_at(step: int, name: str) -> list[str]:
    return [
        "monitor.stop._target_=own.Stopper",
        f"monitor.stop.at={step}",
        f"monitor.stop.signal_name={name}",
    ]


@pytest.mark.process
@pytest.mark.parametrize(
    ("step", "precision", "workers"), [(1, "64", 0), (7, "bf16", 0), (9, "16", 0), (5, "32", 2)]
)
def test_a_run_stopped_anywhere_ends_with_the_same_bits(
    own: Path, step: int, precision: str, workers: int
) -> None:
    words = [*WORDS, f"precision={precision}", f"data.num_workers={workers}"]
    assert main([*words, *stop_at(-1, "SIGINT"), "output_dir=whole"]) == 0
    assert main([*words, *stop_at(step, "SIGINT"), "output_dir=stopped"]) == 130
    status = json.loads((own / "stopped" / "status.json").read_text())
    validates = step == 7  # then the validation is where the ranks agree on it, else the next step
    assert (status["state"], status["step"]) == ("stopped", step if validates else step + 1)
    assert main(["resume", "stopped"]) == 0
    whole, resumed = facts_of(own / "whole"), facts_of(own / "stopped")
    same(whole[0], resumed[0])
    assert whole[1] == resumed[1]


@pytest.mark.process
@pytest.mark.parametrize(
    ("at", "words"),
    [
        (1, []),
        (70, []),  # at the end of the run
        (9, ["parallel=ddp", 'model.rank="1"']),  # the other rank sees its share to the end
    ],
)
def test_a_validation_that_a_signal_cut_short_is_as_if_it_had_not_begun(
    own: Path, at: int, words: list[str]
) -> None:
    words = [*changed(WORDS, "model=own.NetThatStops"), "data.val_batch_size=8", *words]
    assert main([*words, "output_dir=whole"]) == 0
    assert main([*words, f"model.at={at}", "output_dir=run"]) == 130
    assert (own / "note").exists()
    rows = facts_of(own / "run")[1]
    batches = 7 if "parallel=ddp" in words else 13
    assert sum(row["kind"] == "eval" for row in rows) == (at - 1) // batches
    assert main(["resume", "run"]) == 0
    whole, again = facts_of(own / "whole"), facts_of(own / "run")
    if at == 70:  # the last checkpoint is the one ahead of the validation: only its metric is added to it
        for tree, _ in (whole, again):
            for name in ("validated_step", "best_metric", "best_step", "logged", "since_validation"):
                del tree["shared"]["train"][name]
    same(whole[0], again[0])
    assert whole[1] == again[1]


@pytest.mark.process
def test_another_number_of_workers_goes_on_with_the_same_stream(own: Path) -> None:
    assert main([*WORDS, *stop_at(-1, "SIGINT"), "output_dir=whole"]) == 0
    assert main([*WORDS, "data.num_workers=1", *stop_at(6, "SIGTERM"), "output_dir=stopped"]) == 75
    assert main(["resume", "stopped", "data.num_workers=0"]) == 0
    same(facts_of(own / "whole")[0], facts_of(own / "stopped")[0])


@pytest.mark.process
def test_two_ranks_go_on_with_the_same_bits(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = changed(WORDS, "parallel=ddp", "data.batch_size=4")
    assert main([*words, *stop_at(-1, "SIGTERM"), "output_dir=whole"]) == 0
    assert main([*words, *stop_at(5, "SIGTERM"), "output_dir=stopped"]) == 75
    approve_error(capfd.readouterr().err)
    assert main(["resume", "stopped"]) == 0
    whole, again = facts_of(own / "whole"), facts_of(own / "stopped")
    same(whole[0], again[0])
    assert whole[1] == again[1]


@pytest.mark.process
@pytest.mark.parametrize(("parallel", "name", "code"), [("single", "SIGINT", 130), ("ddp", "SIGTERM", 75)])
def test_a_signal_from_outside_saves_and_says_how_to_go_on(
    own: Path, parallel: str, name: str, code: int
) -> None:
    words = changed(WORDS, "trainer.max_epochs=100000", "data.batch_size=4", "parallel.accelerator=cpu")
    process = ForkedCommand(*words, f"parallel={parallel}", "output_dir=run")
    metrics = own / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    try:
        while not (metrics.exists() and '"train"' in metrics.read_text()):
            assert process.poll() is None, process.communicate(timeout=300)[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(getattr(signal, name))
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code, errors
    assert "trainrun resume" in errors
    assert "Traceback" not in errors
    assert json.loads((own / "run" / "status.json").read_text())["state"] == "stopped"
    assert resolve_checkpoint(own / "run" / "checkpoints", "last").is_dir()


def test_a_damaged_checkpoint_falls_back_and_none_left_is_an_error(
    own: Path, refuses: Callable[..., None]
) -> None:
    words = [*WORDS, "checkpoint.every_n_train_steps=3", "output_dir=run"]
    assert main([*words, *stop_at(8, "SIGINT")]) == 130
    newest = resolve_checkpoint(own / "run" / "checkpoints", "last")
    damaged = newest / "shared.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert main(["resume", "run", "monitor.stop.at=-1"]) == 0
    assert main([*WORDS, "output_dir=whole"]) == 0
    same(facts_of(own / "whole")[0], facts_of(own / "run")[0])
    for folder in (own / "run" / "checkpoints").glob("step-*"):
        (folder / "MANIFEST.json").write_text("{}")
    refuses(["resume", "run", "trainer.max_epochs=4"], "MANIFEST.json")


def test_a_run_with_none_but_damaged_checkpoints_is_not_begun_again_by_its_command(
    own: Path, refuses: Callable[..., None]
) -> None:
    again = [*WORDS, *stop_at(3, "SIGINT"), "output_dir=run"]
    assert main(again) == 130
    for folder in (own / "run" / "checkpoints").glob("step-*"):
        (folder / "MANIFEST.json").write_text("{}")
    rows = (own / "run" / "metrics.jsonl").read_text()
    for _ in range(2):  # the second finds them set aside
        refuses(again)
    assert (own / "run" / "metrics.jsonl").read_text().startswith(rows)


@pytest.mark.parametrize("step", [3, 6])
def test_a_stop_at_a_validation_leaves_the_same_best_checkpoints(own: Path, step: int) -> None:
    """The stop comes into effect one step later: at a validation, in and at the end of an epoch."""
    words = changed(WORDS, "checkpoint.save_top_k=3", "checkpoint.keep_last=1")
    assert main([*words, *stop_at(-1, "SIGINT"), "output_dir=whole"]) == 0
    assert main([*words, *stop_at(step, "SIGINT"), "output_dir=stopped"]) == 130
    assert main(["resume", "stopped"]) == 0
    folders = [own / name / "checkpoints" for name in ("whole", "stopped")]
    best = [json.loads((folder / "best.json").read_text()) for folder in folders]
    assert best[0] == best[1]
    assert step + 1 in [entry["step"] for entry in best[0]["entries"]]
    for entry in best[0]["entries"]:
        one, other = (read_checkpoint(folder / entry["folder"]).shared for folder in folders)
        same(one["model"], other["model"])
        same(one["ema"], other["ema"])


def test_a_finished_run_stays_as_it_is_and_goes_on_with_more_epochs(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in WORDS if not word.startswith("scheduler")]
    assert main([*changed(words, "trainer.max_epochs=2"), "output_dir=run"]) == 0
    rows = package.load_run(own / "run").metrics
    capsys.readouterr()
    files = {path: path.stat().st_mtime_ns for path in (own / "run").rglob("*") if path.name != ".lock"}
    for more in ([], ["trainer.max_epochs=1"], ["trainer.max_steps=2"]):
        assert main(["resume", "run", *more]) == 0
        approve(capsys.readouterr().out, "trainer.max_epochs=2", "trainrun resume")
    assert {
        path: path.stat().st_mtime_ns for path in (own / "run").rglob("*") if path.name != ".lock"
    } == files
    assert package.load_run(own / "run").metrics == rows
    assert main(["resume", "run", "trainer.max_epochs=3"]) == 0
    assert main([*words, "output_dir=whole"]) == 0
    whole, longer = facts_of(own / "whole"), facts_of(own / "run")
    same(whole[0], longer[0])
    assert whole[1] == longer[1]


def test_the_same_command_goes_on_and_leaves_a_finished_run_alone(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(at: int, *more: str) -> list[str]:
        return [*WORDS, *stop_at(at, "SIGINT"), *more]

    again = words(4, "seed=null", "output_dir=run")
    assert main(again) == 130
    seed = package.load_run("run").config.seed
    assert main([*again, "optimizer.lr=0.5"]) == 2
    capsys.readouterr()
    assert main(again) == 0
    assert "continues from step 4" in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in (own / "run").rglob("*") if path.name != ".lock"}
    assert main(again) == 0
    assert "finished already" in capsys.readouterr().out
    assert package.train(*again).status["state"] == "done"
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert main(words(-1, f"seed={seed}", "output_dir=whole")) == 0
    whole, resumed = facts_of(own / "whole"), facts_of(own / "run")
    same(whole[0], resumed[0])
    assert whole[1] == resumed[1]


def test_words_that_a_run_cannot_go_on_with_are_forgotten_and_those_of_a_mistake_in_code_are_kept(
    own: Path, refuses: Callable[..., None]
) -> None:
    assert main([*WORDS, *stop_at(4, "SIGINT"), "output_dir=run"]) == 130
    config = (own / "run" / "config.yaml").read_text()
    refuses(["resume", "run", "data.batch_size=7"])
    assert (own / "run" / "config.yaml").read_text() == config
    (own / "fails.py").write_text(
        "from trainrun.errors import PluginError\n"
        "class Fails:\n    def __init__(self, kind):\n"
        "        self.kind = {'key': KeyError, 'plugin': PluginError}[kind]\n"
        "    def on_gradients(self, run):\n        raise self.kind('square')\n"
    )
    words = ["resume", "run", "hook.fails._target_=fails.Fails"]
    refuses([*words, "hook.fails.kind=plugin"])
    assert (own / "run" / "config.yaml").read_text() == config
    assert main([*words, "hook.fails.kind=key", "trainer.max_epochs=2"]) == 1
    message = json.loads((own / "run" / "status.json").read_text())["message"]
    assert message == f"KeyError: 'square' ({own}/fails.py line 6)"  # as sweeps and lists of runs show it
    (own / "fails.py").write_text(
        "class Fails:\n    def __init__(self, kind): ...\n    def on_end(self, run, state): ...\n"
    )
    sys.modules.pop("fails")  # mended
    assert main(["resume", "run"]) == 0
    assert package.load_run(own / "run").config.trainer.max_epochs == 2
    assert not (own / "run" / ".config-before.yaml").exists()


@pytest.mark.parametrize(
    ("length", "goes_on", "steps"),
    [
        ("trainer.max_epochs=2", ["resume", "run"], 8 + 2 * 2),
        ("trainer.max_steps=6", ["resume", "run", "trainer.max_steps=null"], 6 + 1 + 2 * 2),  # amid an epoch
        ("trainer.max_epochs=2", [*QUIET_COSINE, "ckpt_path=run", "output_dir=new"], 8 + 2 * 2),
    ],
)
def test_a_schedule_ends_with_the_run_after_a_resume_with_another_batch_size(
    workdir: Path, length: str, goes_on: list[str], steps: int
) -> None:
    """An epoch has 4 steps at first, then 2."""
    assert main([*QUIET_COSINE, length, "data.batch_size=360", "output_dir=run"]) == 0
    assert main([*goes_on, "trainer.max_epochs=4", "data.batch_size=720"]) == 0
    rows = package.load_run("new" if "output_dir=new" in goes_on else "run").metrics
    assert [row["facts"]["total_steps"] for row in rows if row["kind"] == "start"][-1] == steps
    start = max(number for number, row in enumerate(rows) if row["kind"] == "start")
    rates = {row["step"]: row["lr"] for row in rows[start:] if row["kind"] == "train"}
    assert max(rates) == steps
    usual = {step: 0.0005 * (1 + math.cos(math.pi * (step - 1) / steps)) for step in rates}
    assert rates == pytest.approx(usual)


def test_more_patience_goes_on_behind_an_early_stop(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *(word for word in changed(WORDS, "trainer.max_epochs=9") if not word.startswith("scheduler")),
        "trainer.early_stopping.enabled=true", "trainer.early_stopping.min_delta=0.2",
    ]  # fmt: skip
    for patience, folder in ((2, "run"), (4, "whole")):
        assert main([*words, f"trainer.early_stopping.patience={patience}", f"output_dir={folder}"]) == 0
    assert facts_of(own / "run")[0]["shared"]["train"]["bad_validations"] == 2
    capsys.readouterr()
    assert main(["resume", "run"]) == 0
    assert "trainrun resume" in (said := capsys.readouterr().out)
    assert "run trainer.early_stopping=false (or trainer.early_stopping.patience=...)" in said
    assert facts_of(own / "run")[0]["shared"]["train"]["bad_validations"] == 2
    assert main(["resume", "run", "trainer.early_stopping.patience=4"]) == 0
    whole, longer = facts_of(own / "whole"), facts_of(own / "run")
    same(whole[0], longer[0])
    assert whole[1] == longer[1]


@pytest.mark.process
def test_a_run_killed_again_and_again_ends_with_the_same_bits_and_rows(own: Path) -> None:
    def life(*words: str) -> int:
        return run_forked(lambda: main(list(words)), own / "output", 300.0).code

    words = changed(WORDS, "checkpoint.every_n_train_steps=2", "trainer.val_check_interval=1.0")
    words.append("parallel.accelerator=cpu")  # each life is forked
    assert main([*words, *stop_at(-1, "SIGKILL"), "output_dir=whole"]) == 0
    assert life(*words, *stop_at(5, "SIGKILL"), "output_dir=run") == -signal.SIGKILL
    for step in (12, 19):
        assert life("resume", "run", f"monitor.stop.at={step}") == -signal.SIGKILL
    assert life("resume", "run", "monitor.stop.at=-1") == 0, (own / "output").read_text()
    whole, killed = facts_of(own / "whole"), facts_of(own / "run")
    same(whole[0], killed[0])
    assert whole[1] == killed[1]
