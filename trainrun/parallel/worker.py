"""The frame around everything a rank does: it meets the others, works, and leaves a word if it dies."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import Parallel
from trainrun.parallel.ddp import Ddp
from trainrun.parallel.devices import choose_device
from trainrun.parallel.group import init_group
from trainrun.parallel.rank_place import die_with_parent, run_rank, say_listening, show_stacks_when_asked
from trainrun.runtime.signals import StopFlag, catch_signals

Work = Callable[[Parallel, StopFlag], int]


class Options(Protocol):
    """What is read of the config's section `parallel`."""

    @property
    def mode(self) -> str: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def devices(self) -> Any: ...
    @property
    def sync_batchnorm(self) -> bool: ...
    @property
    def find_unused_parameters(self) -> bool: ...
    @property
    def static_graph(self) -> bool: ...
    @property
    def gradient_as_bucket_view(self) -> bool: ...
    @property
    def bucket_cap_mb(self) -> float: ...
    @property
    def timeout_seconds(self) -> float: ...


def run_as_rank(
    run_dir: RunDir,
    options: Options,
    work: Work,
    store: Store | None = None,
    deadline: AbstractContextManager[None] | None = None,
) -> int:
    """Run one rank from start to end. Return its exit code; never raise an Exception.

    store: where the ranks meet, from `handshake`, if torchrun started them. deadline: a context around the work that
    limits
    the time of a stop, if no driver of trainrun does.
    """
    die_with_parent()
    flag = StopFlag()

    def whole() -> int:
        parallel = build_ddp(options, store)
        code = work(parallel, flag)
        parallel.close()  # not after a failure: it could wait for ranks that are gone
        return code

    with catch_signals(flag), deadline or nullcontext():
        if store is None:  # else nobody of ours started this rank
            show_stacks_when_asked()
            say_listening()
        return run_rank(run_dir, int(os.environ["RANK"]), whole)


def build_ddp(options: Options, store: Store | None) -> Ddp:
    device = choose_device(
        options.accelerator, int(os.environ["LOCAL_RANK"]), options.mode, store is not None, options.devices
    )
    return Ddp(
        init_group(device, options.timeout_seconds, store),
        sync_batchnorm=options.sync_batchnorm,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        bucket_cap_mb=options.bucket_cap_mb,
    )
