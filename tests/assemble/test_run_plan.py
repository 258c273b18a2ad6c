"""What follows from the names of metrics."""

from __future__ import annotations

import dataclasses

import pytest
from approved import refused

from trainrun.assemble.run_plan import (
    choose_metric_direction,
    collect_batch_sizes,
    convert_to_steps,
    keep_global_batch,
    set_accumulation,
)  # fmt: skip
from trainrun.config.compose import compose_run
from trainrun.config.schema import CheckpointConfig, EarlyStoppingConfig, RunConfig
from trainrun.errors import ConfigError
from trainrun.limits import Duration
from trainrun.task.metrics.directions import describe_assumed_direction
from trainrun.training.triggers import Lengths


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("val/loss", "min"), ("val/day/loss", "min"), ("val/bpb", "min"), ("val/nats_per_token", "min"),
        ("val/reconstruction", "min"), ("val/hamming_distance", "min"), ("val/kl", "min"), ("val/rmse/0", "min"),
        ("val/mse/1", "min"), ("val/word_error_rate", "min"), ("val/nll", "min"), ("val/ppl", "min"),
        ("val/log_cosh_error", "min"), ("val/cross_entropy", "min"), ("val/soft", "min"),
        ("val/acc", "max"), ("val/f1", "max"), ("val/f1/3", "max"), ("val/top5", "max"), ("val/r2", "max"),
        ("val/exact_match", "max"), ("val/average_precision", "max"), ("val/iou/0", "max"), ("val/mine", "max"),
        ("val/soft_dice", "max"), ("val/hard_acc", "max"), ("val/reconstruction_accuracy", "max"),
        ("val/brier_score", "min"), ("val/fid_score", "min"), ("val/wer_score", "min"), ("val/top_1_err", "min"),
        ("val/f1_score", "max"), ("val/soft_score", "max"), ("val/hidden", "min"), ("val/fpr", "min"),
        ("val/edit_distance_accuracy", "max"), ("val/distance_correlation", "max"), ("val/acc_loss", "min"),
        ("val/mismatch_rate", "min"), ("val/inaccuracy", "min"), ("val/fpr_at_95_recall", "min"),
        ("val/recall_at_5_fpr", "max"), ("val/fpr@tpr95_recall", "min"),
    ],
)  # fmt: skip
def test_the_name_of_a_metric_says_which_way_is_better(metric: str, better: str) -> None:
    assert choose_metric_direction("checkpoint", metric, CheckpointConfig(monitor=metric)) == better


@pytest.mark.parametrize(
    ("metric", "wanted"),
    [
        ("val/acc", CheckpointConfig(mode="min")), ("val/day/acc", EarlyStoppingConfig(mode="min")),
        ("val/loss", CheckpointConfig(mode="max", monitor="val/loss")), ("val/iou", CheckpointConfig(mode="min")),
    ],
)  # fmt: skip
def test_a_mode_against_the_name_of_the_metric_is_refused(
    metric: str, wanted: CheckpointConfig | EarlyStoppingConfig
) -> None:
    better = "smaller; use checkpoint.mode=min" if wanted.mode == "max" else "larger; use checkpoint.mode=max"
    with pytest.raises(ConfigError, match=f"checkpoint.mode={wanted.mode}: {metric} is better when {better}"):
        choose_metric_direction("checkpoint", metric, wanted)


def test_a_mode_beside_a_named_metric_is_believed() -> None:
    for metric in ("val/perplexity", "val/mine"):  # of a codebook it is better when larger
        assert (
            choose_metric_direction("checkpoint", metric, CheckpointConfig(mode="max", monitor=metric))
            == "max"
        )
    assert (
        choose_metric_direction("checkpoint", None, CheckpointConfig(mode="max")) == "min"
    )  # nothing is validated


def test_a_name_that_says_nothing_is_told_where_nobody_says_more() -> None:
    config = RunConfig()
    assert describe_assumed_direction(config, "val/loss") == ""
    assert describe_assumed_direction(config, "val/mine") == (
        "checkpoint.mode=auto: val/mine is taken as better when larger; if it is not, set checkpoint.mode=min"
    )
    said = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, mode="min"))
    assert describe_assumed_direction(said, "val/mine") == ""
    assert describe_assumed_direction(config, None) == ""


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 6), (2, 3), (6, 1)])
def test_global_batch_is_divided_among_ranks_and_micro_batches(world_size: int, accumulate: int) -> None:
    config = compose_run(["data.batch_size=8", "data.global_batch_size=48"]).config
    assert set_accumulation(config, world_size).trainer.accumulate_grad_batches == accumulate


def test_global_batch_that_does_not_come_out_even_is_refused() -> None:
    config = compose_run(["data.batch_size=8", "data.global_batch_size=48"]).config
    with refused(ConfigError, "data.global_batch_size"):
        set_accumulation(config, 4)


@pytest.mark.parametrize(
    ("ranks", "typed", "accumulate"),
    [
        (1, (), 8),
        (2, (), 4),
        (4, (), 2),
        (4, ("data.batch_size",), 2),
        (4, ("trainer.accumulate_grad_batches",), 4),
        (3, ("data.global_batch_size",), 4),
    ],
)
def test_a_resume_on_other_ranks_keeps_the_global_batch(
    ranks: int, typed: tuple[str, ...], accumulate: int
) -> None:
    config = compose_run(["data.batch_size=8", "trainer.accumulate_grad_batches=4"]).config
    earlier = collect_batch_sizes(config, 2)
    notes: list[str] = []
    kept = keep_global_batch(config, earlier, ranks, typed, notes)
    assert kept.trainer.accumulate_grad_batches == accumulate
    assert len(notes) == (ranks != 2 and accumulate * ranks == 8)
    assert keep_global_batch(config, None, ranks, typed, notes) is config
    smaller = compose_run(["data.batch_size=4", "trainer.accumulate_grad_batches=4"]).config
    assert (
        keep_global_batch(smaller, earlier, 2, (), notes) is smaller
    )  # on the same ranks the user's own batch


def test_a_global_batch_that_other_ranks_cannot_keep_is_refused_with_the_nearest() -> None:
    config = compose_run(["data.batch_size=8", "trainer.accumulate_grad_batches=4"]).config
    with refused(ConfigError, "data.batch_size"):
        keep_global_batch(config, collect_batch_sizes(config, 2), 3, (), [])
    whole = compose_run(["data.batch_size=32"]).config
    with refused(ConfigError, "data.batch_size"):  # and with the batch of a rank that keeps it
        keep_global_batch(whole, collect_batch_sizes(whole, 1), 2, (), [])


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (Duration(1.5, "epoch"), 8),
        (Duration(0.2, "epoch"), 1),
        (Duration(1.2, "epoch"), 6),  # 1.2 * 5 is not exact
        (Duration(21, "sample"), 6),
        (Duration(20, "sample"), 5),
    ],
)
def test_a_length_is_rounded_up_to_whole_steps(duration: Duration, steps: int) -> None:
    lengths = Lengths(steps_per_epoch=5, samples_per_step=4, samples_per_epoch=20)
    assert convert_to_steps("trainer.max_duration", duration, lengths, task=None) == steps
