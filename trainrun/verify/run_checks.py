"""Run all checks of one config, one after the other."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

from trainrun.assemble.assemble import RunContext, build_components
from trainrun.config.schema import RunConfig, replace_values, validation_nodes
from trainrun.errors import ConfigError, TrainrunError
from trainrun.folder.run_folder import RunDir
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.runtime.signals import StopFlag
from trainrun.seeding import derive_seed, restore_random_state, seed_everything
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.without_trace import read_first_batches
from trainrun.user_code import format_user_line
from trainrun.verify import continuity, mathematics
from trainrun.verify.certificate import FAIL, NONE, Certificate, NotApplicable
from trainrun.verify.subject_changes import first_samples_node
from trainrun.verify.trials import StopAt, Trials, build_float64_config, trial_config

CHANGING_STEPS = 10
FEW_SAMPLES = 50
OF_TYPES = re.compile(r"\b(dtype|scalar type|Double|double)\b")  # what torch says where types are mixed
Check = Callable[[], Certificate]
Found = TypeVar("Found")


def iterate_certificates(config: RunConfig, progress: Callable[[str], None]) -> Iterator[Certificate]:
    """Yield each certificate when its check is done. Files are written to a temporary folder only.

    Raise the errors that a run with these settings would raise before its first step.
    """
    trial_config(config)  # raises where there is nothing to verify
    with TemporaryDirectory(prefix="trainrun-", ignore_cleanup_errors=True) as name, restore_random_state():
        folder = Path(name)
        trials = Trials(config, folder, progress)
        _ = trials.pilot  # what these words cannot do is said before the first line of a table
        for title, check in build_checks(config, trials, folder).items():
            try:
                yield check()
            except NotApplicable as error:
                yield Certificate(title, NONE, "-", str(error))
            except ConfigError:
                raise
            except TrainrunError as error:
                yield Certificate(title, FAIL, "-", str(error))
            except Exception as error:  # of the user's code, mostly: the other checks still say something
                text = " ".join(str(error).split())[:300] + format_user_line(error)
                if OF_TYPES.search(text):
                    yield Certificate(title, NONE, "-", f"{mathematics.NO_DOUBLES}: {text}")
                else:
                    yield Certificate(title, FAIL, "-", f"{type(error).__name__}: {text}")


def build_checks(config: RunConfig, trials: Trials, folder: Path) -> dict[str, Check]:
    def exact(val_batch_size: int | None = None) -> Components:
        return build_exact_run(config, folder, val_batch_size)

    def first_batch(run: Components) -> object:
        try:
            return read_first_batches(run.train)[0]
        finally:
            run.train.close()

    def on_first_batch(check: Callable[[Components, object], Found]) -> Found:
        run = exact()
        return check(run, first_batch(run))

    @functools.cache
    def draws() -> bool:
        run = exact()
        return mathematics.uses_random_numbers(run, first_batch(run))

    def cut(check: Check) -> Check:
        """Wrap a check that splits a batch. It does not apply if the halves draw other random numbers than the whole
        batch.
        """

        def checked() -> Certificate:
            if draws():
                raise NotApplicable("the model draws random numbers in evaluation mode too")
            return check()

        return checked

    def check_ranks() -> Certificate:
        continuity.check_not_in_shards(config)
        return mathematics.check_ranks(trials)

    return {
        "sum of losses": cut(lambda: on_first_batch(mathematics.check_sums)),
        "accumulation": cut(lambda: mathematics.check_accumulation(trials)),
        "partial window": cut(lambda: mathematics.check_partial_window(trials)),
        "learning rate": lambda: mathematics.check_learning_rates(trials),
        "ranks": cut(check_ranks),
        "update": lambda: check_user_update(config, folder),
        "every sample once": lambda: continuity.check_epoch_coverage(config, exact().train.num_samples),
        "engines": lambda: continuity.check_engines(config),
        "padding": cut(lambda: on_first_batch(mathematics.check_padding_effect)),
        "evaluation": lambda: continuity.check_evaluation(exact),
        "parameters": lambda: mathematics.check_all_parameters_change(
            build_user_components(config, folder),
            train_briefly,
            lambda: on_first_batch(mathematics.gradient_sizes),
        ),
        "rounding": lambda: continuity.check_rounding(trials),
        "resume": lambda: continuity.check_resume(trials),
    }


def build_exact_run(config: RunConfig, folder: Path, val_batch_size: int | None) -> Components:
    """Build the run in float64 on the CPU, as far as the model supports that."""
    changed = trial_config(config)
    nodes = validation_nodes(changed.data)
    changed = replace(build_float64_config(changed, 1, min(16, changed.data.batch_size), 1), loop=None)
    if val_batch_size is not None and nodes:
        few = {
            name.removeprefix("val/"): first_samples_node(node, FEW_SAMPLES, "val")
            for name, node in nodes.items()
        }
        changed = replace_values(changed, {
            "data.val": few["val"] if "val" in nodes else few, "data.val_batch_size": val_batch_size,
            "trainer.limit_val_batches": 1.0,
        })  # fmt: skip
    try:
        return build_run_in_folder(changed, folder, torch.device("cpu"))
    except TrainrunError as error:
        raise NotApplicable(f"{mathematics.NO_DOUBLES}: {error}") from error


def build_user_components(config: RunConfig, folder: Path) -> Components:
    changed = replace_values(trial_config(config), {"checkpoint.enabled": False})
    return build_run_in_folder(
        changed, folder, choose_device(config.parallel.accelerator, devices=config.parallel.devices)
    )


def check_user_update(config: RunConfig, folder: Path) -> Certificate:
    """Check the user's optimizer on the user's weights, in float32 and without clipping."""
    changes = {"precision.mode": "32-true", "precision.fp8": False}
    changes |= {"trainer.gradient_clip_val": None, "trainer.ema.enabled": False}
    run = build_user_components(replace_values(config, changes), folder)
    try:
        return mathematics.check_update(run, read_first_batches(run.train)[0])
    finally:
        run.train.close()


def build_run_in_folder(config: RunConfig, folder: Path, device: torch.device) -> Components:
    assert config.seed is not None
    seed_everything(derive_seed(config.seed))
    (folder / "parts").mkdir(exist_ok=True)  # for the pictures of a task
    site = RunContext(RunDir(folder / "parts"), "verify", Single(device), StopFlag(), [])
    return build_components(config, site)[0]


def train_briefly(run: Components) -> None:
    state = TrainState()
    run.triggers.start(state)
    try:
        StopAt(CHANGING_STEPS)(run, state)
    finally:
        for stream in (run.train, *run.splits().values()):
            stream.close()
