"""Whole runs of a student: its teacher's answers kept or asked again, resume, ranks, evaluation, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from approved import refused

import trainrun as package
from trainrun.cli.main import main
from trainrun.errors import CheckpointError, ConfigError, TrainrunError

pytestmark = pytest.mark.train

QUIET = ("monitor.plots=false", "monitor.progress_bar=false", "monitor.hardware=false", "trainer.num_threads=1",
         "monitor.log_every_n_steps=1")  # fmt: skip
STUDENT = ("task=distillation", "task.teacher=teacher", "model.hidden=[16]", "data.batch_size=180", *QUIET)
HIDDEN = "task.hidden={layers.1: layers.1}"


@pytest.fixture
def teacher(workdir: Path) -> str:
    package.train("model.hidden=[16, 16]", "trainer.max_epochs=2", "output_dir=teacher", *QUIET)
    (workdir / "mine.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self, classes=10):\n"
        "        super().__init__()\n"
        "        self.flat, self.head = torch.nn.Flatten(), torch.nn.Linear(64, classes)\n\n"
        "    def forward(self, x):\n        return self.head(self.flat(x))\n"
    )
    return "teacher"


def train(folder: str, *words: str) -> Any:
    return package.train(*STUDENT, *words, f"output_dir={folder}")


def about(run: Any) -> str:
    log = (run.folder / "run.log").read_text()
    return next(line for line in log.splitlines() if "task.teacher:" in line)


def losses(run: Any, least: int = 0) -> list[tuple[int, float]]:
    return [
        (row["step"], row["train/loss"])
        for row in run.metrics
        if row["kind"] == "train" and row["step"] > least
    ]


def weights(run: Any) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in run.load_model("last").parameters()])


def test_answers_are_kept_where_nothing_is_random_and_a_resume_changes_no_bit(teacher: str) -> None:
    for more in ((HIDDEN,), ("data.augment.noisy._target_=trainrun.data.augment.cutout.Cutout",)):
        words = (*more, "trainer.accumulate_grad_batches=2")
        whole = train("whole", *words, "trainer.max_steps=9")
        train("part", *words, "trainer.max_steps=6")
        rest = train("rest", *words, "trainer.max_steps=9", "ckpt_path=part")
        assert losses(rest, 6) == losses(whole, 6)
        assert torch.equal(weights(rest), weights(whole))
        kept = "its answers to 1,438 samples are kept" in about(whole)
        assert kept == (more == (HIDDEN,))
        assert kept or "asked in every step: data.augment.noisy is random" in about(whole)
        for folder in ("whole", "part", "rest"):
            shutil.rmtree(folder)


def test_a_kept_answer_is_one_that_was_asked(teacher: str) -> None:
    words = ("precision=64", HIDDEN, "trainer.max_epochs=3")
    kept, asked = train("kept", *words), train("asked", *words, "data.augment.index=null")
    assert "was taken away" in about(asked)
    torch.testing.assert_close(weights(kept), weights(asked), rtol=0, atol=1e-12)
    fewer = train("fewer", "trainer.max_steps=3")
    assert "few samples come twice" in about(fewer)


@pytest.mark.process
def test_two_ranks_and_micro_batches_equal_one_large_batch(teacher: str) -> None:
    words = ("precision=64", HIDDEN, "trainer.max_steps=17", "optimizer=sgd")
    one = weights(train("one", *words))
    two = weights(train("two", *words, "parallel=ddp", "data.batch_size=90"))
    asked = ("data.augment.index=null", "data.batch_size=60", "trainer.accumulate_grad_batches=3")
    parts = weights(train("parts", *words, *asked))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts, one, rtol=0, atol=1e-12)


def test_a_student_stands_alone_afterwards(teacher: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = train("student", "trainer.max_epochs=2")
    shutil.rmtree(teacher)
    assert sum(weight.numel() for weight in run.load_model().parameters()) == 64 * 16 + 16 + 16 * 10 + 10
    assert main(["evaluate", "student"]) == main(["predict", "student"]) == 0
    assert "val/acc" in capsys.readouterr().out
    with refused(ConfigError, "task.teacher=teacher: "):
        package.train(*STUDENT, "trainer.max_epochs=3", "output_dir=other")


def test_another_teacher_does_not_go_on(teacher: str) -> None:
    train("part", "trainer.max_steps=2")
    shutil.rmtree(teacher)
    package.train("model.hidden=[16, 16]", "trainer.max_epochs=1", "seed=5", "output_dir=teacher", *QUIET)
    with refused(CheckpointError):
        train("rest", "trainer.max_steps=3", "ckpt_path=part")


@pytest.mark.parametrize(
    "words",
    [
        "model.num_classes=12",
        "task.teacher=nothing",
        "task.teacher=mine.Absent",
        "task.teacher=null",
        "task.teacher._target_=mine.Net task.teacher.classes=7",
        "task.hidden={layers.1: layers.77}",
        "task.hidden={layers.1: layers.5}",
        "trainer.compile.scope=step",
        "data.augment.normalize={_target_: trainrun.data.augment.normalize.Normalize, mean: [0.5], std: [0.5]}",
    ],
)  # fmt: skip
def test_a_teacher_that_is_none_is_refused_in_one_line(teacher: str, words: str) -> None:
    rest = [
        word for word in STUDENT if not (word == "task.teacher=teacher" and words.startswith("task.teacher"))
    ]
    more = words.split() if words.startswith("task.teacher._target_") else [words]
    with refused(TrainrunError) as caught:
        package.train(*rest, *more, "trainer.max_steps=2", "output_dir=run")
    assert "\n" not in str(caught.value)


def test_a_student_of_text_has_the_tokens_of_its_teacher_and_writes(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (("one", "the fox jumps over"), ("other", "a dog sleeps under")):
        (workdir / f"{name}.txt").write_text("".join(f"{words} the {number}\n" for number in range(300)))
    text = ("data=text", "data.train.block_size=16", "data.train.cache_dir=kept", "model=lstm", "model.width=8",
            "trainer.max_steps=4", "data.batch_size=8", *QUIET)  # fmt: skip
    bpe = "data.train.tokenizer=bpe:260"
    package.train(*text, "data.path=one.txt", "task=language_modeling", bpe, "output_dir=teacher")
    taught = (*text, "task=distillation", "task.teacher=teacher")
    with refused(ConfigError, "task.teacher"):
        package.train(*taught, "task.class_dim=-1", "data.path=other.txt", bpe)
    with refused(TrainrunError, "task.class_dim"):
        package.train(*taught, "data.path=one.txt", bpe)
    package.train(
        *taught, "task.class_dim=-1", "data.path=one.txt", bpe, "output_dir=st", "monitor.samples_every=4step"
    )
    capsys.readouterr()
    assert main(["sample", "st", "--prompt=the", "--max-tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("the")
