"""Checks of a whole run: its data, resume, evaluation and rounding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset

from trainrun.assemble.data_pipeline import build_sources, open_split
from trainrun.config.schema import RunConfig, replace_values
from trainrun.data.engines.iterable import has_parts
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import TrainrunError
from trainrun.interfaces import Batches
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.seeding import derive_seed, seed_everything
from trainrun.training.components import Components
from trainrun.training.evaluate import evaluate
from trainrun.training.without_trace import read_first_batches
from trainrun.verify.certificate import (
    FAIL,
    PASS,
    Certificate,
    NotApplicable,
    certify_difference,
    different_leaves,
)
from trainrun.verify.subject_changes import Float64ByDefault
from trainrun.verify.trials import STEPS, Outcome, Trials, build_stopping_loop

LAP_SECONDS = 2.0  # of a training that is resumed
MOST_STEPS = 60
DRIFT_STEPS = 20
DRIFT_BOUND = 0.02
FEW_BATCHES = 4
MOST_INDICES = 10_007
CPU = torch.device("cpu")


def check_resume(trials: Trials) -> Certificate:
    """Compare a training that is stopped at a random step and resumed with an uninterrupted one.

    It has as many steps as fit into LAP_SECONDS, or as the run has. Attributes that no checkpoint saves are compared
    too.
    """
    max_steps = max(STEPS, min(MOST_STEPS, int(LAP_SECONDS / trials.pilot.step_seconds)))
    uninterrupted = (
        trials.pilot if max_steps == STEPS else trials.run_until_stopped("a run without a stop", max_steps)
    )
    steps = uninterrupted.shared["train"]["step"]
    if steps < 2:
        raise NotApplicable("a run of one step has no middle to be resumed from")
    stop_step = random.Random(trials.config.seed).randrange(1, steps)
    stopped = trials.run_until_stopped(
        f"the same, stopped at step {stop_step} and resumed", stop_step, then=max_steps - stop_step
    )
    differences = different_leaves(uninterrupted.shared, stopped.shared, "shared")
    differences += different_leaves(uninterrupted.own, stopped.own, "own")
    differences += [] if uninterrupted.rows == stopped.rows else ["metrics.jsonl"]
    lost = unrestored_attributes(trials, uninterrupted, stopped, max_steps)
    text = f"stopped at step {stop_step} of {steps}, every bit the same"
    if differences and is_on_gpu(trials.config) and not is_repeatable(trials, uninterrupted, max_steps):
        raise NotApplicable(
            "two runs without a stop differ too, because this GPU adds numbers in any order; use "
            "trainer.deterministic=true"
        )
    if differences:
        text = f"stopped at step {stop_step} of {steps}; different: {', '.join(differences[:4])}"
    if lost:
        text += f"; not in the checkpoint: {', '.join(lost[:3])}"
    num_differences = len(differences) + len(lost)
    return Certificate("resume", FAIL if num_differences else PASS, f"{num_differences} values", text)


def is_on_gpu(config: RunConfig) -> bool:
    return choose_device(config.parallel.accelerator, mode=config.parallel.mode).type == "cuda"


def is_repeatable(trials: Trials, straight: Outcome, steps: int) -> bool:
    again = trials.run_until_stopped("the run without a stop, once more", steps)
    return not different_leaves(straight.shared, again.shared, "shared")


def unrestored_attributes(trials: Trials, straight: Outcome, stopped: Outcome, steps: int) -> list[str]:
    """Return the attributes that the resume did not restore, without those that also differ if the run is repeated."""
    names = differing_names(straight.attributes, stopped.attributes)
    if not names:
        return []
    again = trials.run_until_stopped("the run without a stop, once more", steps)
    noise = differing_names(straight.attributes, again.attributes)  # a clock, say
    return [name for name in names if name not in noise]


def differing_names(left: dict[str, str], right: dict[str, str]) -> list[str]:
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


# By name: data.engine and data.num_workers. Workers come before the main process has opened anything.
ENGINES: Final = {"resident": ("resident", 0), "workers": ("workers", 2), "main process": ("workers", 0),
                  "threads": ("threads", 0)}  # fmt: skip


def check_not_in_shards(config: RunConfig) -> None:
    """Raise NotApplicable for a source of which each rank and worker reads shards of its own."""
    source = build_sources(config, [])[0]["train"]
    if isinstance(source, IterableDataset) and has_parts(source, 2):
        raise NotApplicable(
            "each rank and worker reads shards of its own, so the batches depend on their number"
        )


def check_engines(config: RunConfig) -> Certificate:
    """Compare the first batches of all data engines, read from the start and from the middle of an epoch."""
    check_not_in_shards(config)
    reference: list[Any] = []
    seen: list[str] = []
    refused: list[str] = []
    for engine, (name, workers) in ENGINES.items():
        try:
            batches = _read_batches(config, name, workers)
        except TrainrunError as error:
            refused.append(str(error))
            continue
        seen.append(engine)
        reference = reference or batches
        places = different_leaves(reference, batches)
        if places:
            return Certificate(
                "engines", FAIL, f"{len(places)} tensors", f"{engine} reads other bits than {seen[0]}"
            )
    if len(seen) < 2:
        who = f"only {seen[0]} reads" if seen else "neither memory nor workers nor threads read"
        raise NotApplicable(f"{who} this data ({refused[0]})")
    return Certificate("engines", PASS, f"{len(reference)} batches", f"{', '.join(seen)} read the same bits")


def _read_batches(config: RunConfig, engine: str, workers: int) -> list[Any]:
    seed_everything(derive_seed(config.seed or 0))  # data may be drawn as it is built
    options = {"data.engine": engine, "data.num_workers": workers, "data.num_threads": 2}
    stream = _open_training(replace_values(config, options))
    try:
        batches = read_first_batches(stream, FEW_BATCHES) + read_first_batches(stream, FEW_BATCHES, start=1)
        return batches + read_first_batches(stream, epoch=1)
    finally:
        stream.close()


def _open_training(config: RunConfig) -> Batches:
    config = replace(config, data=replace(config.data, val=None, test=None))
    sources, drawn = build_sources(config, [])
    stream = open_split(config, Single(CPU), "train", sources["train"], [], lambda *_: None, drawn=drawn)
    assert stream is not None
    return stream


def check_epoch_coverage(config: RunConfig, num_samples: int | None) -> Certificate:
    """Check that an epoch has each sample once, on one, two and three ranks, with the user's batch size."""
    if num_samples is None:
        raise NotApplicable("the number of samples is not known")
    data = config.data
    if data.sampling != "none" or data.mix or data.truncate == "drop":
        raise NotApplicable(
            "data.sampling, data.mix and data.truncate=drop repeat samples of an epoch, or leave some out"
        )
    if data.padding in ("pack", "token_budget"):
        raise NotApplicable(f"data.padding={data.padding} makes batches of lengths, not of indices")
    if config.trainer.limit_train_batches != 1.0:
        raise NotApplicable("trainer.limit_train_batches ends an epoch before every sample is read")
    count = min(num_samples, MOST_INDICES)
    batch = min(config.data.batch_size, count)
    num_kept = count - count % batch if config.data.drop_last else count
    for world in (1, 2, 3):
        seen: list[int] = []
        for rank in range(world):
            options = StreamOptions(
                key="data.train", training=True, batch_size=max(batch // world, 1), seed=config.seed or 0,
                shuffle=config.data.shuffle, drop_last=False, engine="resident", rank=rank, world_size=world,
            )  # fmt: skip
            stream, _ = open_batches(torch.arange(count), options)
            for piece in stream.epoch(0):
                seen += piece.data.tolist() if piece.real else []
        if sorted(seen) != list(range(count)):
            num_lost, num_repeated = count - len(set(seen)), len(seen) - len(set(seen))
            text = f"{world} ranks: {num_lost} samples lost, {num_repeated} repeated"
            return Certificate("every sample once", FAIL, f"{num_lost + num_repeated}", text)
    text = "1, 2 and 3 ranks read every sample of an epoch once"
    if num_kept != count:
        text += f"; data.drop_last=true leaves {count - num_kept} out"
    return Certificate("every sample once", PASS, f"{count} samples", text)


def check_evaluation(build: Callable[[int], Components]) -> Certificate:
    """Check that validation loss and metrics do not depend on the batch size."""
    results: list[dict[str, float]] = []
    for size in (3, 7):
        run = build(size)
        if not run.validation:
            raise NotApplicable("there is no data.val")
        torch.manual_seed(size)  # a model that draws random numbers in evaluation gives itself away
        metrics: dict[str, float] = {}
        for split, stream in run.validation.items():
            with Float64ByDefault():
                metrics |= evaluate(run, split)
            stream.close()
        results.append({name: value for name, value in metrics.items() if not name.endswith("/seconds")})
    off = {name: abs(a - results[1][name]) / max(abs(a), 1e-12) for name, a in results[0].items()}
    worst = max(off, key=lambda name: off[name])
    about = "batches of 3 and of 7 give the same loss and metrics, in float64"
    return certify_difference(
        "evaluation", off[worst], 1e-9, about if off[worst] <= 1e-9 else f"{about}; largest: {worst}"
    )


def check_rounding(trials: Trials) -> Certificate:
    """Compare the losses of the first steps in the user's precision with those in float32."""
    mode = trials.config.precision.mode
    mode = "bf16-mixed" if mode == "auto" else mode  # what it may come to
    if mode in ("32-true", "64-true"):
        raise NotApplicable(f"precision={mode} is no mixed precision")

    def losses(about: str, other: str) -> list[float]:
        def change(config: RunConfig) -> RunConfig:
            loop = build_stopping_loop(DRIFT_STEPS, evaluation_mode=True)
            return replace_values(config, {"precision.mode": other, "loop": loop})

        return [row["train/loss"] for row in trials.run(about, change).rows if "train/loss" in row]

    exact, rounded = losses("float32", "32-true"), losses(mode, mode)
    scale = max(sum(map(abs, exact)) / len(exact), 1e-12)
    worst = max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) / scale
    return certify_difference(
        "rounding", worst, DRIFT_BOUND, f"the loss over {DRIFT_STEPS} steps in {mode} against float32"
    )
