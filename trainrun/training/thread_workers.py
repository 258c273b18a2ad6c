"""`parallel=threads`: the workers of one process, each with a thread and a slice of every micro-batch.

What: forward and backward of a slice run in one thread, in copies of the modules that share the memory of the weights.
    The gradients are summed once, in the order of the workers, so every run has the same bits.
When: on a CPU, where kernels divide a batch badly among threads (convolutions, attention). When not: small steps, in
    which Python makes the workers wait for each other, and large dense layers.
Gain: see the table of threads, ranks and shards in the manual (measurements).

A loss is a sum over samples, so the gradients are those of one process, up to rounding. As on ranks of ddp, batch
norm computes statistics of a slice, and the buffers and attributes of the first worker are those of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.data.split_batch import count_rows, split_micro_batch
from trainrun.errors import PluginError
from trainrun.interfaces import KeepsState, MicroBatch, StepInfo
from trainrun.sums import add_flat_sums
from trainrun.timing.phases import PhaseTimer
from trainrun.training.components import Components
from trainrun.training.recovery.oom import describe_coupling, find_batch_norm
from trainrun.training.train_step import learn_batch
from trainrun.training.without_trace import NoTrial, run_trial

LEAST_SAMPLES = 2  # of a slice, which batch norm needs
FLAT_WEIGHTS = "_flat_weights"  # the parameters in torch's recurrent layers, as a list
OWN_OF_COPY = ("_parameters", "_buffers", "_modules", FLAT_WEIGHTS)
WAY_OUT = "use parallel=single or parallel=ddp"

Learned = tuple[Tensor, Any]  # a loss, and the items that only the output counts


class ThreadWorkers:
    """The workers of a run. The first one computes in the thread of the run, each other one in its own."""

    def __init__(self, count: int) -> None:
        self._workers = [SliceWorker(is_first=index == 0) for index in range(count)]
        self._pool: ThreadPoolExecutor | None = None
        self._is_checked = False

    def learn_slices(
        self, run: Components, batch: MicroBatch, divisor: float, sums: dict[str, Tensor]
    ) -> Learned:
        """Do the work of `learn_batch` with a slice of the micro-batch in each thread."""
        if not self._is_checked:
            self._is_checked = True
            check_slices(run, batch)
        most_slices = max(1, count_rows(batch.data) // LEAST_SAMPLES)
        slices = split_micro_batch(batch, min(len(self._workers), most_slices))
        workers = self._workers[: len(slices)]
        place = run.task_calls.place
        infos = place.build_slice_infos(len(slices)) if run.task_calls.informed else [None] * len(slices)
        parameters = list(run.model.parameters())
        gradients = [parameter.grad for parameter in parameters]  # of earlier micro-batches
        for parameter in parameters:
            parameter.grad = None
        random_state = torch.get_rng_state()
        works: list[Callable[[], Learned]] = [
            partial(worker.learn, worker.view_of(run), part, divisor, info)
            for worker, part, info in zip(workers, slices, infos, strict=True)
        ]
        learned = self._run_all(works)
        check_draws_and_parameters(random_state, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        add_gradients(parameters, workers)
        workers[0].return_attributes(run.model)
        for worker in workers:
            add_flat_sums(sums, worker.sums, run.task)
        return torch.stack([loss for loss, _ in learned]).sum(), sum(items for _, items in learned)

    def close(self) -> None:
        """End the threads. The next step starts them again."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _run_all(self, works: list[Callable[[], Learned]]) -> list[Learned]:
        """Return the results in the order of the workers. All of them have ended when an error is raised."""
        if self._pool is None:
            count = len(self._workers)
            self._pool = ThreadPoolExecutor(count, "trainrun worker", torch.set_num_threads, (1,))
        futures = [self._pool.submit(work) for work in works[1:]]
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread alone
        try:
            first = works[0]()
        finally:
            torch.set_num_threads(num_threads)
            for future in futures:
                future.exception()
        return [first, *[future.result() for future in futures]]


class SliceWorker:
    """The parameters and modules of a worker.

    parameters: by those of the model. Each shares the memory of the model's and has a gradient of its own. sums: the
    metric sums of the newest slice.
    """

    def __init__(self, is_first: bool) -> None:
        self.parameters: dict[nn.Parameter, nn.Parameter] = {}
        self.sums: dict[str, Tensor] = {}
        self._is_first = is_first
        self._copies: dict[nn.Module, nn.Module] = {}
        self._phases = PhaseTimer()  # of a thread whose time does not count

    def view_of(self, run: Components) -> Components:
        """Return the run with copies of all modules. They are made anew, because attributes may have changed."""
        self.parameters = {
            parameter: nn.Parameter(parameter.detach(), parameter.requires_grad)
            for parameter in run.model.parameters()
        }
        own_buffers = () if self._is_first else run.model.buffers()
        tensors: dict[Any, Any] = {buffer: buffer.detach().clone() for buffer in own_buffers}
        tensors |= self.parameters
        self._copies = {module: type(module).__new__(type(module)) for module in run.model.modules()}
        for module, copied in self._copies.items():
            attributes = copied.__dict__ = module.__dict__.copy()
            for name, parts in (("_parameters", tensors), ("_buffers", tensors), ("_modules", self._copies)):
                attributes[name] = {key: parts.get(value, value) for key, value in attributes[name].items()}
            if FLAT_WEIGHTS in attributes:
                attributes[FLAT_WEIGHTS] = [tensors.get(value, value) for value in attributes[FLAT_WEIGHTS]]
        self.sums = {}
        model, phases = self._copies[run.model], run.phases if self._is_first else self._phases
        return replace(run, wrapped=model, model=model, phases=phases)

    def learn(self, view: Components, part: MicroBatch, divisor: float, info: StepInfo | None) -> Learned:
        """Run forward and backward of a slice in the current thread. info: for the task's step, if it takes one."""
        of_thread = view.task_calls.place.of_thread
        of_thread.info = info
        try:
            return learn_batch(view, part, divisor, self.sums)
        finally:
            of_thread.info = None

    def return_attributes(self, model: nn.Module) -> None:
        """Give the modules of the model the attributes and buffers that the forward has set in their copies."""
        for module, copied in self._copies.items():
            attributes = module.__dict__
            for name, value in copied.__dict__.items():
                if attributes.get(name) is not value and name not in OWN_OF_COPY:
                    attributes[name] = value
            module._buffers.update(copied._buffers)


def check_slices(run: Components, batch: MicroBatch) -> None:
    """Raise PluginError if the losses of slices do not add up, or if the threads would share state of the task."""
    name = type(run.task).__name__
    if isinstance(run.task, KeepsState) and run.task.state_dict():
        raise PluginError(f"parallel=threads: {name} keeps state, which all threads would change; {WAY_OUT}")
    try:
        work = partial(describe_coupling, run.model, run.task, [batch])
        reason = run_trial(work, run.parallel.device, run.model, run.task)
    except ValueError as error:
        reason = str(error)
    except NoTrial:
        reason = ""
    if reason:
        raise PluginError(f"parallel=threads: a micro-batch cannot be cut: {reason}; {WAY_OUT}")
    if layer := find_batch_norm(run.model):
        run.monitors.note(
            f"parallel=threads: batch norm ({layer}) computes statistics of a slice, as on ranks of parallel=ddp"
        )


def check_draws_and_parameters(random_state: Tensor, parameters: list[nn.Parameter]) -> None:
    """Raise PluginError if a forward has drawn random numbers, or has used the parameters of the model itself."""
    if not torch.equal(random_state, torch.get_rng_state()):
        raise PluginError(
            "parallel=threads: a forward draws from torch's global generator, as dropout does, and threads draw in no "
            f"fixed order; set the dropout to 0, or {WAY_OUT}"
        )
    if any(parameter.grad is not None for parameter in parameters):
        raise PluginError(
            "parallel=threads: a forward uses the modules of the model and not the copy that step(model, batch) "
            f"receives, as a replaced `forward` or a model kept by the task does; {WAY_OUT}"
        )


def add_gradients(parameters: list[nn.Parameter], workers: list[SliceWorker]) -> None:
    """Add the gradients of the workers to those of the model, in the order of the workers."""
    totals = [workers[0].parameters[parameter].grad for parameter in parameters]
    for worker in workers[1:]:
        add_lists(totals, [worker.parameters[parameter].grad for parameter in parameters])
    hooks = "_backward_hooks", "_post_accumulate_grad_hooks"
    if any(getattr(parameter, name, None) for parameter in parameters for name in hooks):
        given = [index for index, total in enumerate(totals) if total is not None]
        # a hook sees the gradient of the whole micro-batch, once
        torch.autograd.backward([parameters[index] for index in given], [totals[index] for index in given])
        return
    sums = [parameter.grad for parameter in parameters]
    add_lists(sums, totals)
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient


def add_lists(totals: list[Tensor | None], gradients: list[Tensor | None]) -> None:
    """Add gradients to the totals, in place. A place without a total takes the gradient."""
    for index, (total, gradient) in enumerate(zip(totals, gradients, strict=True)):
        if total is None or gradient is None:
            totals[index] = gradient if total is None else total
        elif total.is_sparse or gradient.is_sparse:
            totals[index] = total + gradient
        else:
            total.add_(gradient)
