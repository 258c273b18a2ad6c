"""The frame of a rank: it connects to the other ranks, runs the work, and reports a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.config.schema import ParallelConfig
from trainrun.errors import EXIT_FAILED
from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import Parallel
from trainrun.parallel.ddp import Ddp
from trainrun.parallel.devices import choose_device
from trainrun.parallel.group import init_group
from trainrun.parallel.handshake import end_process_after
from trainrun.parallel.rank_place import (
    die_with_parent,
    format_ranks,
    listening_path,
    print_stacks_at_sigquit,
    report_listening,
    run_rank,
)
from trainrun.runtime.signals import StopFlag, catch_signals

Work = Callable[[Parallel, StopFlag], int]


def run_as_rank(
    run_dir: RunDir,
    options: ParallelConfig,
    work: Work,
    store: Store | None = None,
    flag: StopFlag | None = None,
    deadline: AbstractContextManager[None] | None = None,
    end: Callable[[str], object] | None = None,
) -> int:
    """Run one rank from start to end. Return its exit code; never raise an Exception.

    store: where the ranks meet, from `handshake`, if torchrun started them. deadline: a context around the work that
        limits the time of a stop. end: exits the process if the ranks do not meet in time; called with the reason.
    """
    die_with_parent()
    flag = flag or StopFlag(training=False)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    end = end or (lambda text: os._exit(EXIT_FAILED))

    def run_work() -> int:
        side = store and store.clone()  # type: ignore[attr-defined]  # public, not in torch's stubs
        with end_process_after(
            options.meeting_seconds, lambda: describe_missing_ranks(side, world_size), end
        ):
            parallel = build_backend(options, store)
        code = work(parallel, flag)
        parallel.close()  # not after a failure: it could wait for ranks that are gone
        return code

    with catch_signals(flag), deadline or nullcontext():
        if store is None:
            print_stacks_at_sigquit()
            report_listening()
        else:  # nobody of ours started this rank
            store.set(f"here/{rank}", "")
        return run_rank(run_dir, rank, run_work, flag)


def describe_missing_ranks(store: Store | None, world_size: int) -> str:
    """Return whom this rank waits for: the ranks that did not begin to connect, else the connections themselves.

    store: a connection of its own, because that of the process group is blocked.
    """
    if store is None:
        place = Path(os.environ["TRAINRUN_STORE"])
        missing = [rank for rank in range(world_size) if not listening_path(place, rank).exists()]
    else:
        try:
            missing = [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]
        except RuntimeError:  # it hosts the store, and has ended
            return "rank 0"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the interface of this machine's name")
    return format_ranks(missing) if missing else f"connections to the other ranks over {interface}"


def build_backend(options: ParallelConfig, store: Store | None) -> Parallel:
    """Connect to the other ranks, and return the backend of `parallel=`."""
    device = choose_device(
        options.accelerator, int(os.environ["LOCAL_RANK"]), options.mode, store is not None, options.devices
    )
    group = init_group(device, options.timeout_seconds, store)
    if options.mode == "fsdp":
        from trainrun.parallel.fsdp import Fsdp  # 0.4 s of torch's that no other mode needs

        return Fsdp(
            group,
            reshard=options.reshard,
            replicate=options.replicate,
            blocks=options.blocks,
            offload=options.offload,
        )
    return Ddp(
        group,
        sync_batchnorm=options.sync_batchnorm,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        bucket_cap_mb=options.bucket_cap_mb,
        compress=options.compress,
    )
