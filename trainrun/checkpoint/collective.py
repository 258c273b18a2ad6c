"""How the ranks stay together when one of them has a fault: it is announced to all, then all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainrun.errors import CheckpointError, SaveError
from trainrun.interfaces import Parallel

Answer = tuple[Any, str, bool]  # a plain result, or a fault's text and whether it is a SaveError


def on_rank_zero(parallel: Parallel, action: Callable[[], Any]) -> Any:
    """The plain result of what rank 0 alone does, on every rank; its fault is every rank's fault."""
    answer: Answer = None, "", False
    fault: Exception | None = None
    if parallel.rank == 0:
        answer, fault = _try(action)
    result, text, unsaved = parallel.gather(answer)[0]
    if text:
        raise fault or (SaveError if unsaved else CheckpointError)(text)
    return result


def on_every_rank(parallel: Parallel, action: Callable[[], Any]) -> list[Any]:
    """The plain results of all ranks, on every rank; the first fault is every rank's fault."""
    answer, fault = _try(action)
    answers = parallel.gather(answer)
    for rank, (_, text, unsaved) in enumerate(answers):
        if text:
            raise fault or (SaveError if unsaved else CheckpointError)(f"rank {rank}: {text}")
    return [result for result, _, _ in answers]


def _try(action: Callable[[], Any]) -> tuple[Answer, Exception | None]:
    try:
        return (action(), "", False), None
    except CheckpointError as error:
        return (None, str(error), isinstance(error, SaveError)), error
    except Exception as error:  # a bug, raised again on this rank: the others must not wait for it
        return (None, f"{type(error).__name__}: {error}", False), error
