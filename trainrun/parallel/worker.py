"""The frame of a rank: it connects to the other ranks, runs the work, and reports a failure."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not marked so

from trainrun.config.schema import ParallelConfig
from trainrun.errors import EXIT_FAILED
from trainrun.folder.run_folder import RunDir
from trainrun.interfaces import Parallel
from trainrun.parallel.ddp import Ddp
from trainrun.parallel.devices import choose_device, is_started_by_launcher
from trainrun.parallel.group import init_group
from trainrun.parallel.handshake import describe_wait, explain_timeout, open_store
from trainrun.parallel.rank_place import exit_with_parent, format_ranks, print_stacks_at_sigquit, run_rank
from trainrun.runtime.signals import StopFlag, catch_signals

Work = Callable[[Parallel, StopFlag], int]


def run_as_rank(
    run_dir: RunDir,
    options: ParallelConfig,
    work: Work,
    store: Store | None = None,
    flag: StopFlag | None = None,
    deadline: AbstractContextManager[None] | None = None,
    end: Callable[[str], object] = lambda text: os._exit(EXIT_FAILED),
    sees_folder: bool = True,
) -> int:
    """Run one rank from start to end. Return its exit code; never raise an Exception.

    store: where the ranks meet, from `handshake`, if torchrun started them. deadline: a context around the work that
        limits the time of a stop. end: exits the process if the ranks do not meet in time; called with the reason.
        sees_folder: whether this rank sees the folder of the run; if not, `run_dir` is one of its machine.
    """
    exit_with_parent()
    print_stacks_at_sigquit()
    flag = flag or StopFlag(training=False)

    def run_work() -> int:
        parallel = connect(options, store, end, sees_folder)
        code = work(parallel, flag)
        parallel.close()  # not after a failure: it could wait for ranks that are gone
        return code

    with catch_signals(flag), deadline or nullcontext():
        return run_rank(run_dir, int(os.environ["RANK"]), run_work, flag)


def connect(
    options: ParallelConfig, store: Store | None, end: Callable[[str], object], sees_folder: bool = True
) -> Parallel:
    """Connect to the other ranks and return the backend. Call `end` if a rank does not connect in time."""
    with explain_timeout(options.meeting_seconds, "rank 0"):
        store = store or open_store(options.meeting_seconds)
        store.set(f"here/{os.environ['RANK']}", "")
        # a connection of its own, because that of the process group is blocked
        side: Store = store.clone()  # type: ignore[attr-defined]  # public, not in torch's stubs
    with limit_connect_time(options.meeting_seconds, lambda: describe_missing_ranks(side), end):
        return build_backend(options, store, sees_folder)


@contextmanager
def limit_connect_time(
    seconds: float, whom: Callable[[], str], end: Callable[[str], object]
) -> Iterator[None]:
    """Call `end` with one line, in a thread, if the block takes longer than `seconds`. Torch's timeout covers all
    exchanges. whom: returns the ranks for which this rank waits.
    """
    timer = threading.Timer(seconds, lambda: end(describe_wait(seconds, whom())))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe_missing_ranks(store: Store) -> str:
    """Return which ranks this rank waits for: the ranks that have not connected, else the connections to the other
    ranks.
    """
    try:
        ranks = range(int(os.environ["WORLD_SIZE"]))
        missing = [rank for rank in ranks if not store.check([f"here/{rank}"])]
    except RuntimeError:  # it hosts the store, and has ended
        return "rank 0"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the interface of this machine's name")
    return format_ranks(missing) if missing else f"connections to the other ranks over {interface}"


def build_backend(options: ParallelConfig, store: Store, sees_folder: bool) -> Parallel:
    """Create the process group, and return the backend of `parallel=`."""
    local_rank, external = int(os.environ["LOCAL_RANK"]), is_started_by_launcher()
    device = choose_device(options.accelerator, local_rank, options.mode, external, options.devices)
    group = init_group(device, options.timeout_seconds, store, sees_folder)
    if options.mode == "fsdp":
        from trainrun.parallel.fsdp import Fsdp  # 0.4 s of torch's that no other mode needs

        return Fsdp(
            group,
            reshard=options.reshard,
            replicate=options.replicate,
            blocks=options.blocks,
            offload=options.offload,
            meta_device=options.meta_device,
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
