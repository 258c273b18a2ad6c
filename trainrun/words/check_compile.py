"""What does not go together with compiling the whole step."""

from __future__ import annotations

from collections.abc import Iterator

from trainrun.config import RunConfig

CYCLING = ("OneCycleLR", "CyclicLR")  # torch's schedulers that move the momentum too, unless told not to


def compile_faults(config: RunConfig) -> Iterator[str]:
    """One line for each pair that is refused."""
    scope, records = config.trainer.compile.scope, config.trainer.cuda_graphs
    key = "trainer.compile.scope=step" if scope == "step" else "trainer.cuda_graphs=true"
    if scope == "step" or records:
        for pair, reason in step_obstacles(config):
            yield f"{key}: does not go with {pair}: {reason}"
    if records and scope in ("model", "regional", "auto"):
        yield (f"trainer.cuda_graphs=true: does not go with trainer.compile.scope={scope}: it records the step; use "
               "trainer.compile.scope=step, or trainer.compile.mode=reduce-overhead in its place")  # fmt: skip
    if records and config.parallel.accelerator in ("cpu", "mps"):
        yield (f"trainer.cuda_graphs=true: does not go with parallel.accelerator={config.parallel.accelerator}: only a "
               "CUDA device has them; use trainer.cuda_graphs=false")  # fmt: skip


def step_obstacles(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What stands against a step of one graph: a word of the config, and the reason with the way out."""
    scheduler = config.scheduler if isinstance(config.scheduler, dict) else {}
    target = str(scheduler.get("_target_", "")).rpartition(".")[2]
    options = config.trainer.compile
    if config.parallel.mode != "single":
        yield (f"parallel={config.parallel.mode}",
               "ranks exchange gradients in the step; use trainer.compile.scope=model, or parallel=single")  # fmt: skip
    if config.precision.mode == "16-mixed":
        yield ("precision=16-mixed", "loss scaling decides on the host whether to update; use "
               "precision=bf16-mixed, or trainer.compile.scope=model")  # fmt: skip
    if config.loop:
        yield "loop", "a loop of your own makes the steps itself; use trainer.compile.scope=model"
    if target in CYCLING and scheduler.get("cycle_momentum", True):
        yield (f"scheduler._target_={target}", "it moves the momentum, which a graph holds as a constant; set "
               "scheduler.cycle_momentum=false, or use trainer.compile.scope=model")  # fmt: skip
    if options.dynamic:
        yield "trainer.compile.dynamic=true", "each shape of batch is a graph of its own; leave it out"
    if options.mode == "reduce-overhead":
        yield ("trainer.compile.mode=reduce-overhead", "CUDA graphs of inductor hold no tensors that change in "
               "place; leave it out, or use trainer.compile.scope=model")  # fmt: skip
    placed = {
        "trainer.optimizer_in_backward=true": config.trainer.optimizer_in_backward,
        f"trainer.cpu_offload={config.trainer.cpu_offload}": config.trainer.cpu_offload != "none",
        "precision.master_weights=true": config.precision.master_weights,
    }
    for pair, chosen in placed.items():
        if chosen:
            yield pair, "the update would be at another time or place; use one of the two"
    if config.data.padding == "token_budget":
        yield ("data.padding=token_budget", "its batches have other rows each time, and only full ones are compiled; "
               "use data.padding=bucket")  # fmt: skip
