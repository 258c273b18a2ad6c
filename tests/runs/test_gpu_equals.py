"""On a GPU the way to the numbers changes nothing either: engines, ranks, offloading, and the device itself."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from test_on_a_gpu import QUIET, alike, close, more, weights

import trainrun as package
from trainrun.cli.main import main
from trainrun.errors import TrainingError
from trainrun.parallel.devices import InstalledGpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("workdir"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
EXACT = ("precision=64-true", "trainer.deterministic=true")
DIGITS = ("data=digits", "trainer.max_steps=15", "optimizer=sgd", "optimizer.lr=0.05", *EXACT)
CNN = (*DIGITS, "model=cnn", "model.width=8", "data.batch_size=64")
TEXT = (
    "data=text", "data.train.max_bytes=60000", "trainer.max_steps=8", "trainer.max_epochs=null",
    "task=language_modeling", "model=gpt", "model.layers=2", "model.width=32", "model.heads=2", *EXACT,
)  # fmt: skip
BLOCKS = (*TEXT, "data.train.block_size=64", "data.batch_size=16")
LINES = (*TEXT, "data.train.kind=lines", "data.max_sequence_length=64", "data.batch_size=16")
CLIPPED = ("trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.1")
TOLERANCE = 1e-9
AUGMENT = "data.augment"
NAMES = "trainrun.data.augment"


def run(device: str, *words: str) -> package.Run:
    done = package.train(*QUIET, *words, f"parallel.accelerator={device}")
    assert done.status["state"] == "done"
    return done


@cache
def weights_after(device: str, *words: str) -> dict[str, torch.Tensor]:
    return weights(run(device, *words))


@pytest.mark.parametrize(
    ("words", "technique"),
    [
        more(CNN, ("trainer.activation_offload=true",)),
        (BLOCKS, ("trainer.activation_offload=true",)),
        ((*BLOCKS, "model.dropout=0.1"), ("trainer.gradient_checkpointing=full",)),
        ((*BLOCKS, "model.dropout=0.1"), ("trainer.gradient_checkpointing=selective",)),
        (CNN, ("trainer.channels_last=true",)),
        more(CNN, ("data.engine=workers", "data.num_workers=2")),
        (CNN, ("data.engine=threads", "data.num_threads=2")),
        more(CNN, ("data.engine=workers", "data.num_workers=1", "data.pin_memory=false")),
        ((*CNN, "checkpoint.every_n_train_steps=3"), ("checkpoint.async_save=false",)),
    ],
)  # fmt: skip
def test_the_way_changes_nothing(words: tuple[str, ...], technique: tuple[str, ...]) -> None:
    alike(weights_after("cuda", *words), weights(run("cuda", *words, *technique)), TOLERANCE)


SHORT = ("trainer.max_steps=8", "optimizer=sgd", "optimizer.lr=0.05")
BF16, TF32 = "precision=bf16-mixed", "precision.matmul=high"
ROUGH = 0.1  # of the whole change of the weights; other dropout masks in the backward are 0.3 and more
DROPS = (*BLOCKS, "model.dropout=0.1")
PLAIN = (*DROPS[:-1], "model.dropout=0.0")
PICTURES = ("data=digits", "model=cnn", "model.width=8", "model.norm=none", "data.batch_size=64")


def flat(found: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in found.values()])


@pytest.mark.parametrize(
    ("words", "technique"),
    [
        more((*DROPS, BF16), ("trainer.gradient_checkpointing=selective",)),
        more((*DROPS, BF16), ("trainer.gradient_checkpointing=full",)),
        more((*DROPS, BF16), ("trainer.activation_offload=true",)),
        ((*PLAIN, BF16), ("trainer.cuda_graphs=true",)),
        ((*PLAIN, BF16), ("trainer.compile=step",)),
        more((*PLAIN, BF16), ("data.batch_size=4", "trainer.accumulate_grad_batches=4")),
        pytest.param((*PLAIN, BF16), ("data.batch_size=8", "parallel=ddp", "parallel.devices=2"),
                     marks=[TWO, pytest.mark.slow]),
        more((*PICTURES, BF16), ("trainer.channels_last=true",)),
        more((*PICTURES, BF16), ("trainer.accumulate_grad_batches=2", "data.batch_size=32")),
        more((*PICTURES, TF32), ("trainer.channels_last=true",)),
        more((*PICTURES, TF32), ("trainer.cuda_graphs=true",)),
        more((*DROPS, TF32), ("trainer.gradient_checkpointing=selective",)),
    ],
)  # fmt: skip
def test_the_way_changes_little_in_the_types_of_every_day(
    words: tuple[str, ...], technique: tuple[str, ...]
) -> None:
    """In float64 no kernel of flash attention, tensor cores or rounded convolutions takes part."""
    if "trainer.compile=step" in technique:
        pytest.importorskip("triton")
    words = (*(word for word in words if word not in EXACT), *SHORT)
    before = flat(weights_after("cuda", *words, "optimizer.lr=0", "trainer.max_steps=1"))
    after = flat(weights_after("cuda", *words))
    assert not torch.equal(before, after)
    found = flat(weights(run("cuda", *words, *technique)))
    assert (found - after).norm() < ROUGH * (after - before).norm()


@TWO
@pytest.mark.parametrize(
    ("words", "technique"),
    [
        more(DIGITS, ()),
        more((*DIGITS, "model=cnn", "model.norm=none", *CLIPPED), ()),
        more((*DIGITS, "model=cnn", "model.width=8"), ("parallel.sync_batchnorm=true",)),
        more((*DIGITS, "trainer.ema=true"), ()),
        ((*DIGITS, "model=cnn", "model.width=8", "trainer.ema=true"), ("parallel.sync_batchnorm=true",)),
    ],
)
def test_two_ranks_under_nccl_are_one(words: tuple[str, ...], technique: tuple[str, ...]) -> None:
    devices = (
        () if torch.cuda.device_count() == 2 else ("parallel.devices=2",)
    )  # the driver's count is found too
    ranks = ("parallel=ddp", *devices, "data.batch_size=32", *technique)
    alike(
        weights_after("cuda", *words, "data.batch_size=64"), weights(run("cuda", *words, *ranks)), TOLERANCE
    )


@pytest.mark.parametrize(
    "words",
    [
        (*DIGITS, "data.batch_size=64", "trainer.gradient_clip_val=0.1"),
        CNN,
        (*BLOCKS, "optimizer=adamw"),
        more((*LINES, "data.padding=bucket")),
        (*LINES, "data.padding=pack"),
        more((*LINES[:-1], "data.padding=token_budget", "data.max_tokens=512")),
        more((*CNN, f"{AUGMENT}.flip._target_={NAMES}.flip.AlternatingFlip")),
        more((*CNN, f"{AUGMENT}.crop._target_={NAMES}.crop.RandomCrop")),
        (*CNN, f"{AUGMENT}.mixup._target_={NAMES}.mix.MixUp", f"{AUGMENT}.mixup.num_classes=10"),
    ],
)
def test_the_device_changes_nothing(words: tuple[str, ...]) -> None:
    alike(weights_after("cpu", *words), weights_after("cuda", *words), TOLERANCE)


def test_a_loss_that_is_not_finite_is_found_by_the_next_log_point() -> None:
    """A fused optimizer leaves such steps out on the device; with others the host looks at every step."""
    words = ("data=digits", "data.batch_size=64", "optimizer.lr=1e18", "monitor.log_every_n_steps=7")
    with pytest.raises(TrainingError, match="step [27]: a gradient was NaN"):
        run("cuda", *words, "trainer.cuda_graphs=true")


def test_a_run_goes_on_where_it_was_on_another_device() -> None:
    done = run("cuda", *CNN)
    for device, steps in (("cpu", 20), ("cuda", 25)):
        words = [f"trainer.max_steps={steps}", f"parallel.accelerator={device}"]
        assert main(["resume", str(done.folder), *words]) == 0
    assert package.load_run(done.folder).status["step"] == 25


class HostFirst(torch.nn.Module):
    """A block whose first argument lies on the host, and that draws."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, share: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(self.layer(x).tanh(), float(share), self.training)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([self.Block(), self.Block()])
        self.out = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for block in self.blocks:
            x = block(torch.tensor([0.3, 9.0])[0], x)
        return self.out(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["64-true", more("bf16-mixed")])
def test_a_block_is_computed_again_alike_whatever_it_is_given_first(precision: str) -> None:
    words = ("data=digits", "trainer.max_steps=5", "optimizer=sgd", f"precision={precision}")
    words = (*words, "model._target_=test_gpu_equals.HostFirst", "trainer.deterministic=true")
    tolerance = TOLERANCE if precision == "64-true" else 1e-3
    close(run("cuda", *words), run("cuda", *words, "trainer.gradient_checkpointing=full"), tolerance)


def test_a_run_with_words_for_a_gpu_is_evaluated_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    done = run("cuda", "data=digits", "trainer.max_steps=20", "trainer.cuda_graphs=true")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        patched.setattr("trainrun.parallel.devices.query_installed_gpus", InstalledGpus)
        assert main(["evaluate", str(done.folder), "parallel.accelerator=auto"]) == 0
    assert "val/acc" in capsys.readouterr().out


def test_a_validation_that_does_not_fit_is_cut() -> None:
    side = 16 if torch.version.cuda is None else 64
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + side**2 * 2**17) / total)
    words = (
        "data=synthetic", f"data.shape=[3,{side},{side}]", "data.train.num_samples=64", "data.val.num_samples=1024",
        "data.val_batch_size=1024", "data.batch_size=16", "data.engine=workers", "model=cnn", "model.norm=none",
    )  # fmt: skip
    try:
        found = run("cuda", *words, "trainer.max_steps=2")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("out of memory in a validation" in row.get("text", "") for row in found.metrics)
    whole = run("cuda", *words, "trainer.max_steps=2")
    losses = [[row["val/loss"] for row in one.metrics if row["kind"] == "eval"] for one in (found, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
