"""The watch over a VAE in whole runs: it finds a collapse, leaves a healthy run alone, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused
from quiet_runs import QUIET, losses, train, weights

import trainrun as package
from trainrun.errors import ConfigError, TrainingError, TrainrunError
from trainrun.vae_health.latent_code import have_code_noise

pytestmark = pytest.mark.train

SMALL = ("model=vae", "task=vae", "model.hidden=[64]", "model.latent_dim=8", "model.body=mlp", *QUIET)
WATCHED = (*SMALL, "monitor=vae")
COLLAPSING = (*WATCHED, "task.likelihood=bernoulli", "task.beta=100")
OFTEN = (*WATCHED, "hook.vae.update_every_n_steps=5", "hook.vae.window_size=2")


def rows_of(folder: str, kind: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def alarms(folder: str) -> list[tuple[int, str]]:
    notes = rows_of(folder, "note")
    return [(row["step"], row["text"]) for row in notes if row["text"].startswith("posterior collapse")]


def test_a_collapse_is_told_once_within_200_steps(workdir: Path) -> None:
    run = train("run", 300, *COLLAPSING)
    ((step, text),) = alarms(run)
    assert 100 <= step < 200
    assert "0 of 8 dimensions active" in text
    assert "try task.beta=1" in text


@pytest.mark.parametrize("seed", range(5))
def test_an_annealed_run_raises_no_alarm(workdir: Path, seed: int) -> None:
    words = (
        "task.beta=0.1",
        "task.beta_schedule=linear",
        "task.beta_steps=200",
        "hook.vae.on_collapse=raise",
    )
    run = train("run", 300, *WATCHED, *words, f"seed={seed}")
    last = rows_of(run, "vae")[-1]
    assert last["active_units"] >= 4
    assert last["mutual_information"] > 1
    assert not alarms(run)


@pytest.mark.parametrize("annealed", [True, False])
def test_a_code_of_sequences_is_healthy_if_annealed_and_collapses_if_not(
    workdir: Path, annealed: bool
) -> None:
    """Lines whose first letter says the others: with the letters before in sight, a decoder needs no code."""
    lines = "\n".join(letter * 6 for letter in "abcdefgh" * 60)
    (workdir / "lines.txt").write_text(lines + "\n")
    words = ("data=text", "data.path=lines.txt", "data.train.kind=lines", "data.train.cache_dir=kept", "monitor=vae",
             "model=sequence_vae", "model.latent_dim=4", "model.width=32", "task=vae", "data.batch_size=32",
             "optimizer.lr=0.01", "hook.vae.update_every_n_steps=10", *QUIET)  # fmt: skip
    calm = ("task.beta_schedule=linear", "task.beta_steps=150", "data.augment.word_dropout.rate=0.8")
    run = train("run", 150, *words, *(calm if annealed else ("task.beta=4",)))
    assert bool(alarms(run)) is not annealed
    assert (rows_of(run, "vae")[-1]["active_units"] >= 2) is annealed


def test_the_watch_changes_no_bit_of_the_run(workdir: Path) -> None:
    more = (
        "task.likelihood=bernoulli",
        "task.beta=100",
        "trainer.ema.enabled=true",
        "trainer.val_check_interval=4",
    )
    on, off = train("on", 20, *OFTEN, *more), train("off", 20, *SMALL, *more)
    assert [row["step"] for row in rows_of(on, "vae")] == [
        4,
        5,
        10,
        15,
        20,
    ]  # the validation at 4 has its line too
    assert rows_of(off, "vae") == []
    assert alarms(on)
    assert losses(on) == losses(off)
    assert all(torch.equal(value, weights(off)[name]) for name, value in weights(on).items())


def test_a_run_that_goes_on_has_the_boost_and_the_memory_of_the_watch(workdir: Path) -> None:
    words = (*OFTEN, "task.likelihood=bernoulli", "task.beta=100", "hook.vae.on_collapse=boost_free_bits")
    whole = train("whole", 40, *words)
    raised = [row["free_bits"] for row in rows_of(whole, "vae")]
    assert raised[0] == 0
    assert raised[2] == 0.1
    for stop in (17, 20):  # within a window, and at a look
        train(f"part{stop}", stop, *words)
        rest = train(f"rest{stop}", 40, *words, f"ckpt_path=part{stop}")
        assert losses(rest) == [row for row in losses(whole) if row[0] > stop]
        assert all(torch.equal(value, weights(rest)[name]) for name, value in weights(whole).items())
        assert alarms(rest) == [alarm for alarm in alarms(whole) if alarm[0] > stop]
    assert losses(whole) != losses(train("warned", 40, *words, "hook.vae.on_collapse=warn"))


def test_a_healthy_run_goes_on_without_the_watch(workdir: Path) -> None:
    assert [row["step"] for row in rows_of(train("part", 12, *WATCHED), "vae")] == [
        12
    ]  # of a short run one look
    assert rows_of(train("rest", 14, *SMALL, "ckpt_path=part"), "vae") == []


@pytest.mark.process
def test_two_ranks_say_of_all_samples_what_one_says(workdir: Path) -> None:
    words = (*OFTEN, "hook.vae.num_samples=100000", "precision=64")
    one = rows_of(train("one", 10, *words, "data.batch_size=32"), "vae")
    of_two = (
        "data.batch_size=16",
        "parallel=ddp",
        "data.val_batch_size=179",
    )  # of 359: the last batch is one sample
    two = rows_of(train("two", 10, *words, *of_two), "vae")
    assert [row["step"] for row in two] == [5, 10]
    for left, right in zip(one, two, strict=True):
        for name in ("kl", "reconstruction", "activity", "kl_of_dimensions"):
            assert right[name] == pytest.approx(left[name], rel=1e-6)


@pytest.mark.process
def test_two_ranks_are_boosted_alike_and_end_together(workdir: Path) -> None:
    words = (*OFTEN, "task.likelihood=bernoulli", "task.beta=100", "parallel=ddp")
    run = train("run", 15, *words, "hook.vae.on_collapse=boost_free_bits")
    assert rows_of(run, "vae")[-1]["free_bits"] == 0.1
    with refused(TrainrunError):
        train("other", 15, *words, "hook.vae.on_collapse=raise")


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_half_precision(workdir: Path, mode: str) -> None:
    row = rows_of(train("run", 10, *OFTEN, f"precision={mode}"), "vae")[-1]
    assert row["gain"] > -1
    assert 0 <= row["mutual_information"] <= row["ceiling"]


def test_noise_of_more_than_the_code_gives_no_gain() -> None:
    assert have_code_noise([{"noise": torch.zeros(2, 4)}], 4)
    assert not have_code_noise([{"noise": torch.zeros(2, 5)}], 4)


def test_a_collapse_can_end_the_run(workdir: Path) -> None:
    with refused(TrainingError, "hook.vae.on_collapse"):
        train("run", 300, *COLLAPSING, "hook.vae.on_collapse=raise", "hook.vae.fast=true")


@pytest.mark.usefixtures("pictures")
def test_its_time_is_in_the_account_and_its_pictures_in_the_folder(workdir: Path) -> None:
    run = train("run", 30, *OFTEN, "monitor.plots=true")
    seconds = rows_of(run, "ledger")[-1]["seconds"]["hooks"]
    told = sum(row["seconds"] for row in rows_of(run, "vae"))
    assert told <= seconds + 1e-3
    assert seconds < 2 * told + 0.05
    assert (Path(run) / "plots" / "latents.png").stat().st_size > 5000
    assert not list(Path(train("plain", 3, *SMALL, "monitor.plots=true")).glob("plots/latents.png"))


@pytest.mark.parametrize(
    "words",
    [
        ("monitor=vae",),
        (*WATCHED, "data.val=null"),
        (*WATCHED, "hook.vae.update_every_n_steps=0"),
        (*WATCHED, "hook.vae.num_samples=1"),
        (*WATCHED, "hook.vae.on_collapse=stop"),
        (*WATCHED, "trainer.compile.scope=step"),
    ],
)  # fmt: skip
def test_what_cannot_be_watched_is_refused_in_one_line(workdir: Path, words: tuple[str, ...]) -> None:
    with refused(ConfigError):
        package.train(*words, "trainer.max_steps=2", *QUIET)


def test_a_task_of_ones_own_without_a_bound_is_refused(workdir: Path) -> None:
    (workdir / "mine.py").write_text(
        "class Mine:\n    def count(self, batch):\n        return len(batch[0])\n\n"
        "    def step(self, model, batch):\n        raise NotImplementedError\n"
    )
    with refused(ConfigError):
        package.train(
            "task=mine.Mine", "monitor=vae", "trainer.max_steps=2", "trainer.check_task=false", *QUIET
        )
