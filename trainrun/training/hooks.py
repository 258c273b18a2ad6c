"""Hooks (`hook.NAME`): code of the user's, or of ours, that acts on the run, from steps to checkpoints."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from trainrun.errors import CheckpointError, PluginError
from trainrun.interfaces import KeepsState
from trainrun.timing.phases import HOOKS
from trainrun.training.task_calls import check_halves

METHODS = (
    "on_start", "on_epoch_start", "on_step_end", "on_epoch_end", "on_validation_end", "on_checkpoint", "on_end",
    "on_gradients",
)  # fmt: skip


class Hooks:
    """All hooks of a run, called in the order of the config, on every rank. hooks: by key, `hook.NAME`.

    Raises PluginError for one without any method of a hook, with one that nobody calls, or with half a state.
    """

    def __init__(self, hooks: Mapping[str, Any]) -> None:
        self._hooks = dict(hooks)
        for key, hook in self._hooks.items():
            _check(key, hook)
        self._calls = {name: [_method(hook, name) for hook in self._hooks.values()] for name in METHODS}
        self._calls = {name: [call for call in calls if call] for name, calls in self._calls.items()}
        self.on_gradients = self._calls["on_gradients"]  # called by `Components.update`

    def on_start(self, run: Any, state: Any) -> None:
        """Ahead of the first step of every session; `state` is a fresh one, or that of a checkpoint."""
        self._call("on_start", run, state)

    def before_step(self, run: Any, state: Any) -> None:
        if self._hooks and state.batches == 0:
            self._call("on_epoch_start", run, state)

    def after_step(self, run: Any, state: Any) -> None:
        """An epoch ends ahead of the validation and the checkpoint that are due there."""
        if self._hooks:
            self._call("on_step_end", run, state)
            if state.batches == 0:
                self._call("on_epoch_end", run, state)

    def on_validation_end(self, run: Any, state: Any, metrics: Mapping[str, float]) -> None:
        self._call("on_validation_end", run, state, metrics)

    def on_checkpoint(self, run: Any, state: Any) -> None:
        """Just before everything is saved."""
        self._call("on_checkpoint", run, state)

    def on_end(self, run: Any, state: Any) -> None:
        self._call("on_end", run, state)

    def _call(self, name: str, *arguments: Any) -> None:
        if calls := self._calls[name]:
            with arguments[0].phases.on(HOOKS):
                for method in calls:
                    method(*arguments)

    def state_dict(self) -> dict[str, Any]:
        """The states of the hooks that have one, by key; an empty one is none."""
        states = {key: hook.state_dict() for key, hook in self._hooks.items() if isinstance(hook, KeepsState)}
        return {key: state for key, state in states.items() if state}

    def load_state_dict(self, place: str, states: Mapping[str, Any]) -> None:
        """Tensors come on the CPU. A hook without a stored state begins as new. Raises CheckpointError."""
        for key, state in states.items():
            hook = self._hooks.get(key)
            if not isinstance(hook, KeepsState):
                raise CheckpointError(
                    f"checkpoint {place}: holds the state of {key}, and there is no such hook with a "
                    "load_state_dict(state); use that of before"
                )
            hook.load_state_dict(state)


def _check(key: str, hook: Any) -> None:
    kind = type(hook).__name__
    named = [name for name in dir(hook) if name.startswith("on_") and callable(getattr(hook, name))]
    if wrong := [name for name in named if name not in METHODS]:
        near = difflib.get_close_matches(wrong[0], METHODS, n=1, cutoff=0)[0]
        raise PluginError(
            f"{key}: {kind}.{wrong[0]} is never called; did you mean {near}? A hook has {', '.join(METHODS)}"
        )
    if not named:
        raise PluginError(f"{key}: {kind} has none of the methods of a hook: {', '.join(METHODS)}")
    check_halves(hook, key)


def _method(hook: Any, name: str) -> Any:
    found = getattr(hook, name, None)
    return found if callable(found) else None
