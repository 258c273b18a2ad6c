"""All certificates of one config, one after the other."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from trainrun.build.parts import Site, build_parts
from trainrun.config import RunConfig
from trainrun.errors import ConfigError, TrainrunError
from trainrun.parallel.devices import choose_device
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.process.scratch import scratch_folder
from trainrun.process.signals import StopFlag
from trainrun.process.usercode import line_of
from trainrun.randomness import derive_seed, kept_random_state, seed_everything
from trainrun.rundir import RunDir
from trainrun.state import TrainState
from trainrun.verify import continuity, mathematics
from trainrun.verify.certificate import FAIL, NONE, Certificate, NotApplicable
from trainrun.verify.fewer import first_samples
from trainrun.verify.trials import StopAt, Trials, in_doubles, quiet

CHANGING_STEPS = 10
FEW_SAMPLES = 50
OF_TYPES = re.compile(r"\b(dtype|scalar type|Double|double)\b")  # what torch says where types are mixed
Check = Callable[[], Certificate]


def certificates(config: RunConfig, progress: Callable[[str], None]) -> Iterator[Certificate]:
    """Each as soon as it is known. Nothing is written outside a temporary folder.

    Raises what a run of the same words would raise before its first step.
    """
    quiet(config)  # raises where there is nothing to verify
    with scratch_folder("verify-") as folder, kept_random_state():
        trials = Trials(config, folder, progress)
        _ = trials.pilot  # what these words cannot do is said before the first line of a table
        for title, check in checks(config, trials, folder).items():
            try:
                yield check()
            except NotApplicable as error:
                yield Certificate(title, NONE, "-", str(error))
            except ConfigError:
                raise
            except TrainrunError as error:
                yield Certificate(title, FAIL, "-", str(error))
            except Exception as error:  # of the user's code, mostly: the other checks still say something
                text = " ".join(str(error).split())[:300] + line_of(error)
                if OF_TYPES.search(text):
                    yield Certificate(title, NONE, "-", f"{mathematics.NO_DOUBLES}: {text}")
                else:
                    yield Certificate(title, FAIL, "-", f"{type(error).__name__}: {text}")


def checks(config: RunConfig, trials: Trials, folder: Path) -> dict[str, Check]:
    def exact(val_batch_size: int | None = None) -> Parts:
        return exact_parts(config, folder, val_batch_size)

    def first_batch(parts: Parts) -> object:
        batches = parts.train.epoch(0)
        try:
            return next(batches).data
        finally:
            getattr(batches, "close", lambda: None)()
            parts.train.close()

    def on_first_batch(check: Callable[[Parts, object], Certificate]) -> Certificate:
        parts = exact()
        return check(parts, first_batch(parts))

    @functools.cache
    def draws() -> bool:
        parts = exact()
        return mathematics.draws(parts, first_batch(parts))

    def cut(check: Check) -> Check:
        """A check that cuts a batch into parts means nothing where these draw other random numbers than the whole."""

        def checked() -> Certificate:
            if draws():
                raise NotApplicable("the model draws random numbers in evaluation mode too")
            return check()

        return checked

    return {
        "sum of losses": cut(lambda: on_first_batch(mathematics.sums)),
        "accumulation": cut(lambda: mathematics.accumulation(trials)),
        "partial window": cut(lambda: mathematics.partial_window(trials)),
        "learning rate": lambda: mathematics.learning_rates(trials),
        "ranks": cut(lambda: mathematics.ranks(trials)),
        "every sample once": lambda: continuity.each_once(config, exact().train.num_samples),
        "engines": lambda: continuity.engines(config),
        "padding": cut(lambda: on_first_batch(mathematics.padding)),
        "evaluation": lambda: continuity.evaluation(exact),
        "parameters": lambda: mathematics.every_parameter(own_parts(config, folder), short_fit),
        "rounding": lambda: continuity.drift(trials),
        "resume": lambda: continuity.resumed(trials),
    }


def exact_parts(config: RunConfig, folder: Path, val_batch_size: int | None) -> Parts:
    """In float64 on the CPU, as far as the model can."""
    changed = quiet(config)
    val = changed.data.val
    in_doubles(changed, 1, min(16, changed.data.batch_size), 1)
    if val_batch_size is not None and val:
        changed.data.val = first_samples(val, FEW_SAMPLES)
        changed.data.val_batch_size, changed.trainer.limit_val_batches = val_batch_size, 1.0
    changed.loop = None
    try:
        return built(changed, folder, torch.device("cpu"))
    except TrainrunError as error:
        raise NotApplicable(f"it does not run in float64 on a CPU: {error}") from error


def own_parts(config: RunConfig, folder: Path) -> Parts:
    changed = quiet(config)
    changed.checkpoint.enabled = False
    return built(changed, folder, choose_device(config.parallel.accelerator, local_rank=0))


def built(config: RunConfig, folder: Path, device: torch.device) -> Parts:
    assert config.seed is not None
    seed_everything(derive_seed(config.seed))
    site = Site(RunDir(folder / "parts"), "verify", Single(device), StopFlag(), [])
    return build_parts(config, site)[0]


def short_fit(parts: Parts) -> None:
    state = TrainState()
    parts.cadence.start(state)
    try:
        StopAt(CHANGING_STEPS)(parts, state)
    finally:
        for stream in (parts.train, parts.val):
            if stream is not None:
                stream.close()
