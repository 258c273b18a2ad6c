"""Errors of the loop whose cause is known: out of memory, a loss of another shape, inputs of another type."""

from __future__ import annotations

import re

from trainrun.errors import DataError, PluginError, TrainingError, TrainrunError
from trainrun.train_state import TrainState
from trainrun.training.components import Components
from trainrun.training.recovery.oom import ONE_SAMPLE, no_memory

# of a loss with another shape than its gradient
OF_LOSS = re.compile(r"Mismatch in shape: grad_output|invalid gradient at index 0 - got \[\]")
# of torch's linear, convolution and recurrent layers; `scalar type Long` may also be said of a target
WHOLE = r"(Bool|Byte|Char|Short|Int)"
WHOLE_INPUTS = re.compile(
    rf"got ({WHOLE}|Long) and |Input type \((bool|unsigned char|(short |long )?int|torch.*ByteTensor)\)"
    rf"|scalar type {WHOLE} but found |\"(batch_norm|slow_conv\w*)\" not implemented for '({WHOLE}|Long)"
    r"|RNN input dtype \(torch\.(bool|u?int)"
)
OF_ANOMALY = re.compile(r"Function '\w+' returned nan values")
ASSERTED = "device-side assert"  # of a kernel; the device is lost to the process with it
# of torch's embeddings
FRACTIONS = re.compile(r"argument #1 'indices' to have one of the following scalar types: Long, Int; but got")


def explained(run: Components, state: TrainState, error: Exception) -> TrainrunError | None:
    """Return what to do about an error; None if that is not known."""
    task = type(run.task).__name__
    if isinstance(error, AttributeError):
        if error.name not in ("loss_sum", "sums", "count"):
            return None
        return PluginError(
            f"task: {task}.step() gave a {type(error.obj).__name__}; it must return "
            "trainrun.interfaces.StepOutput(loss_sum, {...})"
        )
    if text := no_memory(error):
        return TrainingError(advice(run, text))
    if "file too short" in str(error):
        from trainrun.transform.compile import broken_library

        if text := broken_library(error):
            return TrainingError(text)
    if ASSERTED in str(error):
        return TrainingError(
            f"at step {state.step + 1} or just before: an index was out of range on the GPU, as a label or a "
            "token that the model has no class or row for; the same command with parallel.accelerator=cpu "
            "names its value, and with CUDA_LAUNCH_BLOCKING=1 in the environment the error has the right line"
        )
    if "does not currently support double backward" in str(error):
        return PluginError(
            f"trainer.compile={run.config.trainer.compile.scope}: {task}.step() differentiates a gradient "
            "(autograd.grad with create_graph=True), which torch.compile does not support; use trainer.compile=off"
        )
    if OF_ANOMALY.search(str(error)):
        return TrainingError(
            f"step {state.step + 1}: {str(error).rstrip('.')} (trainer.detect_anomaly=true); torch's warning above "
            "shows where the forward pass called it"
        )
    if OF_LOSS.search(str(error)):  # whose first shape was right
        return PluginError(
            f"task: at step {state.step + 1} {task}.step() gave a loss that is not 0-d; it "
            f"must be the sum over the batch ({str(error).partition('.')[0]})"
        )
    if FRACTIONS.search(str(error)):
        return DataError(
            f"data: the inputs are fractions, but the model reads tokens, whole numbers ({error}); for text: "
            "data=text task=language_modeling"
        )
    if "must be Tensor, not dict" in str(error) and type(run.model).__module__.startswith("trainrun."):
        return DataError(
            "data: the inputs are several by name, but the model takes one tensor; name inputs of one kind, as "
            "data.train.inputs=[a,b], or use a model whose forward takes the dict"
        )
    if "Expected more than 1 value per channel" in str(error):
        return DataError(
            f"data: at step {state.step + 1} a batch has one sample, of which a BatchNorm knows nothing; leave such "
            "a last batch out with data.drop_last=true (also by trainrun resume), or take another data.batch_size"
        )
    if WHOLE_INPUTS.search(str(error)):
        return DataError(
            f"data: the inputs are whole numbers, but the model computes with fractions ({error}); "
            "convert them where they are read, as x.float() / 255"
        )
    return None


def advice(run: Components, text: str) -> str:
    """Return what to do when memory ran out. text: what the allocator said, and why the window did not run again."""
    batch = run.config.data.batch_size
    accumulate = run.config.trainer.accumulate_grad_batches
    if run.retry.refusal:
        text += f"; not run again in smaller micro-batches: {run.retry.refusal}"
    if batch == 1 or ONE_SAMPLE in text:
        return f"out of memory with data.batch_size={batch}: {text}. A smaller model, or preset=memory-limited, may fit"
    return (
        f"out of memory with data.batch_size={batch}: {text}. The same training in less memory: "
        f"data.batch_size={batch // 2} trainer.accumulate_grad_batches={accumulate * 2}"
    )
