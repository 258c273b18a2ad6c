"""Says which lines make the host wait for the GPU in the middle of a step (`monitor.sync_debug=true`).

what: torch warns at each operation of a step that waits; the innermost line of the user's own code behind it is
    told once, and counted. Log points, validations and checkpoints, where the runner waits on purpose, are left out,
    and so is what happens while a batch is made.
when: a GPU is busy less than it could be.
when not: on a CPU nothing is waited for; the warnings cost time, so not in a run that is to be fast.
source: torch.cuda.set_sync_debug_mode
gain: what each of the lines costs; not measured
"""

from __future__ import annotations

import linecache
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainrun.interfaces import MicroBatch, StepReport
from trainrun.training.checks.first_step import Checked
from trainrun.training.components import Components, Step

WARNING = "synchronizing CUDA operation"  # of torch (1.10 to 2.13)
OF_THE_SWITCH = "Synchronization debug mode is a prototype"  # said once, when it is first set
DUMMY = threading._DummyThread  # of a thread that Python did not start
OUR_FOLDER, TORCH_FOLDER = Path(__file__).parents[1], Path(torch.__file__).parent


class Watched:
    """Makes a step as `step` does. note: told a line when it waits for the first time."""

    def __init__(
        self,
        step: Step,
        note: Callable[[str], None],
        set_mode: Callable[[str], None] = torch.cuda.set_sync_debug_mode,
    ) -> None:
        self._step, self._note, self._set_mode = step, note, set_mode
        self._show: Callable[..., None] = warnings.showwarning
        self._thread = 0
        self.found: Counter[str] = Counter()

    def __call__(self, run: Components, micro_batches: list[MicroBatch]) -> StepReport:
        with warnings.catch_warnings():
            self._show, self._thread = warnings.showwarning, threading.get_ident()
            warnings.showwarning = self._heard  # type: ignore[assignment]
            warnings.filterwarnings("always", f".*{WARNING}")
            warnings.filterwarnings("ignore", OF_THE_SWITCH)
            self._set_mode("warn")
            try:
                return self._step(run, micro_batches)
            finally:
                self._set_mode("default")

    def _heard(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if WARNING not in str(message):
            self._show(message, category, filename, lineno, *rest)
            return
        if threading.get_ident() != self._thread and not isinstance(threading.current_thread(), DUMMY):
            return  # a batch is made during the step; the backward's threads are torch's
        place, text = waiting_line(traceback.extract_stack())
        self.found[place] += 1
        if self.found[place] == 1:
            self._note(f"{place} makes the host wait for the GPU: {text}")


def waiting_line(stack: traceback.StackSummary) -> tuple[str, str]:
    """`my_net.py:14` and its text: the innermost frame of the step that is the user's own, else of ours."""
    ours = [
        number for number, frame in enumerate(stack) if (frame.filename, frame.name) == (__file__, "__call__")
    ]
    skipped = (TORCH_FOLDER, Path(__file__), Path(warnings.__file__))
    begin = ours[-1] + 1 if ours else 0
    step = [frame for frame in stack[begin:] if not any(inside(frame.filename, path) for path in skipped)]
    own = [frame for frame in step if not inside(frame.filename, OUR_FOLDER)]
    frame = (own or step)[-1]
    return f"{frame.filename}:{frame.lineno}", linecache.getline(frame.filename, frame.lineno or 0).strip()


def inside(filename: str, place: Path) -> bool:
    return Path(filename).is_relative_to(place)


def hidden_syncs(step: Any) -> dict[str, Any]:
    """What made the host wait, where the step was watched."""
    step = step.inner if isinstance(step, Checked) else step
    return {"hidden_syncs": dict(step.found.most_common())} if isinstance(step, Watched) else {}
