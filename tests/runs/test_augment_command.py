"""`data.augment` through the real command: pictures change in training, numbers stay exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from approved import approve_error

import trainrun as package
from trainrun.cli.main import main
from trainrun.folder.run_folder import RunDir

AUGMENT = "trainrun.data.augment"
SMALL = [
    "data=synthetic", "data.shape=[1,8,8]", "data.train.num_samples=96", "data.val.num_samples=64",
    "data.batch_size=16", "precision=64-true", "trainer.max_epochs=2", "monitor=none",
]  # fmt: skip
NORMALIZE = [
    f"data.augment.normalize._target_={AUGMENT}.normalize.Normalize",
    "data.augment.normalize.mean=0.5",
    "data.augment.normalize.std=0.25",
]
CROP = [f"data.augment.crop._target_={AUGMENT}.crop.RandomCrop", "data.augment.crop.padding=2"]
FLIP = [f"data.augment.flip._target_={AUGMENT}.flip.RandomFlip"]
MIXUP = [
    f"data.augment.mixup._target_={AUGMENT}.mix.MixUp",
    "data.augment.mixup.alpha=1.0",
    "data.augment.mixup.num_classes=${data.num_classes}",
]
OWN = """
import torch

def load(split):
    images = torch.randint(256, (96, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return images, (images[:, 0, 0, 0] > 127).long()

def noise(batch, draws, strength):
    images, target = batch
    return images + strength * (draws.uniform("noise")[:, :, None, None].double() - 0.5), target

class Watch:
    random = False
    seen = []
    def __call__(self, batch, draws):
        self.seen.append(batch[0])
        return batch
"""


def last_weights(run: package.Run) -> list[torch.Tensor]:
    return [value.detach().clone() for value in run.load_model("last").parameters()]


def weights(*words: str) -> list[torch.Tensor]:
    run = package.train(*SMALL, *words)
    assert run.status["state"] == "done"
    return last_weights(run)


def difference(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((one - two).abs().max()) for one, two in zip(left, right, strict=True))


def test_accumulated_micro_batches_equal_one_batch_mixed_or_not(workdir: Path) -> None:
    words = [*CROP, *FLIP, *MIXUP]
    one = weights(*words)
    many = weights(*words, "data.batch_size=4", "trainer.accumulate_grad_batches=4")
    assert difference(one, many) < 1e-11


def test_uint8_is_normalised_on_the_device_in_evaluation_too(workdir: Path) -> None:
    (workdir / "own_pictures.py").write_text(OWN)
    data = [f"data.{split}._target_=own_pictures.load" for split in ("train", "val")]
    data += [f"data.{split}.split={split}" for split in ("train", "val")]
    watch = ["data.augment.watch._target_=own_pictures.Watch"]
    run = package.train("data=custom", "data.num_classes=2", "data.shape=[1,8,8]", *data, *CROP, *NORMALIZE,
                        *watch, "model=mlp", "precision=64-true", "data.val_batch_size=96",
                        "trainer.max_steps=2", "monitor=none")  # fmt: skip
    assert run.status["state"] == "done"
    import own_pictures  # type: ignore[import-not-found]

    seen = own_pictures.Watch.seen
    assert {images.dtype for images in seen} == {torch.float64}
    assert [len(images) for images in seen] == [32, 32, 96]
    torch.testing.assert_close(seen[-1], (own_pictures.load("val")[0].double() / 255 - 0.5) / 0.25)
    assert main(["evaluate", str(run.folder)]) == 0


def test_a_function_of_ones_own_is_named_with_partial(workdir: Path) -> None:
    (workdir / "own_noise.py").write_text(OWN)
    node = ["data.augment.noise._target_=own_noise.noise", "data.augment.noise._partial_=true"]
    strong, weak = (weights(*node, f"data.augment.noise.strength={value}") for value in (1.0, 0.0))
    assert difference(strong, weak) > 1e-6
    assert difference(weak, weights()) == 0


def test_the_order_is_that_of_the_words_and_null_takes_one_out(workdir: Path) -> None:
    run = package.train(*SMALL, *FLIP, *CROP, *NORMALIZE, "trainer.max_steps=1")
    config = RunDir(run.folder).config.read_text()
    assert config.index("flip:") < config.index("crop:") < config.index("normalize:")
    without = package.train(*SMALL, *FLIP, "++data.augment.flip=null")
    assert difference(last_weights(without), weights()) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["data.shape=[16]", *CROP],
        [*CROP, "data.augment.crop.padding=0"],
        [*CROP, "data.augment.crop.pading=3"],
        ["data.augment.flip._target_=trainrun.data.augment.flip.RandomFlop"],
        [*MIXUP, "data.augment.mixup.num_classes=null"],
        [*MIXUP, "data.augment.mixup.num_classes=12"],
        ["data.augment.odd._target_=collections.Counter"],
    ],
)  # fmt: skip
def test_mistakes_are_named(workdir: Path, capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    last = {word.partition("=")[0]: word for word in [*SMALL, "monitor.progress_bar=false", *words]}
    assert main(list(last.values())) == 2
    approve_error(capfd.readouterr().err)
