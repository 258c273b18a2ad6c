"""What one of several ranks does in test_fsdp.py: `fsdp_ranks.py RUN_DIR`. Rank 0 writes down what it sees."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

from exact_parts import FEATURES, histograms_of, parts_of, result

from trainrun.checkpoint.load import LoadedCheckpoint
from trainrun.checkpoint.manager import CheckpointManager
from trainrun.config.schema import ParallelConfig
from trainrun.folder.run_folder import RunDir, write_text
from trainrun.interfaces import Parallel
from trainrun.parallel import deferred_init
from trainrun.parallel.fsdp import Fsdp
from trainrun.parallel.group import Group
from trainrun.parallel.worker import run_as_rank
from trainrun.runs.rank import explain_error
from trainrun.runtime.signals import StopFlag
from trainrun.tensors import StoredTensor
from trainrun.train_state import TrainState
from trainrun.training import loop
from trainrun.training.components import Components
from trainrun.training.recovery.restore import load_tree

OPTIONS = ParallelConfig(mode="fsdp", accelerator="cpu", timeout_seconds=60.0, blocks="layers.0")
SAVED = ("optimizer=adamw", "optimizer.lr=0.03", "data.train.count=88", "ema=true", "ema.decay=0.5",
         "trainer.gradient_clip_val=0.5", "precision=64")  # fmt: skip


LBFGS = ("optimizer=custom", "optimizer._target_=torch.optim.LBFGS", "optimizer.lr=0.1")
BATCH = 8  # samples of all ranks


def another(parallel: Fsdp, **options: Any) -> Fsdp:
    """Return a second backend of the same ranks."""
    group = Group(
        parallel.device, parallel.rank, parallel.world_size, parallel._host, parallel.local_world_size
    )
    return Fsdp(group, **{"blocks": "layers.0", **options})


def fit(
    words: tuple[str, ...], parallel: Parallel, max_steps: int, loaded: LoadedCheckpoint | None = None
) -> tuple[Components, TrainState]:
    """Train up to a step, from the beginning or from a checkpoint."""
    run, state = (
        parts_of((*words, f"trainer.max_steps={max_steps}"), parallel=parallel, batch_size=4),
        TrainState(),
    )
    if loaded is not None:
        state = load_tree(run, loaded.folder.name, loaded.shared, loaded.own)
    run.triggers.start(state)
    return run, loop.fit(run, state)


def save(run: Components, state: TrainState, folder: Path) -> CheckpointManager:
    options = replace(run.checkpoints.options, enabled=True)
    manager = CheckpointManager(folder, "run", options, run.parallel, {}, print, lambda: 2**40)
    manager.save(run, state)
    manager.close()
    return manager


class BytesRead:
    """How many bytes of numbers stored tensors read until the end, in all and at most in one piece."""

    def __init__(self) -> None:
        self.total = self.largest = 0
        self._read = StoredTensor.read
        StoredTensor.read = lambda tensor, *rows: self._count(self._read(tensor, *rows))  # type: ignore[method-assign]

    def _count(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():  # no random states
            self.total, self.largest = self.total + tensor.nbytes, max(self.largest, tensor.nbytes)
        return tensor

    def end(self) -> None:
        StoredTensor.read = self._read  # type: ignore[method-assign]


def save_at(parallel: Fsdp, folder: Path) -> dict[str, Any]:
    """Save in the middle, and go on from there; return whether that is the run that never stopped, to the bit."""
    whole, state = fit(SAVED, another(parallel), 4)
    manager = save(*fit(SAVED, another(parallel), 2), folder)
    counts = BytesRead()
    resumed, _ = fit(SAVED, another(parallel), 4, manager.load_latest())
    counts.end()
    same = [torch.equal(*pair) for pair in zip(leaves(whole), leaves(resumed), strict=True)]
    save(whole, state, folder)
    return {
        "same": all(same),
        "tensors": len(same),
        "bytes_held": bytes_held(whole),
        "bytes_read": counts.total,
        "largest_read": counts.largest,
    }


def bytes_held(run: Components) -> int:
    """Return the bytes that this rank keeps of weights, averages and moments."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(run))


def leaves(run: Components) -> list[Tensor]:
    tree = run.held.state_dict(), run.ema and run.ema.state_dict(), dict(run.optimizer.state)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def fault_of(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def use_weights_outside_of_the_model(parallel: Fsdp) -> None:
    """Compute with the rows of a weight that this rank has; raise the error that a user sees."""
    run = parts_of((), parallel=another(parallel), batch_size=2)
    try:
        torch.nn.functional.linear(torch.ones(1, 9), run.model.layers[2].weight)
    except RuntimeError as error:
        explained = explain_error(run, TrainState(), error)
        assert explained is not None
        raise explained from error


def differentiate_a_gradient(parallel: Fsdp) -> None:
    """Make a backward through a gradient; raise the error that a user sees."""
    run = parts_of((), parallel=another(parallel), batch_size=2)
    inputs = torch.ones(1, FEATURES, requires_grad=True)
    try:
        (gradient,) = torch.autograd.grad(run.model(inputs).square().sum(), inputs, create_graph=True)
        gradient.square().sum().backward()
    except RuntimeError as error:
        explained = explain_error(run, TrainState(), error)
        assert explained is not None
        raise explained from error


KEPT = "model=unusual_weights.Kept"
CHANGED = "model=unusual_weights.Changed"
UNUSUAL: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{name: ((KEPT, f"model.owner={name}"), {})
       for name in ("list", "object", "function", "view", "buffer", "parameter")},
    **{f"{name}, without memory": ((KEPT, f"model.owner={name}"), {"meta_device": True})
       for name in ("list", "view")},
    "changed in the forward": ((CHANGED, "model.through_data=false"), {}),
    "changed through data": ((CHANGED, "model.through_data=true"), {}),
    "post-accumulate hook": (("model=unusual_weights.Hooked",), {}),
}  # fmt: skip


def work(parallel: Parallel, flag: StopFlag) -> int:
    assert isinstance(parallel, Fsdp)
    folder = Path(sys.argv[1])
    deferred_init.LARGE_BYTES = 1
    scenarios = json.loads((folder / "scenarios.json").read_text())
    seen: dict[str, Any] = {
        name: result(tuple(words), another(parallel, **options), batch_size=BATCH // parallel.world_size)
        for name, (words, options) in scenarios.items()
    }
    seen["saved"] = save_at(parallel, folder / "checkpoints")
    seen["no blocks"] = fault_of(lambda: another(parallel, blocks="auto").wrap(torch.nn.Bilinear(2, 2, 2)))
    seen["replicate"] = fault_of(lambda: another(parallel, replicate=3))
    seen["muon"] = fault_of(
        lambda: parts_of(("optimizer=muon", "optimizer.lr=0.02"), batch_size=2, parallel=another(parallel))
    )
    seen["lbfgs"] = fault_of(lambda: parts_of(LBFGS, batch_size=2, parallel=another(parallel)))
    seen["offload"] = fault_of(lambda: another(parallel, offload=True))
    seen["sparse"] = fault_of(lambda: another(parallel).wrap(torch.nn.Embedding(4, 2, sparse=True)))
    seen["a part of the model"] = fault_of(lambda: use_weights_outside_of_the_model(parallel))
    seen["a gradient of a gradient"] = fault_of(lambda: differentiate_a_gradient(parallel))
    seen["max_norm"] = fault_of(lambda: another(parallel).wrap(torch.nn.Embedding(4, 2, max_norm=1.0)))
    for name, (words, options) in UNUSUAL.items():
        seen[name] = fault_of(lambda w=words, o=options: result(w, another(parallel, **o), batch_size=2))
    seen["histograms"] = histograms_of(another(parallel), BATCH // parallel.world_size)
    if parallel.rank == 0:
        write_text(folder / "results.json", json.dumps(seen))
    return 0


if __name__ == "__main__":
    sys.exit(run_as_rank(RunDir(Path(sys.argv[1])), OPTIONS, work))
