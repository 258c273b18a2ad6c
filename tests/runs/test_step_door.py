"""The `step` door, with the steps of the manual: a GAN, truncated backpropagation through time, L-BFGS."""

from __future__ import annotations

from pathlib import Path

import exact_parts
import pytest
import torch
from approved import approve_error
from faults.evidence import facts_of, same
from test_manual_commands import PAGES, files_of
from test_resume import OWN, stop_at
from things import with_setting

import trainrun as package
from trainrun.checkpoint.load import read_checkpoint, resolve_checkpoint
from trainrun.cli.main import main

pytestmark = pytest.mark.process

QUIET = [
    "monitor.log_every_n_steps=1", "monitor.hardware=false", "monitor.plots=false", "monitor.progress_bar=false",
    "trainer.num_threads=1",
]  # fmt: skip
GAN = [
    "model=my_gan.Gan", "task=my_gan.GanTask", "step._target_=my_gan.step", "optimizer=custom",
    "optimizer.generator._target_=torch.optim.Adam", "optimizer.generator.lr=0.001",
    "optimizer.generator.params=generator.*", "optimizer.discriminator._target_=torch.optim.SGD",
    "optimizer.discriminator.lr=0.01", "optimizer.discriminator.momentum=0.9",
    "optimizer.discriminator.params=[discriminator.*]",
]  # fmt: skip
SCHEDULES = [
    "scheduler=custom", "scheduler.generator._target_=torch.optim.lr_scheduler.StepLR",
    "scheduler.generator.step_size=3", "scheduler.discriminator._target_=trainrun.scheduler.curves.linear",
    "scheduler.discriminator.total_steps=null", "scheduler.discriminator.warmup_steps=2",
]  # fmt: skip
SERIES = [
    "data.train._target_=my_series.Waves", "data.val._target_=my_series.Waves", "data.val.seed=1", "data.batch_size=8",
    "data.shuffle=false", "model=my_series.Recurrent", "task=my_series.NextValue", "step._target_=my_series.Truncated",
]  # fmt: skip
LBFGS = [
    "step._target_=my_lbfgs.step", "optimizer=custom", "optimizer._target_=torch.optim.LBFGS", "optimizer.lr=1",
    "optimizer.line_search_fn=strong_wolfe", "optimizer.max_iter=5", "precision=64", "data.shuffle=false",
    "data=custom", "data.train._target_=exact_parts.samples", "data.train.count=64", "model=exact_parts.Net",
    "task.class_dim=-1",
]  # fmt: skip
TIED = [
    "model=tied.Tied", "step._target_=my_gan.step", "optimizer=custom", "optimizer.a._target_=torch.optim.Adam",
    "optimizer.a.params=a.*", "optimizer.b._target_=torch.optim.Adam",
]  # fmt: skip


@pytest.fixture
def own(workdir: Path) -> Path:
    for name in ("my_gan.py", "my_series.py", "my_lbfgs.py"):
        body = files_of(PAGES["your_own"])[name]
        (workdir / name).write_text(body, encoding="utf-8")
    (workdir / "own.py").write_text(OWN, encoding="utf-8")
    (workdir / "tied.py").write_text(
        "from torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Embedding(4, 4), nn.Linear(4, 4)\n"
        "        self.b.weight = self.a.weight\n"
    )
    return workdir


@pytest.mark.parametrize(
    "words",
    [
        [
            *GAN,
            *SCHEDULES,
            "trainer.accumulate_grad_batches=2",
            "precision=16-mixed",
            "trainer.max_steps=12",
            "ema=true",
        ],
        [
            *GAN,
            "scheduler=cosine",
            "trainer.gradient_clip_val=0.5",
            "trainer.max_steps=12",
        ],  # one schedule for both
        [*SERIES, "trainer.max_epochs=2"],
        [*SERIES, "trainer.max_epochs=2", "trainer.accumulate_grad_batches=3", "precision=16-mixed"],
    ],
    ids=["gan", "gan with one schedule", "truncated", "truncated with accumulation"],
)
def test_a_run_stopped_in_the_middle_ends_with_the_same_bits(own: Path, words: list[str]) -> None:
    words = [*words, *QUIET]
    assert main([*words, *stop_at(-1, "SIGINT"), "output_dir=whole"]) == 0
    assert main([*words, *stop_at(7, "SIGINT"), "output_dir=stopped"]) == 130
    assert main(["resume", "stopped"]) == 0
    whole, resumed = facts_of(own / "whole"), facts_of(own / "stopped")
    same(whole[0], resumed[0])
    assert whole[1] == resumed[1]


def test_each_optimizer_moves_its_own_parameters_with_its_own_rate(own: Path) -> None:
    run = package.train(*GAN, *SCHEDULES, *QUIET, "trainer.max_steps=6", "output_dir=run")
    rows = [row for row in run.metrics if row["kind"] == "train"]
    rates = [row["lr/generator"] for row in rows]
    assert rates == pytest.approx([0.001, 0.001, 0.001, 0.0001, 0.0001, 0.0001])
    assert [row["lr/discriminator"] for row in rows] == pytest.approx(
        [0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025]
    )
    still = package.train(*GAN, *QUIET, "optimizer.generator.lr=0", "trainer.max_steps=3", "output_dir=still")
    fresh = package.train(*GAN, *QUIET, "trainer.max_steps=0", "output_dir=fresh")
    before, after = (one.load_model("last").state_dict() for one in (fresh, still))
    moved = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"discriminator"}


def test_one_of_several_optimizers_has_groups(own: Path) -> None:
    groups = "optimizer.generator.groups=[{params: generator.0.*, lr: 0.01}]"
    words = [*with_setting(GAN, "optimizer.generator.lr=0"), groups, *QUIET]
    package.train(*words, "trainer.max_steps=4", "output_dir=whole")
    package.train(*words, "trainer.max_steps=2", "output_dir=part")
    package.train(*words, "trainer.max_steps=4", "ckpt_path=part", "output_dir=rest")
    part, whole, rest = (
        read_checkpoint(resolve_checkpoint(Path(name) / "checkpoints", "last")).shared["model"]
        for name in ("part", "whole", "rest")
    )
    assert all(torch.equal(whole[name], rest[name]) for name in whole)
    moved = {name[: len("generator.0")] for name in part if not torch.equal(part[name], whole[name])}
    assert {name for name in moved if name.startswith("generator")} == {"generator.0"}


@pytest.mark.parametrize("words", [SERIES, LBFGS], ids=["truncated", "lbfgs"])
def test_two_ranks_train_what_one_does(own: Path, words: list[str]) -> None:
    words = with_setting([*words, *QUIET, "trainer.max_steps=3"], "precision=64")
    ranks = ["parallel=ddp", "parallel.accelerator=cpu", "parallel.devices=2", "output_dir=two"]
    assert main([*with_setting(words, "data.batch_size=8"), "output_dir=one"]) == 0
    assert main([*with_setting(words, "data.batch_size=4"), *ranks]) == 0
    one, two = (package.load_run(name).load_model("last").state_dict() for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-9, atol=1e-12)


COUNTING = """
from trainrun.interfaces import StepReport
from trainrun.training.train_step import train_step
def step(run, micro_batches, way):
    def closure():
        run.optimizer.zero_grad()
        for batch in micro_batches:
            loss = run.task.step(run.model, batch.data).loss_sum
            if way != "forgets":
                loss = loss * batch.real
            losses.append(loss)
            run.precision.backward(loss, share)
        return sum(losses).detach() * share
    if way == "ours":
        return train_step(run, micro_batches)
    items, losses = sum(batch.count_items(run.task) for batch in micro_batches), []
    share = 1 / run.agree(items).items
    if way != "closes":
        closure()
    return StepReport(losses, items, grad=run.update(closure if way == "closes" else None))
"""


@pytest.mark.parametrize("way", ["asks", "closes", "ours", "forgets"])
@pytest.mark.parametrize("words", [["data.batch_size=2"], ["data.batch_size=1", "trainer.accumulate_grad_batches=2"]],
                         ids=["one", "two"])  # fmt: skip
def test_a_micro_batch_that_is_another_rank_s_counts_nothing(
    own: Path, words: list[str], way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (own / "counting.py").write_text(COUNTING)
    # at the end of an epoch too few samples for each rank
    rest = 2 if words[0] == "data.batch_size=2" else 4
    common = [*LBFGS[6:10], *LBFGS[11:], *QUIET, "trainer.max_steps=3", "step._target_=counting.step", "optimizer=sgd",
              "optimizer.lr=0.1", f"data.train.count={6 + rest}", f"step.way={way}"]  # fmt: skip
    ranks = ["parallel=ddp", "parallel.accelerator=cpu", "parallel.devices=3", "output_dir=two"]
    assert main([*common, "data.batch_size=6", "output_dir=one"]) == 0
    if way == "forgets":
        assert main([*common, *words, *ranks]) != 0
        assert "does not ask for batch.real" in " ".join("".join(capfd.readouterr()).split())
        return
    assert main([*common, *words, *ranks]) == 0
    one, two = (package.load_run(name).load_model("last").state_dict() for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-9, atol=1e-12)
    one, two = ([row["train/loss"] for row in package.load_run(name).metrics if "train/loss" in row]
                for name in ("one", "two"))  # fmt: skip
    assert two == pytest.approx(one)


def test_the_hidden_state_is_carried_and_dropped_at_the_end_of_an_epoch(own: Path) -> None:
    run = package.train(*SERIES, *QUIET, "trainer.max_steps=7", "output_dir=middle")
    hidden = read_checkpoint(resolve_checkpoint(run.files.checkpoints, "last")).shared["step"]["state"][
        "hidden"
    ]
    assert hidden.shape == (1, 8, 16)
    run = package.train(*SERIES, *QUIET, "trainer.max_epochs=1", "output_dir=end")
    assert (
        read_checkpoint(resolve_checkpoint(run.files.checkpoints, "last")).shared["step"]["state"]["hidden"]
        is None
    )


def test_losses_may_be_floats_and_are_a_list(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (own / "my_gan.py").read_text(encoding="utf-8")
    (own / "floats.py").write_text(code.replace("loss.detach()", "loss.item()"), encoding="utf-8")
    (own / "one.py").write_text(code.replace("(losses, items", "(sum(losses), items"), encoding="utf-8")
    words = [*GAN, *QUIET, "trainer.max_steps=2"]
    tensors, floats = (
        package.train(*with_setting(words, f"step._target_={name}.step"), f"output_dir={name}").metrics
        for name in ("my_gan", "floats")
    )
    assert [row.get("train/loss") for row in tensors] == [row.get("train/loss") for row in floats]
    assert main([*with_setting(words, "step._target_=one.step"), "output_dir=one"]) == 2
    approve_error(capsys.readouterr().err)


def test_lbfgs_with_a_line_search_ends_where_torch_alone_does(own: Path) -> None:
    words = [*LBFGS, "data.batch_size=32", "trainer.accumulate_grad_batches=2", *QUIET]
    run = package.train(*words, "trainer.max_steps=4", "output_dir=run")
    model = package.train(*words, "trainer.max_steps=0", "output_dir=start").load_model("last").train()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1, line_search_fn="strong_wolfe", max_iter=5)
    x, y = exact_parts.samples(64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    expected = [float(optimizer.step(closure).detach()) for _ in range(4)]
    assert [row["train/loss"] for row in run.metrics if row["kind"] == "train"] == pytest.approx(
        expected, rel=1e-6
    )
    assert expected[-1] < 0.9 * expected[0]


@pytest.mark.parametrize(
    "words",
    [
        with_setting(GAN, "optimizer.generator.params=gen.*"),
        with_setting(GAN, "optimizer.generator.params=*"),
        with_setting(GAN, "optimizer.generator.params=generator.0.*"),
        [*GAN, "optimizer.no_decay=auto"],
        [*GAN, "optimizer.generator.groups=[{params: discriminator.*, lr: 1}]"],
        [*GAN, "scheduler=custom", "scheduler.gen._target_=math.sin"],
        [*GAN, "parallel=ddp"],
        with_setting(GAN, "optimizer=adamw"),
        ["step._target_=my_series.Truncated", "parallel.static_graph=true"],
        with_setting(TIED, "optimizer.b.params=b.*"),
        [*GAN, "trainer.compile=step"],
        ["step._target_=my_series.Waves"],
        ["step._target_=my_gan.discriminator_loss"],
        ["step._target_=my_gan.step", "step.latent=3"],
        with_setting(GAN, "step._target_=my_lbfgs.step"),
        ["step=my_lbfgs.step", "precision=16-mixed"],
    ],
)  # fmt: skip
def test_what_does_not_go_is_refused_in_one_line(
    own: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main([*words, *QUIET, "trainer.max_steps=2", "trainer.check_task=false", "output_dir=r"]) in (1, 2)
    approve_error(capsys.readouterr().err)


def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_were(own: Path) -> None:
    (own / "bad.py").write_text(
        "from trainrun.interfaces import StepOutput\n"
        "class Task:\n"
        "    calls = 0\n"
        "    def count(self, batch):\n"
        "        return len(batch[0])\n"
        "    def step(self, model, batch):\n"
        "        self.calls += 1\n"
        "        loss = model(batch[0]).square().sum()\n"
        "        return StepOutput(loss * (float('nan') if self.calls == 3 else 1.0))\n"
    )
    words = [
        "task=bad.Task", "step._target_=my_lbfgs.step", "optimizer=custom", "optimizer._target_=torch.optim.LBFGS",
        "optimizer.max_iter=5", "trainer.check_task=false", "trainer.max_steps=1", "data.val=null",
    ]  # fmt: skip
    run = package.train(*words, *QUIET, "trainer.nan_policy=skip", "output_dir=run")
    fresh = package.train(*words, *QUIET, "trainer.max_steps=0", "output_dir=fresh")
    assert run.status["skipped_steps"] == 1
    for name, before in fresh.load_model("last").state_dict().items():
        assert torch.equal(before, run.load_model("last").state_dict()[name])


@pytest.mark.parametrize("first_bad", [3, 13])  # in the first step, and in a later one
def test_lbfgs_goes_on_after_a_step_that_was_left_out_as_if_it_had_not_been(
    own: Path, first_bad: int
) -> None:
    (own / "bad.py").write_text(
        "from trainrun.interfaces import StepOutput\n"
        "class Task:\n"
        "    def __init__(self, bad): self.calls, self.bad = 0, bad\n"
        "    def count(self, batch): return len(batch[0])\n"
        "    def step(self, model, batch):\n"
        "        self.calls += 1\n"
        "        loss = model(batch[0]).square().sum()\n"
        "        return StepOutput(loss * (float('nan') if self.calls == self.bad else 1.0))\n"
    )
    words = [
        "task=bad.Task", "step._target_=my_lbfgs.step", "optimizer=custom", "optimizer._target_=torch.optim.LBFGS",
        "optimizer.max_iter=5", "trainer.check_task=false", "data.val=null", "trainer.overfit_batches=1",
        "data.shuffle=false", "scheduler=constant", "trainer.nan_policy=skip", *QUIET,
    ]  # fmt: skip
    bad = package.train(*words, f"task.bad={first_bad}", "trainer.max_steps=4", "output_dir=bad")
    good = package.train(*words, "task.bad=-1", "trainer.max_steps=3", "output_dir=good")
    assert bad.status["skipped_steps"] == 1
    for name, wanted in good.load_model("last").state_dict().items():
        assert torch.equal(bad.load_model("last").state_dict()[name], wanted), name


def test_an_update_that_one_of_several_optimizers_leaves_out_is_counted(own: Path) -> None:
    task = (own / "my_gan.py").read_text(encoding="utf-8")
    spoiled = task.replace(
        "    return softplus(-model.discriminator(real)).sum()",
        "    global calls; calls += 1\n    real = real * float('nan') if calls == 3 else real\n"
        "    return softplus(-model.discriminator(real)).sum()",
    )
    assert spoiled != task
    (own / "my_gan.py").write_text("calls = 0\n" + spoiled, encoding="utf-8")
    words = [*GAN, *QUIET, *SCHEDULES, "trainer.check_task=false", "data.val=null", "trainer.max_steps=6"]
    run = package.train(*words, "trainer.nan_policy=skip", "output_dir=run")
    assert run.status["skipped_steps"] == 1
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert [row["lr/discriminator"] for row in rows][1:5] == pytest.approx([0.01, 0.01, 0.01, 0.0075])


def test_hooks_see_the_gradients_and_the_state_of_each_of_several_optimizers(own: Path) -> None:
    (own / "look.py").write_text(
        "def tell(*words):\n"
        "    with open('seen', 'a') as file:\n"
        "        print(*words, file=file)\n"
        "class Look:\n"
        "    def on_gradients(self, run):\n"
        "        found = [name for name, param in run.model.named_parameters() if param.grad is not None]\n"
        "        tell('look', *sorted({name.split('.')[0] for name in found}))\n"
        "    def on_step_end(self, run, state):\n"
        "        keys = {key for param in run.model.parameters() for key in run.optimizer.state[param]}\n"
        "        tell(*sorted(keys))\n"
    )
    hooks = ["hook.look._target_=look.Look", "monitor.histograms_every_n_steps=1"]
    run = package.train(*GAN, *QUIET, *hooks, "trainer.max_steps=1", "output_dir=run")
    assert (own / "seen").read_text().splitlines() == [
        "look discriminator", "look generator", "exp_avg exp_avg_sq momentum_buffer step",
    ]  # fmt: skip
    (row,) = [row for row in run.metrics if row["kind"] == "histogram"]
    assert sum(name.startswith("gradients/") for name in row["histograms"]) == 8


def test_schedules_count_steps_of_the_run_and_understand_a_warmup_in_epochs(own: Path) -> None:
    task = (own / "my_gan.py").read_text(encoding="utf-8")
    update = '    run.optimizers["discriminator"].update()\n'
    assert update in task
    (own / "my_gan.py").write_text(task.replace(update, 3 * update), encoding="utf-8")
    words = [*with_setting(SCHEDULES, "scheduler.discriminator.warmup_steps=64sample"), "data.batch_size=32"]
    run = package.train(*GAN, *words, *QUIET, "trainer.max_steps=6", "output_dir=run")
    rows = [row for row in run.metrics if row["kind"] == "train"]
    assert [row["lr/discriminator"] for row in rows] == pytest.approx(
        [0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025]
    )
