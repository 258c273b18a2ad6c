"""One rank of a run: builds, resumes, trains, and writes down how it ended.

`python -m trainrun.rank RUN_DIR ATTEMPT` is what the launcher starts; a run on one device calls
`train_here` in its own process.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainrun import loop
from trainrun.build.backends import kept_backends
from trainrun.build.listeners import Listeners
from trainrun.build.parts import Site, build_parts
from trainrun.build.resumption import first_state, note_commit
from trainrun.checkpoint.manifest import committed_steps
from trainrun.config import RunConfig
from trainrun.device_times import times_of
from trainrun.errors import (
    EXIT_FAILED,
    DataError,
    PluginError,
    TrainingError,
)
from trainrun.finish import finish
from trainrun.instantiate import build, locate
from trainrun.interfaces import Parallel
from trainrun.ledger import OTHER, RANKS, Ledger, Session, process_start
from trainrun.mishaps.nonfinite import RollBack
from trainrun.mishaps.retry import ONE_SAMPLE, no_memory
from trainrun.monitor.hardware import forget_peak
from trainrun.output import complain
from trainrun.parallel.devices import choose_device
from trainrun.parallel.external import external_ranks
from trainrun.parallel.rank import LostContact, report_failure
from trainrun.parallel.single import Single
from trainrun.parts import Parts
from trainrun.process.collector import collect_as_usual, collect_between_steps, kept_collector
from trainrun.process.signals import StopFlag
from trainrun.process.streams import guard_streams
from trainrun.process.watchdog import Hung, Watchdog
from trainrun.randomness import derive_seed, seed_everything
from trainrun.rundir import RunDir, check_there, read_identity, read_json, write_identity
from trainrun.runlock import take_over
from trainrun.start.audition import choose_engine
from trainrun.start.freed_memory import FreedMemory
from trainrun.start.rehearsal import check_monitors
from trainrun.start.settle import Chosen, chosen_before
from trainrun.start.stage import Stage
from trainrun.start.threads import choose_threads
from trainrun.state import TrainState
from trainrun.status import end_process, leave_now
from trainrun.transform.compile import broken_library
from trainrun.without_dynamo import unloaded_compiler
from trainrun.words.compose import load_config

# of a loss with another shape than its gradient
OF_LOSS = re.compile(r"Mismatch in shape: grad_output|invalid gradient at index 0 - got \[\]")
# of torch's linear and convolution layers
WHOLE_INPUTS = re.compile(
    r"got (Byte|Char|Short|Int|Long) and |Input type \((unsigned char|torch.*ByteTensor)\)"
)
# of torch's embeddings
ASSERTED = "device-side assert"  # of a kernel; the device is lost to the process with it
FRACTIONS = re.compile(r"argument #1 'indices' to have one of the following scalar types: Long, Int; but got")


def train_here(run: RunDir, config: RunConfig, resume: bool, flag: StopFlag, began: float) -> int:
    """A run on one device, in this process. Returns the exit code."""
    device = choose_device(config.parallel.accelerator, local_rank=0)
    return train(run, config, resume, Single(device), flag, Ledger(began))


def train(
    run: RunDir, config: RunConfig, resume: bool, parallel: Parallel, flag: StopFlag, ledger: Ledger
) -> int:
    """What every rank does; after a step that sends the run back to a checkpoint, as a resume would do it."""
    back: RollBack | None = None
    while True:
        try:
            return train_once(run, config, resume or back is not None, parallel, flag, ledger, back)
        except RollBack as error:
            back = error.with_traceback(None)  # or its frames would hold the parts from before
        except Hung as error:
            raise TrainingError(str(error)) from error


def train_once(
    run: RunDir, config: RunConfig, resume: bool, parallel: Parallel, flag: StopFlag, ledger: Ledger,
    back: RollBack | None,
) -> int:  # fmt: skip
    """Raises TrainrunError for what a user can mend."""
    assert config.seed is not None
    leader = parallel.rank == 0
    others = [run.stacks(rank) for rank in range(parallel.world_size) if rank != parallel.rank]
    with contextlib.ExitStack() as closing:
        watchdog = closing.enter_context(
            Watchdog(config.trainer.watchdog_seconds, ledger, flag, run.stacks(parallel.rank), others,
                     lambda text, account: end_hung(run, config, parallel, text, account))
        )  # fmt: skip
        device_times = times_of(parallel.device.type)
        listeners = Listeners(run, config, ledger, device_times) if leader else None
        if listeners is not None:
            closing.callback(listeners.close)
        closing.enter_context(kept_backends())
        closing.enter_context(kept_collector())
        if config.trainer.compile.scope in ("off", "auto"):  # auto is off, as a rule
            closing.enter_context(unloaded_compiler())
        seed_everything(derive_seed(config.seed))  # the same first weights on every rank
        identity = read_identity(run)
        goes_on = resume and bool(committed_steps(run.checkpoints))
        begin = None if goes_on else config.init_from
        site = site_of(run, identity, parallel, flag, listeners, begin)
        site = replace(
            site, ledger=ledger, measures=not resume, is_new=not goes_on, device_times=device_times
        )
        parts, facts = build_parts(config, site)
        closing.push(lambda kind, error, trace: end_save(parts, kind))
        if parts.config.trainer.compile.scope in ("model", "regional"):
            closing.callback(parts.compile_log.listen())
        for stream in (parts.train, parts.val, parts.test):
            if stream is not None:
                closing.callback(stream.close)
        check_monitors(parts)
        recorded = identity.get("num_threads", torch.get_num_threads() if resume else None)
        facts = replace(facts, choices=(*facts.choices, *chosen_here(parts, recorded, site)))
        seed_everything(derive_seed(config.seed, 1 + parallel.rank))  # dropout differs from rank to rank
        if flag.raised:  # and swallowed by foreign code
            raise KeyboardInterrupt
        flag.training = True
        state = first_state(parts, run, config, resume, back)
        if listeners is not None:
            run.config_before.unlink(missing_ok=True)  # the words of a resume hold from here on
            note_choices(run, parts, site.chosen)
            listeners.attach(parts, state)
        collect_as_usual()
        if config.trainer.python_gc == "between_steps":
            collect_between_steps()
        parts.cadence.start(state)
        parts.checkpoints.start(parts, state)
        parts.board.on_start(facts, state)
        before = state.step, state.items
        forget_peak(parallel.device)
        watchdog.begin(parts)
        parts.task_calls.start(state)
        if not config.loop:  # or nobody would say that a step was made
            trainer = parts.config.trainer
            in_graph = trainer.cuda_graphs or trainer.compile.scope == "step"
            parts.task_calls.watch(trainer.accumulate_grad_batches > 1, in_graph, parts.board.note)
        state = run_loop(parts, state)
        parts.task_calls.unwatch()
        watchdog.rest()
        on_device = device_times.read() if device_times is not None else {}
        session = Session(state.step - before[0], state.items - before[1], parts.ledger.read(), on_device)
        return finish(parts, state, run, listeners, facts, session)


def chosen_here(parts: Parts, recorded: int | None, site: Site) -> list[str]:
    """What this process chooses for itself once all parts are there, in a line each. recorded: threads, of before."""
    memory = FreedMemory(parts)
    with Stage(parts) as stage:
        with site.spent.more():
            lines = [choose_threads(parts, recorded, stage)]
        lines += [choose_engine(parts, stage, site.spent.seconds), *memory.lines()]
    return [line for line in lines if line]


def site_of(
    run: RunDir, identity: dict[str, Any], parallel: Parallel, flag: StopFlag, listeners: Listeners | None,
    init_from: str | None,
) -> Site:  # fmt: skip
    site = Site(
        run, identity["run_id"], parallel, flag, [], init_from=init_from, chosen=chosen_before(identity)
    )
    if listeners is None:
        return site

    def before_commit() -> None:
        assert listeners is not None
        check_there(run)
        listeners.flush()
        note_commit(run)

    return replace(
        site, monitors=listeners.monitors, on_position=listeners.on_position, on_log=listeners.on_log,
        before_commit=before_commit,
    )  # fmt: skip


def end_hung(run: RunDir, config: RunConfig, parallel: Parallel, text: str, account: int) -> None:
    """Report that a rank hangs, and end its process.

    A rank that waits for others reports lost contact, which counts less than their own reports. A run without a
    launcher of ours also records its own end.
    """
    if parallel.world_size > 1:
        report_failure(run, parallel.rank, LostContact(text) if account == RANKS else TrainingError(text))
    if parallel.world_size == 1 or (parallel.rank == 0 and external_ranks()):
        leave_now(run, config, "failed", EXIT_FAILED, text)
    end_process(EXIT_FAILED)


def end_save(parts: Parts, kind: type[BaseException] | None) -> bool:
    """A checkpoint that is being written when the run fails is still finished; a second Ctrl-C waits for nothing."""
    if kind is RollBack:  # all ranks are here: what was begun or kept in memory is the newest checkpoint
        parts.checkpoints.close()
    elif kind is not None and not issubclass(kind, KeyboardInterrupt):
        parts.checkpoints.leave()
    return False  # the exception goes on


def note_choices(run: RunDir, parts: Parts, chosen: Chosen) -> None:
    """What was chosen by a clock, for a resume; what the data said of itself, for `load_model`, which builds without
    it."""
    facts = parts.data_facts
    told = {"shape": facts.shape and list(facts.shape), "num_classes": facts.num_classes}
    threads = {"num_threads": torch.get_num_threads()} if parts.config.trainer.num_threads == "auto" else {}
    write_identity(run, read_identity(run) | {"data": told} | threads | chosen)


def run_loop(parts: Parts, state: TrainState) -> TrainState:
    """Our loop or the user's, with an out-of-memory error turned into advice."""
    fit: Callable[[Parts, TrainState], TrainState] = loop.fit
    node = parts.config.loop
    if node:
        found = build(node, "loop") if len(node) > 1 else locate(node["_target_"], "loop")
        if not callable(found):
            raise PluginError(
                f"loop._target_={node['_target_']}: must be a function (Parts, TrainState) -> TrainState"
            )
        fit = found
    parts.ledger.open(OTHER)  # ours books at once; one that does not is no start-up
    try:
        return fit(parts, state)
    except (MemoryError, RuntimeError) as error:
        if told := no_memory(error):
            raise TrainingError(advice(parts, told)) from error
        if told := broken_library(error):
            raise TrainingError(told) from error
        if ASSERTED in str(error):
            raise TrainingError(
                f"at step {state.step + 1} or just before: an index was out of range on the GPU, as a label or a "
                "token that the model has no class or row for; the same command with parallel.accelerator=cpu "
                "names its value, and with CUDA_LAUNCH_BLOCKING=1 in the environment the error has the right line"
            ) from error
        if OF_LOSS.search(str(error)):  # whose first shape was right
            raise PluginError(
                f"task: at step {state.step + 1} {type(parts.task).__name__}.step() gave a loss that is not 0-d; it "
                f"must be the sum over the batch ({str(error).partition('.')[0]})"
            ) from error
        if FRACTIONS.search(str(error)):
            raise DataError(
                f"data: the inputs are fractions, but the model reads tokens, whole numbers ({error}); for text: "
                "data=text task=language_modeling"
            ) from error
        if WHOLE_INPUTS.search(str(error)):
            raise DataError(
                f"data: the inputs are whole numbers, but the model computes with fractions ({error}); "
                "convert them where they are read, as x.float() / 255"
            ) from error
        raise
    except AttributeError as error:
        if error.name not in ("loss_sum", "sums", "count"):
            raise
        raise PluginError(
            f"task: {type(parts.task).__name__}.step() gave a {type(error.obj).__name__}; it must return "
            "trainrun.interfaces.StepOutput(loss_sum, {...})"
        ) from error


def advice(parts: Parts, text: str) -> str:
    """What to do where memory ended. text: what the allocator said, and why the window did not run again."""
    batch = parts.config.data.batch_size
    accumulate = parts.config.trainer.accumulate_grad_batches
    if parts.retry.refusal:
        text += f"; not run again in smaller micro-batches: {parts.retry.refusal}"
    if batch == 1 or ONE_SAMPLE in text:
        return f"out of memory with data.batch_size={batch}: {text}. A smaller model, or preset=memory-limited, may fit"
    return (
        f"out of memory with data.batch_size={batch}: {text}. The same training in less memory: "
        f"data.batch_size={batch // 2} trainer.accumulate_grad_batches={accumulate * 2}"
    )


def main(argv: list[str]) -> int:
    """The entry of a rank that the launcher started."""
    from trainrun.parallel.worker import run_as_rank

    guard_streams()
    sys.excepthook = complain
    take_over()
    run = RunDir(Path(argv[0]))
    attempt = int(argv[1])
    job = read_json(run.job)
    sys.path += [path for path in job["paths"] if path not in sys.path]
    config = load_config(run.config, [])

    def work(parallel: Parallel, flag: StopFlag) -> int:
        return train(run, config, bool(job["resume"]) or attempt > 0, parallel, flag, Ledger(process_start()))

    return run_as_rank(run, config.parallel, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
