"""Parameter groups in whole runs: as by hand bit for bit, with every schedule, resumed, and refused in one line."""

from __future__ import annotations

from pathlib import Path

import exact_parts
import pytest
import torch
from approved import approve_error, refused
from exact_groups import BY_HAND, BY_SETTINGS, LR, USUAL, groups_of
from exact_parts import parts_of, result
from quiet_runs import QUIET, losses, train, weights

import trainrun as package
from trainrun.cli.main import main
from trainrun.errors import TrainrunError
from trainrun.seeding import derive_seed, seed_everything

MLP = ("model.hidden=[16]", "data.batch_size=64", *QUIET)  # layers.1 and layers.3
NANOGPT = (
    "optimizer.weight_decay=0", "optimizer.groups=[{params: ['layers.*.weight'], weight_decay: 0.1}]",
)  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.1", "ema=true"),
        ("scheduler=warmup_cosine", "scheduler.warmup_steps=2", "precision=bf16-mixed"),
        ("scheduler=exponential", "optimizer.foreach=true"),
        ("scheduler=step", "scheduler.step_size=2", "precision=bf16-true"),
    ],
    ids=" ".join,
)
def test_a_run_with_groups_is_that_with_groups_written_by_hand(words: tuple[str, ...]) -> None:
    more = (*words, "data.train.count=40", "trainer.max_epochs=2")
    ours, theirs = result((*BY_SETTINGS, *more)), result((*BY_HAND, *more))
    assert ours == theirs
    assert ours["train"][0]["lr"] > 0


def test_a_run_with_groups_is_a_loop_of_torch() -> None:
    run = parts_of((*BY_SETTINGS, "data.train.count=29", "data.batch_size=4"))
    seed_everything(derive_seed(run.config.seed))
    model = exact_parts.Net()
    optimizer = torch.optim.SGD(groups_of(model), lr=LR, momentum=0.9, weight_decay=0.1)
    for batch in [batch.data for batch in run.train.epoch(0)]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0].float()), batch[1]).backward()
        optimizer.step()
    exact_parts.fitted(run)
    for mine, its in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)


def test_schedules_multiply_the_rate_of_every_group() -> None:
    groups = f"optimizer.groups=[{{params: 'layers.2.*', lr: {4 * LR}}}]"
    for schedule in ("onecycle", "cosine", "exponential", "wsd"):
        run = parts_of((*USUAL, groups, f"scheduler={schedule}", "data.train.count=40", "data.batch_size=4"))
        for _ in range(7):
            usual, head = (group["lr"] for group in run.optimizer.param_groups)
            assert head == pytest.approx(4 * usual, rel=1e-12), schedule
            run.optimizer.step()
            run.schedule.step()
        assert run.schedule.peak_lrs == [LR, 4 * LR]
        assert run.schedule.rates == {"lr": run.optimizer.param_groups[0]["lr"]}
        run.train.close()


def test_a_run_stopped_in_an_epoch_goes_on_bit_for_bit_and_takes_new_values(workdir: Path) -> None:
    words = (
        *MLP, "optimizer.no_decay=auto", "optimizer.layer_decay=0.5", "scheduler=cosine", "ema=true",
        "optimizer.groups=[{params: 'layers.3.*', lr: 1e-2, betas: [0.8, 0.9]}]", "scheduler.total_steps=12",
    )  # fmt: skip
    whole = train("whole", 12, *words)
    train("part", 5, *words)
    resumed = train("rest", 12, *words, "ckpt_path=part")
    assert [row for row in losses(resumed) if row[0] > 5] == [row for row in losses(whole) if row[0] > 5]
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())
    still = [word.replace("lr: 1e-2, betas: [0.8, 0.9]", "lr: 0") for word in words]
    train("still", 7, *still, "ckpt_path=part")
    before, after = weights("part"), weights("still")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"layers.3.weight", "layers.3.bias"}
    with refused(TrainrunError):
        train("other", 7, *MLP, "ckpt_path=part")


def test_scaling_with_the_batch_scales_the_rate_of_every_group() -> None:
    words = (*BY_SETTINGS, "scheduler.lr_scaling=linear", "scheduler.base_batch_size=4", "data.batch_size=8")
    plain = parts_of((*BY_SETTINGS, "data.batch_size=8")).schedule.peak_lrs
    assert parts_of(words).schedule.peak_lrs == pytest.approx([2 * rate for rate in plain])


def test_the_first_lines_say_what_was_understood(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("optimizer.no_decay=auto", "layer_decay=0.5", "trainer.max_steps=2", "output_dir=run")
    assert main([*MLP, *words]) == 0
    told = Path("run", "run.log").read_text()
    assert "AdamW, lr 0.001 and 0.0005, schedule" in capsys.readouterr().out
    assert "optimizer.layer_decay=0.5: depths 1 to 2 layers.1 ... layers.3; lr x 0.5 to 1" in told
    assert "optimizer: AdamW: 2 tensors decay, 2 do not, 4 groups" in told
    assert "AdamW, lr 0.001 and 0.0005, schedule" in told


def test_matrices_alone_decay_as_in_nanogpt(workdir: Path) -> None:
    ends = [
        package.train(*MLP, *words, "trainer.max_steps=5", f"output_dir=run{number}").load_model("last").state_dict()
        for number, words in enumerate([NANOGPT, ("optimizer.weight_decay=0.1", "optimizer.no_decay=auto")])
    ]  # fmt: skip
    assert all(map(torch.equal, ends[0].values(), ends[1].values()))


@pytest.mark.parametrize(
    "words",
    [
        ["optimizer.groups=3"],
        ["optimizer.groups=[{lr: 1}]"],
        ["optimizer.groups=[{params: a}]"],
        ["optimizer.groups=[{params: a, lr: -1}]"],
        ["optimizer.groups=[{params: a, fused: true}]"],
        ["optimizer.groups=[{params: a, weigth_decay: 1}]"],
        ["optimizer.groups=[{params: layer.1.*, lr: 1}]"],
        ["optimizer.no_decay=yes"],
        ["layer_decay=2"],
        ["optimizer.layer_decai=0.5"],
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_in_one_line(
    workdir: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main([*MLP, *words, "output_dir=run"]) == 2
    approve_error(capsys.readouterr().err)
