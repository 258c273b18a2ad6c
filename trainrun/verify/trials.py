"""Short runs of the user's config through the real runner, in a temporary folder."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.config.compose import Composition
from trainrun.config.saved_config import load_config
from trainrun.config.schema import RunConfig, replace_values
from trainrun.config.validate import check_config
from trainrun.errors import EXIT_AGAIN, EXIT_DONE, EXIT_INTERRUPTED, ConfigError, TrainingError
from trainrun.folder.run_folder import LaunchSpec, RunDir, read_json, write_json
from trainrun.monitor.metric_rows import read_metric_rows
from trainrun.output import SPEEDS
from trainrun.runs.run import create_run, resume_run, train_in_ranks
from trainrun.runtime.held_state import format_state
from trainrun.runtime.held_state import list_unsaved_attributes as own_attributes
from trainrun.train_state import TrainState
from trainrun.training import loop
from trainrun.training.checks.unsaved_state import collect_saved_ids, saves_whole_state
from trainrun.training.components import Components
from trainrun.training.triggers import STOP_TERMINATE
from trainrun.verify.certificate import NotApplicable
from trainrun.verify.subject_changes import Float64ByDefault

KEPT = ("state", "param_groups", "defaults", "step")  # of an optimizer, or the task's own function


def describe_unsaved_attributes(run: Components) -> dict[str, str]:
    """Return the attributes that are not in a state_dict, as short texts by name."""
    owners: dict[str, Any] = {
        f"model.{name}".rstrip("."): module for name, module in run.model.named_modules()
    }
    if not saves_whole_state(run.task):
        owners["task"] = run.task
    if type(run.optimizer).__module__.partition(".")[0] != "torch":
        owners["optimizer"] = run.optimizer
    saved_ids = collect_saved_ids(run.model)
    texts = {
        f"{owner_name}.{name}": format_state(value, saved_ids)
        for owner_name, owner in owners.items()
        for name, value in own_attributes(owner).items()
        if name not in KEPT
    }
    return {owner_name: text for owner_name, text in texts.items() if text}


WALL_CLOCK = ("time", "step_seconds", *SPEEDS)
WARMUPS = ("warmup_steps", "warmup_ratio", "warmup_epochs")
FEW_VALIDATIONS = 3  # batches
STEPS = 6  # of a resumed run: enough for a stop in the middle of something

Change = Callable[[RunConfig], RunConfig]


def fit_in_evaluation_mode(components: Components, state: TrainState) -> TrainState:
    """Train in evaluation mode. With dropout or batch statistics, a batch would differ from the sum of its parts."""
    components.wrapped.eval()
    with Float64ByDefault() if components.config.precision.mode == "64-true" else contextlib.nullcontext():
        return loop.fit(components, state)


class StopAt:
    """A training loop that stops after `steps` steps of this session, as SIGTERM does. The schedule does not change.

    attributes: a file for the attributes that no checkpoint saves at that moment.
    """

    def __init__(self, steps: int, evaluation_mode: bool = False, attributes: str | None = None) -> None:
        self._steps, self._evaluation_mode, self._attributes = steps, evaluation_mode, attributes

    def __call__(self, components: Components, state: TrainState) -> TrainState:
        triggers, num_asked = components.triggers, 0

        class Stopping:
            def __getattr__(self, name: str) -> Any:
                return getattr(triggers, name)

            def stop_request(inner) -> int:
                nonlocal num_asked
                num_asked += 1
                return STOP_TERMINATE if num_asked >= self._steps else 0

        if self._evaluation_mode:
            components.wrapped.eval()
        state = loop.fit(dataclasses.replace(components, triggers=Stopping()), state)  # type: ignore[arg-type]
        if self._attributes is not None and components.parallel.rank == 0:
            write_json(Path(self._attributes), describe_unsaved_attributes(components))
        return state


@dataclass(frozen=True)
class Outcome:
    """The result of a trial. shared: the model and its state. own: the state of rank 0.

    attributes: the attributes of rank 0 that no checkpoint saves, if requested. step_seconds: the median of all
        steps.
    """

    shared: dict[str, Any]
    own: dict[str, Any]
    rows: list[dict[str, Any]]
    attributes: dict[str, str]
    step_seconds: float


class Trials:
    """Trials of one config. paths: the folders where Python finds the user's modules, also in ranks."""

    def __init__(self, config: RunConfig, folder: Path, progress: Callable[[str], None]) -> None:
        self.config, self.folder, self._progress = config, folder, progress
        self._paths = [path for path in sys.path if path]

    def run(self, about: str, change: Change, then: int = 0) -> Outcome:
        """Run a trial. Raise TrainingError if it fails, because the user's run would fail too.

        then: the number of steps after a resume, if the trial stops itself before its end.
        """
        self._progress(about)
        config = change(trial_config(self.config))
        if faults := check_config(config):
            raise NotApplicable(f"these settings cannot be used in a trial: {faults[0]}")
        hydra_settings = {"hydra.run.dir": str(self.folder / secrets.token_hex(4))}
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            run = create_run(Composition(config, {}, [], hydra_settings), [])
            order = LaunchSpec(resume=False, paths=self._paths, began=time.perf_counter())
            code = train_in_ranks(run, config, order)
            assert not then or code != EXIT_DONE, "nothing is left of it to resume"
            if then and code == EXIT_AGAIN:
                code = resume_run(run, [f"loop.steps={then}"], self._paths)
        num_steps = config.loop.get("steps", math.inf) if then == 0 else then
        if code == EXIT_INTERRUPTED or (code == EXIT_AGAIN and session_steps(run, then) < num_steps):
            raise KeyboardInterrupt("verify was interrupted")  # by a signal that the trial took for its own
        if code not in (EXIT_DONE, EXIT_AGAIN):
            raise TrainingError(
                f"a trial ({about}) ended with {code}: {read_json(run.status).get('message')}"
            )
        return read_outcome(run)

    def run_until_stopped(self, about: str, steps: int, then: int = 0) -> Outcome:
        """Run the user's settings and stop after some steps; see `run`."""

        def change(config: RunConfig) -> RunConfig:
            attributes = str(self.folder / f"{secrets.token_hex(4)}.json")
            return replace(config, loop=build_stopping_loop(steps, attributes=attributes))

        return self.run(about, change, then)

    @cached_property
    def pilot(self) -> Outcome:
        """The outcome of the first STEPS steps of the unchanged settings. Raises the errors of such a run."""
        return self.run_until_stopped("the words as they are", STEPS)


def session_steps(run: RunDir, then: int) -> int:
    """Return the number of steps of a trial; after a resume, at most `then`."""
    steps = int(read_json(run.status).get("step", 0))
    return steps if then == 0 else min(steps, then)


def read_outcome(run: RunDir) -> Outcome:
    loaded = read_checkpoint(resolve_checkpoint(run.checkpoints, "last"))
    shared = copy.deepcopy(loaded.shared)
    shared["train"] = {k: v for k, v in shared["train"].items() if k != "seconds"}
    metrics = shared["train"].get("last_metrics")
    if metrics:
        shared["train"]["last_metrics"] = {k: v for k, v in metrics.items() if not k.endswith("/seconds")}
    rows = [
        {
            name: value
            for name, value in row.items()
            if name not in WALL_CLOCK and not name.endswith("/seconds")
        }
        for row in read_metric_rows(run.metrics)
        if row["kind"] in ("train", "eval")
    ]
    times = [row["step_seconds"] for row in read_metric_rows(run.metrics) if row["kind"] == "train"]
    loop_node = load_config(run.config, []).loop
    written = Path(loop_node.get("attributes") or run.root / "none.json")
    attributes = read_json(written) if written.exists() else {}
    return Outcome(shared, dict(loaded.own), rows, attributes, median(times) if times else math.inf)


def trial_config(config: RunConfig) -> RunConfig:
    """Return the same training without screen output and with one checkpoint at its end.

    Raise ConfigError for a custom step.
    """
    for key in ("step", "loop"):
        if getattr(config, key):
            raise ConfigError(f"{key}: your own code has nothing to compare with; leave it out")
    silent = ("verbose", "progress_bar", "hardware", "plots")
    return replace_values(config, {
        **{f"monitor.{name}": False for name in silent},
        "monitor.metrics_file": True, "monitor.log_every_n_steps": 1, "monitor.listeners": {},
        "checkpoint.enabled": True, "checkpoint.save_last": True, "checkpoint.mirror": None,
        "checkpoint.every_n_train_steps": None, "checkpoint.train_time_interval": None,
        "trainer.max_time": None, "trainer.early_stopping.enabled": False,
        "trainer.limit_val_batches": FEW_VALIDATIONS, "ckpt_path": None,
        "trainer.check_task": False,  # "sum of losses" says it
    })  # fmt: skip


def build_float64_config(config: RunConfig, steps: int, batch_size: int, accumulate: int) -> RunConfig:
    """Return a config of plain gradient descent in float64 on one CPU, where results may differ only by rounding."""
    return replace_values(config, {
        "precision.mode": "64-true", "precision.fp8": False,
        "parallel.mode": "single", "parallel.accelerator": "cpu",
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
        "data.batch_size": batch_size, "data.global_batch_size": None,
        "data.padding": "longest", "data.max_tokens": None, "data.augment": {}, "data.drop_last": False,
        "data.sampling": "none", "data.weights": None, "data.mix": None, "data.folds": None, "data.fold": None,
        "trainer.accumulate_grad_batches": accumulate, "trainer.max_steps": steps, "trainer.max_epochs": None,
        "trainer.limit_train_batches": 1.0, "data.val": None, "checkpoint.monitor": None,
        "trainer.compile.scope": "off", "trainer.cuda_graphs": False, "trainer.channels_last": False,
        "scheduler": step_schedule(config.scheduler),
        "loop": {"_target_": "trainrun.verify.trials.fit_in_evaluation_mode"},
    })  # fmt: skip


def step_schedule(scheduler: Any) -> Any:
    """Return the part of a schedule that depends on steps alone, not on the batch size or a metric."""
    if not scheduler or scheduler.get("metric") or scheduler["_target_"].endswith(".ReduceLROnPlateau"):
        return None
    fixed = {**scheduler, "lr_scaling": "none"}
    if any(fixed.pop(name, None) for name in WARMUPS):
        fixed["warmup_steps"] = 1  # that of the run may be longer than all trials
    return fixed


def build_stopping_loop(
    steps: int, evaluation_mode: bool = False, attributes: str | None = None
) -> dict[str, Any]:
    """Return the config node of a `loop` that stops a run early without changing its length."""
    options = {"steps": steps, "evaluation_mode": evaluation_mode, "attributes": attributes}
    return {"_target_": "trainrun.verify.trials.StopAt", **options}
