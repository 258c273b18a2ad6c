"""Calls of a task's optional methods (epochs, state, images) and of hooks."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainrun.checkpoint.save import flatten_tree
from trainrun.errors import CheckpointError, PluginError
from trainrun.interfaces import KeepsState, StepInfo
from trainrun.seeding import derive_seed
from trainrun.timing import phases
from trainrun.train_state import TrainState
from trainrun.training.checks.task_pictures import save_pictures
from trainrun.training.checks.unsaved_state import UnsavedState
from trainrun.training.trained_parameters import GradientCheck
from trainrun.training.triggers import STOP_INTERRUPT
from trainrun.user_code import class_package

if TYPE_CHECKING:
    from trainrun.training.checks.unsaved_state import UnsavedState
    from trainrun.training.trained_parameters import GradientCheck

HOOKS = ("on_epoch_start", "on_epoch_end", "on_validation_start", "on_validation_end", "pictures")
TRAINING, EVALUATION = 7, 8  # what seeds are derived from, besides the place


class RunPosition:
    """The position of the run (step, epoch, micro-batch), from which the `StepInfo` for tasks and hooks is built."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._seed, self._rank, self.device = seed, rank, device
        self.step = self.epoch = self.batches = self.calls = 0

    def set_position(self, state: TrainState | RunPosition) -> None:
        self.step, self.epoch, self.batches, self.calls = state.step, state.epoch, state.batches, 0

    def build_info(self, hook: str = "") -> StepInfo:
        """Return the `StepInfo` for the next call of `step`, or for a hook."""
        training, call = torch.is_grad_enabled(), self.calls
        self.calls += not hook
        at = (TRAINING, self.epoch, self.batches) if training else (EVALUATION,)
        generator = torch.Generator(self.device)
        generator.manual_seed(
            derive_seed(self._seed, self._rank, *at, -1 - HOOKS.index(hook) if hook else call)
        )
        first = call == 0 and not (training and self.batches)
        return StepInfo(self.step, self.epoch, first, training, generator)


class StepWithInfo:
    """A step with arguments model and batch that passes `info` to the task's `step`."""

    def __init__(self, step: Callable[..., Any], place: RunPosition) -> None:
        self._step, self._place = step, place

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self._step(model, batch, info=self._place.build_info())


class TaskCalls:
    """The calls of a task's optional methods.

    model: without wrappers. pictures: the file for a task's images; None on ranks that write none. makes_pictures:
        whether this rank runs the forwards for them. Raises PluginError for a task whose methods do not fit
        together.
    """

    def __init__(
        self,
        task: Any,
        model: nn.Module,
        place: RunPosition,
        pictures: Path | None,
        makes_pictures: bool = False,
    ) -> None:
        self._task, self._model, self.place, self._pictures = task, model, place, pictures
        self._makes_pictures = makes_pictures
        self._name = type(task).__name__
        self._hooks = {name: getattr(task, name) for name in HOOKS if callable(getattr(task, name, None))}
        self._unsaved: UnsavedState | None = None
        self._watching: list[UnsavedState | GradientCheck] = []  # what has not seen all yet
        self._trains = self._unseen = False
        self.after_user_code: Callable[[], None] = _do_nothing  # of the run, once it is built
        self.unsaved_before: list[str] = []  # state that the checkpoint of a resume does not hold
        check_state_methods(task, "task")
        check_state(task, "task")
        self.informed = accepts_info(task)
        if self.informed:
            try:
                object.__setattr__(task, "step", StepWithInfo(task.step, place))
            except AttributeError as error:
                raise PluginError(f"task: {self._name}: takes info, so it must not have __slots__") from error

    def start(self, state: TrainState | RunPosition) -> None:
        """Set the position before the first step or validation of a session, or before an evaluation of a
        checkpoint.
        """
        self.place.set_position(state)

    def watch(self, run: Any) -> None:
        """Start the checks for unsaved state and gradients before the first step, if the run contains user code."""
        parts = (self._task, run.own_step, *run.hooks.by_key.values(), *self._model.modules())
        packages = {class_package(type(part)) for part in parts}
        if packages - {"builtins", "torch", "trainrun"}:
            self._unsaved = UnsavedState(run, self.unsaved_before)
            self._watching = [self._unsaved, GradientCheck(run)]

    def before_step(self, state: TrainState) -> None:
        self._trains = True
        self.place.set_position(state)
        if self._hooks and state.batches == 0:
            self._call("on_epoch_start", self._model)

    def after_step(self, state: TrainState, log: bool) -> None:
        if self._watching:
            self._watching = [watch for watch in self._watching if not watch.after_step(log)]
        if self._hooks and state.batches == 0:
            self.place.step = state.step
            self._call("on_epoch_end", self._model)
        self.place.set_position(state)

    def start_evaluation(self, model: nn.Module, split: str) -> None:
        self.place.calls = 0
        self._unseen = self._trains and split.startswith("val") and "pictures" in self._hooks
        self._call("on_validation_start", model)

    def draw_first_batch(self, model: nn.Module, batch: Any) -> None:
        """Save the task's images of the first batch of an evaluation. Called for each batch; later calls do nothing."""
        if self._unseen and self._makes_pictures:
            self._unseen = False
            pictures = self._hooks["pictures"](model, batch)
            if self._pictures is not None:
                save_pictures(self._pictures, pictures, self._name)

    def end_evaluation(self, model: nn.Module) -> None:
        """Call `on_validation_end` after a complete evaluation."""
        self._call("on_validation_end", model)

    def _call(self, name: str, model: nn.Module) -> None:
        hook = self._hooks.get(name)
        if hook is not None:
            hook(model, self.place.build_info(name))
            self.after_user_code()

    def state_dict(self) -> dict[str, Any]:
        """Return the task's `state`, and under `anew` the lines about state that no checkpoint contains. Return {} if
        there is neither.
        """
        lines = self._unsaved.list_changes() if self._unsaved is not None else []
        return collect_state(self._task, self.place.device) | ({"anew": lines} if lines else {})


def _do_nothing() -> None:
    """Do nothing. Used before there is a run."""


def accepts_info(task: Any) -> bool:
    """Return whether `step` has an argument `info`. Raise PluginError for any other unknown argument."""
    try:
        parameters = list(inspect.signature(task.step).parameters.values())
    except (TypeError, ValueError):  # a callable without a readable signature
        return False
    if any(parameter.name == "info" for parameter in parameters):
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    unknown = [
        item for item in parameters if item.kind in positional and item.default is inspect.Parameter.empty
    ]
    if len(unknown) > 2:
        raise PluginError(
            f"task: {type(task).__name__}.step: its third argument is named {unknown[2].name}; it must be info"
        )
    return False


def check_state_methods(owner: Any, key: str) -> None:
    """Raise PluginError for an object with only one of `state_dict` and `load_state_dict`."""
    name = type(owner).__name__
    halves = [callable(getattr(owner, half, None)) for half in ("state_dict", "load_state_dict")]
    if any(halves) and not all(halves):
        raise PluginError(f"{key}: {name}: has only one of state_dict() and load_state_dict(state)")


def check_state(owner: Any, key: str) -> None:
    """Raise PluginError for a state that no checkpoint can hold."""
    if isinstance(owner, KeepsState):
        try:
            flatten_tree(owner.state_dict())
        except TypeError as error:
            raise PluginError(f"{key}: {type(owner).__name__}.state_dict(): {error}") from error


def collect_state(owner: Any, device: torch.device) -> dict[str, Any]:
    """Return the owner's `state`, and `on_cpu`: the paths of its host tensors if the run is on a GPU. {} without a
    state.
    """
    get_state = getattr(owner, "state_dict", None)  # `check_state_methods` has looked for the other half
    state = get_state() if callable(get_state) else None
    if not state:
        return {}
    on_cpu: list[str] = []
    if device.type != "cpu":
        map_tensors(state, (), lambda path, tensor: on_cpu.append("/".join(path)) if tensor.is_cpu else None)
    return {"state": state} | ({} if device.type == "cpu" else {"on_cpu": on_cpu})


def map_tensors(tree: Any, path: tuple[str, ...], change: Callable[[tuple[str, ...], Tensor], Any]) -> Any:
    """Return a tree with every tensor replaced by `change(path, tensor)`."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, (*path, str(key)), change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([map_tensors(value, (*path, str(i)), change) for i, value in enumerate(tree)])
    return tree


USUAL = ("run", "state")
METHODS = {  # of hooks, and their arguments
    "on_start": USUAL, "on_epoch_start": USUAL, "on_step_end": USUAL, "on_epoch_end": USUAL,
    "on_validation_end": (*USUAL, "metrics"), "on_checkpoint": USUAL, "on_end": USUAL, "on_gradients": ("run",),
}  # fmt: skip


class Hooks:
    """All hooks of a run, called in the order of the config, on every rank. hooks: by key, `hook.NAME`.

    Raises PluginError for an object without a hook method, with an unknown `on_...` method, or with half a state.
    """

    def __init__(self, hooks: Mapping[str, Any]) -> None:
        self.by_key = dict(hooks)
        for key, hook in self.by_key.items():
            check_hook(key, hook)
        self._calls = {name: [_find_method(hook, name) for hook in self.by_key.values()] for name in METHODS}
        self._calls = {name: [call for call in calls if call] for name, calls in self._calls.items()}
        self.on_gradients = self._calls["on_gradients"]  # called by `Components.update`

    def on_start(self, run: Any, state: Any) -> None:
        """Call `on_start` before the first step of every session. `state` is fresh, or that of a checkpoint."""
        self._call("on_start", run, state)

    def check_states(self) -> None:
        """Raise PluginError for a state that no checkpoint can hold. Call it after `on_start`."""
        for key, hook in self.by_key.items():
            check_state(hook, key)

    def before_step(self, run: Any, state: Any) -> None:
        if self.by_key and state.batches == 0:
            self._call("on_epoch_start", run, state)

    def after_step(self, run: Any, state: Any) -> None:
        """Call `on_step_end` and, after the last step of an epoch, `on_epoch_end`.

        Validations and checkpoints that are due come later.
        """
        if self.by_key:
            self._call("on_step_end", run, state)
            if state.batches == 0:
                self._call("on_epoch_end", run, state)

    def on_validation_end(self, run: Any, state: Any, metrics: Mapping[str, float]) -> None:
        self._call("on_validation_end", run, state, metrics)

    def on_checkpoint(self, run: Any, state: Any) -> None:
        """Call `on_checkpoint` of the hooks before everything is saved."""
        self._call("on_checkpoint", run, state)

    def end(self, run: Any, state: Any) -> bool:
        """Call `on_end` before the last save of a training that ends by itself. Return whether this changed the
        weights.

        A run that a signal stops is saved for a resume; `on_end` comes after that resume.
        """
        if (
            not self._calls["on_end"]
            or state.stop_request >= STOP_INTERRUPT
            or state.ended_step == state.step
        ):
            return False
        before = digest_weights(run)
        self.on_end(run, state)
        state.ended_step, state.saved_step = state.step, -1  # what was saved at this step is saved again
        if not any(run.parallel.gather(digest_weights(run) != before)):
            return False
        return bool(run.triggers.validate_again(state, run.checkpoints.find_other_best(state.step)))

    def on_end(self, run: Any, state: Any) -> None:
        self._call("on_end", run, state)

    def _call(self, name: str, *arguments: Any) -> None:
        if calls := self._calls[name]:
            with arguments[0].phases.measure(phases.HOOKS):
                for method in calls:
                    method(*arguments)
            arguments[0].after_user_code()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the hooks by key, without empty ones."""
        states = {key: hook.state_dict() for key, hook in self.by_key.items() if isinstance(hook, KeepsState)}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, place: str, states: Mapping[str, Any]) -> None:
        """Load the states of the hooks; tensors are on the CPU. Raise CheckpointError for a hook that cannot load.

        A hook without a stored state starts afresh.
        """
        for key, state in states.items():
            hook = self.by_key.get(key)
            if not isinstance(hook, KeepsState):
                raise CheckpointError(
                    f"checkpoint {place}: holds the state of {key}, and there is no such hook with a "
                    "load_state_dict(state); use that of before"
                )
            hook.load_state_dict(state)


def digest_weights(run: Any) -> str:
    """Return a digest of the weights and of their average."""
    state = [run.held.state_dict(), {} if run.ema is None else run.ema.state_dict()]
    digest = hashlib.blake2b(digest_size=16)

    def add_tensor(_: tuple[str, ...], tensor: Tensor) -> None:
        numbers = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(numbers.view(torch.uint8).numpy().tobytes())

    map_tensors(state, (), add_tensor)
    return digest.hexdigest()


def check_hook(key: str, hook: Any) -> None:
    kind = type(hook).__name__
    named = [name for name in dir(hook) if name.startswith("on_") and callable(getattr(hook, name))]
    if wrong := [name for name in named if name not in METHODS]:
        import difflib

        near = difflib.get_close_matches(wrong[0], METHODS, n=1, cutoff=0)[0]
        raise PluginError(
            f"{key}: {kind}.{wrong[0]} is never called; did you mean {near}? A hook has {', '.join(METHODS)}"
        )
    if not named:
        raise PluginError(f"{key}: {kind} has no method of a hook: {', '.join(METHODS)}")
    for name in named:
        try:
            inspect.signature(getattr(hook, name)).bind(*METHODS[name])
        except TypeError as error:
            arguments = ", ".join(METHODS[name])
            raise PluginError(f"{key}: {kind}.{name} is called as {name}({arguments}): {error}") from error
        except ValueError:  # a function of C that does not say its arguments
            continue
    check_state_methods(hook, key)


def _find_method(hook: Any, name: str) -> Any:
    method = getattr(hook, name, None)
    return method if callable(method) else None
