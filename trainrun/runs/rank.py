"""One rank of a run: build, resume, train, and record how it ended.

The launcher starts `python -m trainrun.runs.rank_process RUN_DIR ATTEMPT`; a run on one device calls
`train_in_this_process`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from trainrun.assemble.assemble import RunContext, build_components
from trainrun.assemble.backends import restore_backends
from trainrun.assemble.monitors import RunMonitors
from trainrun.assemble.resumption import find_checkpoint, load_or_create_state
from trainrun.assemble.run_plan import collect_batch_sizes, keep_global_batch
from trainrun.assemble.start_choices import Chosen, read_earlier_choices, set_allocator_rule
from trainrun.assemble.unread_settings import check_settings_are_read
from trainrun.checkpoint.files import format_folder_name, list_committed_steps
from trainrun.checkpoint.load import read_start_position
from trainrun.config.schema import RunConfig, stop_recording_reads
from trainrun.errors import (
    EXIT_AGAIN,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    CheckpointError,
    ConfigError,
    DataError,
    LostContact,
    PluginError,
    TrainingError,
    TrainrunError,
)
from trainrun.folder.run_folder import (
    LaunchSpec,
    RunDir,
    check_folder_exists,
    prepare_commit,
    read_identity,
    record_checkpoints,
    write_identity,
)
from trainrun.folder.status import write_status
from trainrun.instantiate import build_node, import_satellite, import_target
from trainrun.interfaces import Parallel, RunFacts
from trainrun.optimizer.plain_step import avoid_compiler_import
from trainrun.parallel.devices import choose_device
from trainrun.parallel.flight_recorder import read_last_exchanges
from trainrun.parallel.single import Single
from trainrun.runs.failures import end_hung_rank, keep_overrides_if_accepted
from trainrun.runtime.collector import collect_between_steps, restore_collector, restore_usual_collection
from trainrun.runtime.machine import return_kept_memory
from trainrun.runtime.signals import StopFlag
from trainrun.runtime.watchdog import RunHung, Watchdog
from trainrun.seeding import derive_seed, seed_everything
from trainrun.timing.phases import (
    ACCOUNTS,
    CHECKPOINT,
    MEASURING,
    OTHER,
    PLOTS,
    RUNNER,
    PhaseTimer,
    Session,
)
from trainrun.train_state import SAVE_NOW, RollBack, StartPosition, TrainState
from trainrun.training import loop
from trainrun.training.checks.validation_trial import try_validation
from trainrun.training.components import Components
from trainrun.training.recovery.memory_report import write_memory_report
from trainrun.training.recovery.oom import ONE_SAMPLE, describe_out_of_memory
from trainrun.transform.compile import delete_truncated_library
from trainrun.user_code import format_error_with_line, is_built_in


def train_in_this_process(
    run_dir: RunDir, config: RunConfig, order: LaunchSpec, flag: StopFlag, began: float
) -> int:
    """Train a run on one device, in this process. Return the exit code."""
    device = choose_device(config.parallel.accelerator, devices=config.parallel.devices)
    return train_rank(run_dir, config, order, Single(device), flag, PhaseTimer(began))


def train_rank(
    run_dir: RunDir,
    config: RunConfig,
    order: LaunchSpec,
    parallel: Parallel,
    flag: StopFlag,
    phases: PhaseTimer,
) -> int:
    """Train on one rank and return the exit code. After a rollback to a checkpoint, start again as a resume does."""
    back: RollBack | None = None
    while True:
        try:
            return train_until_rollback(run_dir, config, order, parallel, flag, phases, back)
        except RollBack as error:
            back = error.with_traceback(None)  # or its frames would hold the parts from before
        except RunHung as error:
            raise TrainingError(str(error)) from error
        except SystemExit as error:
            raise TrainingError(f"sys.exit() in code of yours: {format_error_with_line(error)}") from error


def train_until_rollback(
    run_dir: RunDir, config: RunConfig, order: LaunchSpec, parallel: Parallel, flag: StopFlag, phases: PhaseTimer,
    back: RollBack | None,
) -> int:  # fmt: skip
    """Build the parts and train until the end or a rollback. Return the exit code. Raise TrainrunError."""
    is_resume = order.resume or back is not None
    with contextlib.ExitStack() as closing:
        watchdog = closing.enter_context(Watchdog(
            config.trainer.watchdog_seconds, phases, flag, run_dir.stacks(parallel.rank),
            lambda text, account: end_hung_rank(run_dir, config, parallel, text, account, read_last_exchanges()),
        ))  # fmt: skip
        listeners = RunMonitors(run_dir, config, phases) if parallel.rank == 0 else None
        if listeners is not None:
            closing.callback(listeners.close)
        enter_process_settings(closing, config)

        # build everything
        identity, has_checkpoint, start = read_run_facts(run_dir, config, is_resume, back, parallel)
        notes: list[str] = []
        if is_resume:
            earlier = identity.get("batch")
            config = keep_global_batch(config, earlier, parallel.world_size, config.typed, notes)
        assert config.seed is not None
        seed_everything(derive_seed(config.seed))  # the same first weights on every rank
        goes_on = is_resume and has_checkpoint
        init_from = None if goes_on and not config.checkpoint.adapter_only else config.init_from
        site = build_run_context(run_dir, identity, parallel, flag, listeners, init_from)
        site = replace(site, phases=phases, measures=not is_resume, is_new=not goes_on, start=start)
        run, facts = build_components(config, site)
        close_parts_at_end(closing, run)
        call_own_train_methods(run.model)
        allocator, lines = set_allocator_rule(run)
        if allocator == "keep":  # a notebook goes on after the run
            closing.callback(return_kept_memory)
        facts = replace(facts, choices=(*facts.choices, *lines))

        # load the state, and show where the run begins
        seed_everything(derive_seed(config.seed, 1 + parallel.rank))  # dropout differs from rank to rank
        state = load_start_state(run, run_dir, config, is_resume, back)
        for note in notes:
            run.monitors.note(note)
        if listeners is not None:
            if run_dir.config_before.exists():  # there are words of a resume
                closing.push(keep_overrides_if_accepted(run_dir, state))
            record_choices(run_dir, run, site.chosen)
            listeners.attach(run, state)
        restore_usual_collection()
        collect_between_steps()
        run.triggers.start(state, run.checkpoints.best)
        stop_recording_reads()
        check_settings_are_read(config, parallel)
        run.monitors.on_start(facts, state)
        if parallel.device.type == "cuda":  # what start-up trials took is no part of the training
            torch.cuda.reset_peak_memory_stats(parallel.device)

        # train
        steps_before, items_before = state.step, state.items
        watchdog.expect_progress(run)
        call_user_code_before_training(run, state)
        if flag.raised:  # and swallowed by foreign code
            raise KeyboardInterrupt
        flag.training = True
        state = run_loop(run, state)
        if state.ended_step != state.step:  # a signal stopped it, or the loop is the user's own
            run.hooks.on_end(run, state)
        watchdog.stop_expecting_progress()
        session = Session(state.step - steps_before, state.items - items_before, run.phases.read())
        return finish_training(run, state, run_dir, listeners, facts, session)


def enter_process_settings(closing: contextlib.ExitStack, config: RunConfig) -> None:
    """Restore the settings of torch and Python that a run changes when `closing` ends."""
    closing.enter_context(restore_backends())
    closing.enter_context(restore_collector())
    if config.trainer.compile.scope in ("off", "auto"):  # auto is off, as a rule
        closing.enter_context(avoid_compiler_import())


def close_parts_at_end(closing: contextlib.ExitStack, run: Components) -> None:
    """Close the streams of the run when `closing` ends; before that, finish a save in progress."""
    closing.push(lambda kind, error, trace: finish_save_at_failure(run, kind))
    if run.compile_log is not None and run.config.trainer.compile.scope in ("model", "regional"):
        closing.callback(run.compile_log.listen())
    for stream in (run.train, *run.splits().values()):
        closing.callback(stream.close)


def call_own_train_methods(model: nn.Module) -> None:
    """Call each `train` method of the user's own, which may also keep norms from training."""
    for module in model.modules():
        if type(module).train is not nn.Module.train:
            module.train(module.training)


def call_user_code_before_training(run: Components, state: TrainState) -> None:
    """Start the task and the hooks, and try the first validation."""
    run.task_calls.start(state)
    run.hooks.on_start(run, state)
    run.hooks.check_states()
    run.checkpoints.start(run, state)  # asks for the states of hooks
    if not run.config.loop:  # or nobody would say that a step was made
        run.task_calls.watch(run)
        try_validation(run)


def read_run_facts(
    run_dir: RunDir, config: RunConfig, resume: bool, back: RollBack | None, parallel: Parallel
) -> tuple[dict[str, Any], bool, StartPosition | None]:
    """Return RUN.json, whether the run has checkpoints, and where it continues. Only rank 0 reads folders."""
    facts = None
    if parallel.rank == 0:
        steps = list_committed_steps(run_dir.checkpoints)
        folder = run_dir.checkpoints / format_folder_name(steps[-1]) if steps and resume else None
        if folder is None and config.ckpt_path is not None:
            with contextlib.suppress(CheckpointError):  # the load reports it
                folder = find_checkpoint(config.ckpt_path)
        start = None if folder is None else read_start_position(folder)
        facts = read_identity(run_dir), bool(steps), start
    identity, has_checkpoint, start = parallel.gather(facts)[0]
    if start is not None and back is not None:
        samples = back.batches * config.data.batch_size * parallel.world_size
        start = StartPosition(start.step, back.epoch, samples)
    return identity, has_checkpoint, start


def load_start_state(
    run: Components, run_dir: RunDir, config: RunConfig, resume: bool, back: RollBack | None
) -> TrainState:
    """Return a new state, or the state of the checkpoint from which the run continues."""
    state = TrainState()
    if resume or config.ckpt_path is not None:
        state = load_or_create_state(run, run_dir, config, resume)
    if back is not None:
        back.apply(state)
    elif config.trainer.nan_policy == "rollback" and state.saved_step != state.step:
        state.save_request = SAVE_NOW  # so that there is a checkpoint from the first step on
    return state


def build_run_context(
    run_dir: RunDir, identity: dict[str, Any], parallel: Parallel, flag: StopFlag, listeners: RunMonitors | None,
    init_from: str | None,
) -> RunContext:  # fmt: skip
    chosen = read_earlier_choices(identity, training=True)
    site = RunContext(run_dir, identity["run_id"], parallel, flag, [], init_from=init_from, chosen=chosen)
    if listeners is None:
        return site

    return replace(
        site, monitors=listeners.monitors, on_position=listeners.on_position, on_log=listeners.on_log,
        before_commit=partial(prepare_commit, run_dir, listeners.sync_rows), write=listeners.bus.write,
    )  # fmt: skip


def finish_save_at_failure(run: Components, kind: type[BaseException] | None) -> bool:
    """Finish the save in progress when the run fails. Do not wait for it after Ctrl-C."""
    if kind is RollBack:  # all ranks are here: what was begun or kept in memory is the newest checkpoint
        run.checkpoints.close()
    elif kind is not None and not issubclass(kind, KeyboardInterrupt):
        run.checkpoints.finish_after_failure()
    return False  # the exception goes on


def record_choices(run_dir: RunDir, run: Components, chosen: Chosen) -> None:
    """Record in RUN.json the measured choices for a resume, and facts of the data for `load_model`."""
    facts = run.data_facts
    data_facts = {"shape": facts.shape and list(facts.shape), "num_classes": facts.num_classes}
    threads = {"num_threads": torch.get_num_threads()} if run.config.trainer.num_threads == "auto" else {}
    batch = collect_batch_sizes(run.config, run.parallel.world_size)
    facts_of_run = {"data": data_facts, "batch": batch} | chosen | threads
    write_identity(run_dir, read_identity(run_dir) | facts_of_run)


def run_loop(run: Components, state: TrainState) -> TrainState:
    """Run the training loop of trainrun or of the user. Raise an explained error if the cause of a failure is known."""
    fit: Callable[[Components, TrainState], TrainState] = loop.fit
    node = run.config.loop
    if node:
        own_loop = build_node(node, "loop") if len(node) > 1 else import_target(node["_target_"], "loop")
        if not callable(own_loop):
            raise PluginError(
                f"loop._target_={node['_target_']}: must be a function (Components, TrainState) -> TrainState"
            )
        fit = own_loop
    run.phases.open(OTHER)  # ours books at once; one that does not is no start-up
    try:
        return fit(run, state)
    except LostContact as error:
        error.step = state.step
        raise
    except (MemoryError, RuntimeError, AttributeError, TypeError, ValueError) as error:
        if (message := explain_error(run, state, error)) is not None:
            raise message from error
        raise


def finish_training(
    run: Components,
    state: TrainState,
    run_dir: RunDir,
    listeners: RunMonitors | None,
    facts: RunFacts,
    session: Session,
) -> int:
    """Save, evaluate, write the summary and the plots at the end of a training. Return the exit code."""
    run.phases.open(MEASURING)
    code = {2: EXIT_INTERRUPTED, 3: EXIT_AGAIN}.get(state.stop_request, EXIT_DONE)
    at_end = None
    if code == EXIT_DONE:
        at_end = import_satellite(
            "summary.at_end", "nothing is measured after the training", run.monitors.note
        )
    run.phases.open(CHECKPOINT)
    run.checkpoints.close()
    rows: list[dict[str, Any]] = []
    if at_end is not None and run.config.monitor.plots and run.config.monitor.metrics_file:
        run.phases.open(PLOTS)
        rows = at_end.prediction_rows(
            run, state, run_dir
        )  # of the best checkpoint, which is on the disk by now
    if listeners is None:
        return code
    check_folder_exists(run_dir)
    record_checkpoints(run_dir)
    run.phases.open(MEASURING)
    measured = at_end.measure_finished_run(run, state, run_dir, session) if at_end is not None else {}
    run.phases.open(RUNNER)
    summary = build_summary(run, state, facts) | measured | listeners.end_hardware()
    if faults := listeners.faults():
        summary["listener_faults"] = faults
    status = "done" if code == EXIT_DONE else "stopped"
    write_status(run_dir, run.config.run_name, state=status, exit_code=code, message="", **summary)
    listeners.end(summary, rows, stopped=code != EXIT_DONE)
    return code


def build_summary(run: Components, state: TrainState, facts: RunFacts) -> dict[str, Any]:
    """Return the summary of the training for the last row, `status.json` and the screen."""
    return {
        "reason": state.stop_reason,
        "monitor": run.triggers.best.metric,
        "mode": run.triggers.best.mode,
        "value": state.best_metric,
        "best_step": state.best_step if state.best_step >= 0 else None,
        "step": state.step,
        "epoch": run.monitors.compute_epoch(state),
        "seconds": state.seconds,
        **run.monitors.speeds(state.items * run.parallel.world_size / max(state.seconds, 1e-9)),
        "skipped_steps": state.skipped_steps,
        "num_parameters": facts.num_parameters,
        **({} if run.compile_log is None else run.compile_log.summary()),
        "metrics": {
            name: value for name, value in state.last_metrics.items() if not name.endswith("/seconds")
        },
    }


class KnownError(NamedTuple):
    """An error of torch with a known cause. pattern: matches its message. text: the advice, a format string."""

    pattern: str
    kind: type[TrainrunError]
    text: str


# Of torch's linear, convolution and recurrent layers; `scalar type Long` may also be said of a target.
WHOLE = r"(Bool|Byte|Char|Short|Int)"
WHOLE_INPUTS = (
    rf"got ({WHOLE}|Long) and |Input type \((bool|unsigned char|(short |long )?int|torch.*ByteTensor)\)"
    rf"|scalar type {WHOLE} but found |\"(batch_norm|slow_conv\w*)\" not implemented for '({WHOLE}|Long)"
    r"|RNN input dtype \(torch\.(bool|u?int)"
)
KNOWN_ERRORS = (
    KnownError(
        "device-side assert",  # of a kernel; the device is lost to the process with it
        TrainingError,
        "at step {step} or just before: an index was out of range on the GPU, as a label or a "
        "token that the model has no class or row for; the same command with parallel.accelerator=cpu "
        "names its value, and with CUDA_LAUNCH_BLOCKING=1 in the environment the error has the right line",
    ),
    KnownError(
        "does not currently support double backward",
        PluginError,
        "trainer.compile={scope}: {task}.step() differentiates a gradient "
        "(autograd.grad with create_graph=True), which torch.compile does not support; use trainer.compile=off",
    ),
    KnownError(  # of torch.nn.LSTM, which needs AVX512-FP16 or AMX for float16, and AVX-512 for bfloat16
        "could not create a primitive",
        ConfigError,
        "precision={mode}: torch has no kernel that trains a layer of this model in this number type on this CPU; "
        "use precision=32-true",
    ),
    KnownError(
        r"Function '\w+' returned nan values",
        TrainingError,
        "step {step}: {sentence} (trainer.detect_anomaly=true); torch's warning above "
        "shows where the forward pass called it",
    ),
    KnownError(  # of a loss with another shape than its gradient
        r"Mismatch in shape: grad_output|invalid gradient at index 0 - got \[\]",
        PluginError,
        "task: at step {step} {task}.step() returned a loss that is not 0-d; it must be the sum over the batch "
        "({sentence})",
    ),
    KnownError(  # of torch's embeddings
        "argument #1 'indices' to have one of the following scalar types: Long, Int; but got",
        DataError,
        "data: the inputs are fractions, but the model reads tokens, whole numbers ({error}); for text: "
        "data=text task=language_modeling",
    ),
    KnownError(
        "Expected more than 1 value per channel",
        DataError,
        "data: at step {step} a batch has one sample, but BatchNorm needs more than one; leave out "
        "such a last batch with data.drop_last=true (also at a resume), or use another data.batch_size",
    ),
    KnownError(
        WHOLE_INPUTS,
        DataError,
        "data: the inputs are whole numbers, but the model computes with fractions ({error}); scale pictures by "
        "data.augment.scale._target_=trainrun.data.augment.normalize.Normalize data.augment.scale.mean=0 "
        "data.augment.scale.std=1; convert other numbers where they are read, as x.float()",
    ),
)


def explain_error(run: Components, state: TrainState, error: Exception) -> TrainrunError | None:
    """Return an error with advice for a known cause; None for an unknown one."""
    if isinstance(error, RuntimeError) and (explained := run.parallel.explain_error(error)) is not None:
        return explained
    task, text = type(run.task).__name__, str(error)
    if isinstance(error, AttributeError):
        if error.name not in ("loss_sum", "sums", "count"):
            return None
        return PluginError(
            f"task: {task}.step() gave a {type(error.obj).__name__}; it must return "
            "trainrun.interfaces.StepOutput(loss_sum, {...})"
        )
    if fault := describe_out_of_memory(error):
        return TrainingError(explain_out_of_memory(run, fault) + report_memory(run))
    if "file too short" in text and (fault := delete_truncated_library(error)):
        return TrainingError(fault)
    if "must be Tensor, not dict" in text and is_built_in(run.model):
        return DataError(
            "data: a sample has several named inputs, but the model takes one tensor; choose inputs of one kind, as "
            "data.train.inputs=[a,b], or use a model whose forward takes the dict"
        )
    facts = {
        "step": state.step + 1,
        "task": task,
        "error": error,
        "sentence": text.partition(". ")[0].rstrip("."),
        "scope": run.config.trainer.compile.scope,
        "mode": run.config.precision.mode,
    }
    for known in KNOWN_ERRORS:
        if re.search(known.pattern, text):
            return known.kind(known.text.format(**facts))
    return None


def report_memory(run: Components) -> str:
    """Write which modules hold the memory, and return a line that names the file; "" if it cannot be written."""
    path = RunDir(run.checkpoints.folder.parent).memory_report(run.parallel.rank)
    optimizers = [named.optimizer for named in run.optimizers.values()] or [run.optimizer]
    phase = ACCOUNTS[run.phases.account]
    with contextlib.suppress(OSError):
        states = [optimizer.state for optimizer in optimizers]
        return f"; {write_memory_report(path, run.model, states, run.parallel.device, phase)}"
    return ""


def explain_out_of_memory(run: Components, text: str) -> str:
    """Return advice after an out-of-memory error. text: the message of the allocator."""
    batch = run.config.data.batch_size
    accumulate = run.config.trainer.accumulate_grad_batches
    if run.retry.refusal:
        text += f"; not repeated in smaller micro-batches: {run.retry.refusal}"
    if batch == 1 or ONE_SAMPLE in text:
        return f"out of memory with data.batch_size={batch}: {text}. A smaller model, or preset=memory-limited, may fit"
    return (
        f"out of memory with data.batch_size={batch}: {text}. The same training in less memory: "
        f"data.batch_size={batch // 2} trainer.accumulate_grad_batches={accumulate * 2}"
    )
