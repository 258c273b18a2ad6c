"""Run an action on one rank or on all ranks, so that its result, or its fault, is the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainrun.errors import CheckpointError, SaveError
from trainrun.interfaces import Parallel

Answer = tuple[Any, str, bool]  # a plain result, or the text of a fault and whether it is a SaveError


def on_rank_zero(parallel: Parallel, action: Callable[[], Any]) -> Any:
    """Return the plain result of an action that only rank 0 runs, on every rank. Its fault is raised on every rank."""
    answer: Answer = None, "", False
    fault: Exception | None = None
    if parallel.rank == 0:
        answer, fault = _try(action)
    result, text, is_save_error = parallel.gather(answer)[0]
    if text:
        raise fault or (SaveError if is_save_error else CheckpointError)(text)
    return result


def on_every_rank(parallel: Parallel, action: Callable[[], Any]) -> list[Any]:
    """Return the plain results of all ranks, on every rank. The first fault is raised on every rank."""
    answer, fault = _try(action)
    answers = parallel.gather(answer)
    for rank, (_, text, is_save_error) in enumerate(answers):
        if text:
            raise fault or (SaveError if is_save_error else CheckpointError)(f"rank {rank}: {text}")
    return [result for result, _, _ in answers]


def _try(action: Callable[[], Any]) -> tuple[Answer, Exception | None]:
    try:
        return (action(), "", False), None
    except CheckpointError as error:
        return (None, str(error), isinstance(error, SaveError)), error
    except Exception as error:  # a bug, raised again on this rank: the other ranks must not wait for it
        return (None, f"{type(error).__name__}: {error}", False), error
