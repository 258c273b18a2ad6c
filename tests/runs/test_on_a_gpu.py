"""What only a GPU can show, in a few minutes: `pytest -m gpu tests`, of which this file is the runs as a whole."""

from __future__ import annotations

import gc
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.evidence import facts_of, same
from test_resume import OWN, WORDS, stop_at
from torch.nn.functional import cross_entropy

import trainrun as package
from trainrun.assemble import assemble as building
from trainrun.autotune.forecast import forecast
from trainrun.checkpoint.load import read_checkpoint
from trainrun.cli.main import main
from trainrun.errors import PluginError
from trainrun.model.cnn import Cnn
from trainrun.model.gpt import Gpt
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.step.graphs import CudaGraphRecorder

__all__ = ["OWN"]  # the code for the fixture `own`
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("workdir"),
]
DEVICE = torch.device("cuda")
HERE = ("parallel.accelerator=cuda",)
QUIET = (
    "monitor.hardware=false",
    "monitor.plots=false",
    "monitor.progress_bar=false",
    "monitor.verbose=false",
)
REPEATS = ("trainer.deterministic=true", "data.engine=threads", "data.num_threads=2")
SHORT = ("data=digits", "trainer.max_epochs=2", "trainer.limit_train_batches=12", "data.batch_size=64")
TEXT = (
    "data=text", "task=language_modeling", "model=gpt", "model.layers=2", "model.width=64", "model.heads=2",
    "data.train.block_size=64", "data.train.max_bytes=60000", "trainer.max_steps=24", "trainer.max_epochs=null",
)  # fmt: skip
OPTIMIZER = ("optimizer=custom", "optimizer.lr=0.01")


def more(*given: object) -> object:
    """A case beside one that takes the same branches: left out where the GPU is only pretended, unless asked for."""
    return pytest.param(*given, marks=pytest.mark.slow)


def run(*words: str) -> package.Run:
    done = package.train(*HERE, *QUIET, *words)
    assert done.status["state"] == "done"
    return done


def weights(done: package.Run) -> dict[str, torch.Tensor]:
    return {name: value.double().cpu() for name, value in done.load_model("last").state_dict().items()}


def close(one: package.Run, other: package.Run, tolerance: float) -> None:
    alike(weights(one), weights(other), tolerance)


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *(("mlp", mode) for mode in ("bf16-mixed", "16-mixed", "bf16-true", "64-true")), more("mlp", "32-true"),
        ("cnn", "32-true"), *(more("cnn", mode) for mode in ("bf16-mixed", "16-mixed", "bf16-true", "64-true")),
    ],
)  # fmt: skip
def test_every_precision_learns(model: str, mode: str) -> None:
    words = (f"model={model}", f"precision={mode}", "trainer.gradient_clip_val=1.0")
    found = run("data=digits", "trainer.max_epochs=3", "data.batch_size=64", *words)
    assert [row for row in found.metrics if row["kind"] == "eval"][-1]["val/acc"] > 0.8
    place = max((found.folder / "checkpoints").glob("step-*"))
    assert read_checkpoint(place).manifest.fingerprint["device"] == "cuda"


@pytest.mark.parametrize(
    ("step", "precision"), [more(1, "32"), (4, "bf16"), (9, "16"), more(10, "bf16-true")]
)
def test_a_run_stopped_anywhere_ends_with_the_same_bits(own: Path, step: int, precision: str) -> None:
    """With dropout, batch norm, averages, accumulation, and batches pinned in the background."""
    words = [*WORDS, *HERE, f"precision={precision}", "data.num_workers=2", "trainer.deterministic=true"]
    assert main([*words, *stop_at(-1, "SIGINT"), "output_dir=whole"]) == 0
    assert main([*words, *stop_at(step, "SIGINT"), "output_dir=stopped"]) == 130
    assert main(["resume", "stopped"]) == 0
    whole, resumed = facts_of(own / "whole"), facts_of(own / "stopped")
    same(whole[0], resumed[0])
    assert whole[1] == resumed[1]


@pytest.mark.parametrize("words", [(), more(("precision=bf16-true",))])
def test_one_rank_under_nccl_is_the_run_without_ranks(words: tuple[str, ...]) -> None:
    words = (*SHORT, "model=cnn", "model.width=8", *REPEATS, *words)
    alone = run(*words)
    rank = run(*words, "parallel=ddp", "parallel.devices=1")
    same(facts_of(alone.folder)[0]["shared"]["model"], facts_of(rank.folder)[0]["shared"]["model"])


@pytest.mark.parametrize(
    ("tolerance", "words"),
    [
        (1e-9, ("model=mlp",)),
        more(1e-9, ("model=mlp", *OPTIMIZER, "optimizer._target_=torch.optim.RMSprop")),
        # torch counts in float32 where its step can be recorded, and NAdam makes more of it with every step
        (1e-4, ("model=mlp", *OPTIMIZER, "optimizer._target_=torch.optim.NAdam", "trainer.max_steps=4")),
        (
            1e-9,
            (
                "model=cnn",
                "model.width=8",
                "trainer.accumulate_grad_batches=2",
                "trainer.gradient_clip_val=0.1",
            ),
        ),
        (1e-9, (*TEXT[:-2], "trainer.max_epochs=null", "trainer.max_steps=12", "scheduler=warmup_cosine")),
        # it rounds to bfloat16 on a GPU; a graph that updated nothing would be 0.02 off
        (2e-3, ("model=mlp", "optimizer=muon", "trainer.max_steps=20")),
    ],
)
def test_a_recorded_step_is_the_plain_one_while_threads_pin_batches(
    tolerance: float, words: tuple[str, ...]
) -> None:
    shared = (*(SHORT if words[0] != TEXT[0] else ()), *REPEATS, *words, "precision=64-true")
    recorded = run(*shared, "trainer.cuda_graphs=true")
    assert recorded.status["compiled_graphs"] >= 1
    close(recorded, run(*shared), tolerance)


def test_steps_are_recorded_again_after_all_graphs_are_gone() -> None:
    """The weights moved, as cuDNN moves those of recurrent layers."""
    record, seen = CudaGraphRecorder(), torch.zeros(3, device=DEVICE)
    for turn in (1, 2, 3):
        replay, _ = record(lambda turn=turn: [seen.add_(turn)])
        seen.zero_()
        replay()
        assert seen.tolist() == [turn] * 3
        del replay
        gc.collect()


@pytest.mark.skipif(not torch.backends.cudnn.is_available(), reason="no cuDNN")
def test_a_recurrent_network_in_a_graph_is_validated_as_it_was_trained() -> None:
    """cuDNN moves the weights of such layers in the first plain forward, that of a validation."""
    network = ("model=lstm", "model.width=32", "data.train.block_size=64", "data.train.max_bytes=60000")
    shared = ("data=text", "task=language_modeling", *network, "trainer.max_epochs=null", "trainer.max_steps=40",
              "trainer.val_check_interval=10", "data.batch_size=16", *REPEATS)  # fmt: skip
    plain, graphs = run(*shared), run(*shared, "trainer.cuda_graphs=true")
    losses = [[row["val/loss"] for row in one.metrics if row["kind"] == "eval"] for one in (plain, graphs)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1][-1] < losses[1][0]
    if importlib.util.find_spec("triton"):
        with pytest.raises(PluginError, match="trainer.compile.scope"):
            run(*shared, "trainer.compile=step")


def test_the_peak_of_memory_is_that_of_the_training() -> None:
    held = torch.cuda.memory_allocated()  # by tests before
    before = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    peak = torch.cuda.max_memory_allocated()
    del before
    words = (*HERE, *QUIET[1:], *SHORT, "model=mlp", "monitor.hardware=true")
    rows = [row for row in package.train(*words).metrics if row["kind"] == "hardware"]
    assert 0 < rows[-1]["gpu_allocated_peak_bytes"] - held < (peak - held) / 2


@pytest.mark.skipif(torch.version.cuda is None, reason="a pretended GPU asserts nothing")
def test_a_token_out_of_range_is_named_in_a_process_of_its_own(
    trainrun: Callable[..., Any], workdir: Path
) -> None:
    """A device assert is the end of CUDA in its process."""
    (workdir / "tokens.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.rows, self.calls = torch.nn.Embedding(10, 10), 0\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        "        return self.rows((x.flatten(1)[:, 0] > 0).long() + 90 * (self.calls > 5))\n"
    )
    done = trainrun("model._target_=tokens.Net", "monitor.plots=false", *HERE)
    assert done.returncode == 1
    assert "an index was out of range on the GPU" in done.stderr


def test_gradients_add_up_under_cuda_graphs_of_inductor() -> None:
    pytest.importorskip("triton")
    shared = (*SHORT, "model=mlp", "trainer.accumulate_grad_batches=2", "optimizer=sgd")
    compiled = run(*shared, "trainer.compile=model", "trainer.compile.mode=reduce-overhead")
    close(compiled, run(*shared), 1e-3)


@pytest.mark.parametrize(
    "words",
    [
        (*SHORT, "model=cnn", "trainer.gradient_clip_val=1.0", "trainer.ema=true", "trainer.nan_policy=stop"),
        (*SHORT, "model=mlp", "precision=bf16-true"),
        (*TEXT, "data.engine=threads", "data.num_threads=1"),
        (*TEXT, "data.cache=memory"),
        (*SHORT, "model=mlp", "trainer.cuda_graphs=true"),
        (*SHORT, "model=mlp", "optimizer=muon"),
    ],
)
def test_no_step_waits_for_the_gpu(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """But the first ones, in which models and batches are looked at, and those that are recorded."""
    monkeypatch.setattr(building, "add_layer_table", lambda config, step: strictly(step, first=6))
    run(*words, "monitor.log_every_n_steps=10")


def strictly(step: Callable[..., Any], first: int) -> Callable[..., Any]:
    done = 0

    def call(*given: Any) -> Any:
        nonlocal done
        done += 1
        torch.cuda.set_sync_debug_mode("error" if done > first else "default")
        try:
            return step(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call


def test_checkpoints_written_beside_the_training_are_those_of_their_step() -> None:
    words = (
        *SHORT, "model=mlp", "model.hidden=[1000,1000]", "trainer.max_steps=12", "trainer.val_check_interval=100",
        *REPEATS, "checkpoint.every_n_train_steps=3", "checkpoint.keep_last=9", "trainer.ema=true",
    )  # fmt: skip
    folders = [run(*words, f"checkpoint.async_save={how}").files.checkpoints for how in ("true", "false")]
    names = [sorted(path.name for path in folder.glob("step-*")) for folder in folders]
    assert names[0] == names[1]
    assert len(names[0]) == 4
    for name in names[0]:
        beside, waited = (read_checkpoint(folder / name).shared for folder in folders)
        same(*({key: tree[key] for key in ("model", "ema", "optimizer")} for tree in (beside, waited)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_a_forecast_tells_the_peak(name: str) -> None:
    model: torch.nn.Module
    if name == "cnn":
        model, data = Cnn([3, 64, 64], 10, width=64, norm="batch"), torch.rand(256, 3, 64, 64, device=DEVICE)
    else:
        model = Gpt(vocab_size=256, context=256, size="11M")
        data = torch.randint(256, (64, 256), device=DEVICE)
    model.to(DEVICE)

    def step(rows: torch.Tensor) -> None:
        logits = model(rows)
        target = rows.flatten() if name == "gpt" else torch.zeros(len(rows), dtype=torch.int64, device=DEVICE)
        cross_entropy(logits.flatten(0, -2), target, reduction="sum").backward()

    optimizer, _ = build_optimizer(torch.optim.AdamW, {}, model)
    found = forecast(model, step, data, optimizer)
    step(data[:2])  # kernels take workspaces of their own at first
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):  # the state of the optimizer is there in the second
        step(data)
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before
    assert 0.8 < sum(found) / measured < 1.2, (found, measured)


def test_a_window_that_does_not_fit_runs_in_parts() -> None:
    total, side = torch.cuda.mem_get_info()[1], 16 if torch.version.cuda is None else 64
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + side**2 * 2**18) / total)
    try:
        found = run(
            "data=synthetic", f"data.shape=[3,{side},{side}]", "data.train.num_samples=2048", "model=cnn",
            "model.norm=none", "data.batch_size=1024", "data.engine=workers", "trainer.max_steps=2", "data.val=null",
        )  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    notes = [row["text"] for row in found.metrics if row["kind"] == "note"]
    assert any("every micro-batch is split into" in text for text in notes), json.dumps(notes)
