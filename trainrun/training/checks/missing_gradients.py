"""After the first step and at the first log point: parameters that nothing trains are named.

what: a parameter that requires a gradient belongs to an optimizer and gets a gradient. A parameter that came into the
    model in the first forward is refused; one that the optimizer was built without, or that got no gradient on a rank
    until the first log point, is told once.
when: runs with code of the user's own. Cost: nothing after the first log point.
"""

from __future__ import annotations

from typing import Any

from trainrun.output import short_list


class WatchGradients:
    """A look at the first steps of a session, up to the first log point. run: `Components`."""

    def __init__(self, run: Any) -> None:
        self._run, self._steps = run, 0
        self._without_optimizer: list[str] = []

    def after_step(self, log: bool) -> bool:
        """Return whether all has been seen."""
        self._steps += 1
        if self._steps == 1:
            self._check_optimizers()
        if log:
            self._tell_without_gradient()
        return log

    def _check_optimizers(self) -> None:
        run = self._run
        run.trained.check()
        self._without_optimizer = run.trained.without_optimizer()
        if self._without_optimizer:
            names = short_list(self._without_optimizer)
            run.monitors.note(
                f"model: no optimizer has {names}, so nothing trains them; if that is meant, set requires_grad=False"
            )

    def _tell_without_gradient(self) -> None:
        run = self._run
        if not run.precision.had_gradient:  # a step of one graph shows no gradients
            return
        names = [
            name
            for name, param in run.model.named_parameters()
            if param.requires_grad
            and param not in run.precision.had_gradient
            and name not in self._without_optimizer
        ]
        by_rank = run.parallel.gather(names)
        steps = "the first step" if self._steps == 1 else f"the first {self._steps} steps"
        if any(each != by_rank[0] for each in by_rank):
            message = "; ".join(
                f"on rank {rank} {short_list(each)}" for rank, each in enumerate(by_rank) if each
            )
        else:
            message = short_list(names)
        if message:
            run.monitors.note(
                f"model: no gradient in {steps} for {message}: the loss does not depend on them; leave them out of the "
                "model, or use them in its forward"
            )
