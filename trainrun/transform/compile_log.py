"""The cost of compilation: seconds, graphs, and how many graphs were compiled again for another shape or mode."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter
from typing import Any


class CompileLog:
    """A log of compilations.

    tell: receives one line for each finished graph. booked: returns a context manager that counts the time of a
        compilation.
    """

    def __init__(
        self, tell: Callable[[str], None], booked: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._tell, self._booked = tell, booked
        self._open = ExitStack()
        self._started = 0.0
        self.seconds = 0.0
        self.graphs = 0
        self.again = 0
        self.from_cache = 0
        self._cache_counts = (0, 0)

    def begin(self) -> None:
        self._open.enter_context(self._booked())
        self._cache_counts = count_cached_graphs()
        self._started = perf_counter()

    def end(self, what: str, again: bool) -> None:
        seconds = perf_counter() - self._started
        self._open.close()
        self.seconds += seconds
        self.graphs += 1
        self.again += again
        hits, misses = (
            now - before for now, before in zip(count_cached_graphs(), self._cache_counts, strict=True)
        )
        is_cached = hits > 0 and misses == 0
        self.from_cache += is_cached
        source = ", from the cache" if is_cached else ""
        self._tell(f"compile: {what} in {seconds:.1f} s{', once more' if again else ''}{source}")

    def listen(self) -> Callable[[], None]:
        """Record every graph that `torch.compile` makes in this process. Return a function that stops recording."""
        from torch._dynamo.callback import callback_handler

        def start(*_: Any) -> None:
            self.begin()

        def end(*args: Any) -> None:
            # its id is frame/number, and the number counts what was compiled of the same code before
            number = re.search(r"/(\d+)", str(args[0].compile_id)) if args else None
            self.end(f"graph {self.graphs + 1} of the model", again=bool(number and int(number[1])))

        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)

        def stop() -> None:
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)

        return stop

    def summary(self) -> dict[str, Any]:
        """Return the numbers for the summary of a run; {} if nothing was compiled."""
        if not self.graphs:
            return {}
        return {
            "compile_seconds": self.seconds, "compiled_graphs": self.graphs, "recompiles": self.again,
            "graphs_from_cache": self.from_cache,
        }  # fmt: skip


def count_cached_graphs() -> tuple[int, int]:
    """Return how many graphs inductor loaded from its cache in this process, and how many were missing there."""
    try:
        from torch._dynamo.utils import counters
    except ImportError:  # a later version of torch
        return 0, 0
    joint, single = counters["aot_autograd"], counters["inductor"]
    return joint["autograd_cache_hit"] + single["fxgraph_cache_hit"], single["fxgraph_cache_miss"]
