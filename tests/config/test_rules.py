"""Every rule of the table is broken by a config, which is told why and what to write in its place."""

from __future__ import annotations

from typing import Any

import pytest

from trainrun.config.rules import (
    GPU_RULES,
    RULES,
    STEP_RULES,
    Rule,
    check_gpu_settings,
    iterate_combination_faults,
    iterate_step_obstacles,
)
from trainrun.config.schema import DISTILLATION, RunConfig, replace_values, settings

REGRESSION = {"_target_": "trainrun.task.regression.Regression"}
NAMED = {"a": {"_target_": "my.load"}, "b": {"_target_": "my.load"}}
STEP = {"_target_": "my.step"}
MIX = {"a": 1.0, "b": 1.0}
AGAIN, MOVED = {"trainer.gradient_checkpointing": "full"}, {"trainer.activation_offload": True}
GRAPHS = {"trainer.cuda_graphs": True}
COMPILED = {"trainer.compile.scope": "model"}
ROLLBACK = {"trainer.nan_policy": "rollback"}

FSDP: dict[str, Any] = {"parallel.mode": "fsdp"}

# In the order of the table: values that break each rule.
BREAKS: tuple[dict[str, Any], ...] = (
    {"data.padding": "pack", "task": REGRESSION},
    {"trainer.max_epochs": None},
    {"trainer.check_val_every_n_epoch": 2, "trainer.val_check_interval": 100},
    {"data.global_batch_size": 64, "trainer.accumulate_grad_batches": 2},
    {"data.val_transform": "same"},
    {"data.test_transform": "same"},
    {"parallel.devices": [1, 1]},
    {"parallel.devices": 2},
    {**FSDP, "checkpoint.adapter_only": True, "init_from": "a"},
    {**FSDP, "precision.fp8": True, "precision.mode": "bf16-mixed"},
    {**FSDP, "parallel.offload": True, "parallel.accelerator": "cpu"},
    {"step": STEP, "parallel.static_graph": True},
    {"trainer.deterministic": True, "trainer.benchmark": True},
    {"trainer.detect_anomaly": True, "precision.mode": "16-mixed"},
    {"trainer.detect_anomaly": True, **COMPILED},
    {"init_from": "a.pt", "ckpt_path": "run"},
    {"checkpoint.adapter_only": True},
    {"checkpoint.enabled": False, **ROLLBACK},
    {"checkpoint.save_last": False, **ROLLBACK},
    {"precision.fp8": True, "precision.mode": "32-true"},
    {"scheduler": {"warmup_steps": 20}, "trainer.max_steps": 10},
    {"scheduler": {"interval": "epoch"}, "loop": {"_target_": "my.loop"}},
    {"data.mix": MIX, "data.train": NAMED, "data.sampling": "balanced"},
    {"data.mix": {"a": 1.0}, "data.train": NAMED},
    {"data.sampling": "weighted"},
    {"data.shuffle_buffer": 100, "data.shuffle": False},
    {"data.mix": MIX, "data.train": NAMED, "data.shuffle": False},
    {"data.sampling": "balanced", "task": {"class_weights": "balanced"}},
    {"data.sampling": "balanced", "data.padding": "pack"},
    {"data.sampling": "balanced", "data.truncate": "split"},
    {"data.fold": 1},
    {"data.stratified": True},
    {"data.fold_groups": "patient"},
    {"data.folds": 5, "data.fold": 0, "data.stratified": True, "data.fold_groups": "patient"},
    {"data.folds": 5},
    {"data.folds": 5, "data.fold": 5},
    {"data.folds": 5, "data.fold": 0, "data.mix": MIX, "data.train": NAMED},
    {**GRAPHS, **COMPILED},
    {**GRAPHS, "parallel.accelerator": "cpu"},
    {**AGAIN, **COMPILED},
    {**AGAIN, **GRAPHS},
    {**AGAIN, "parallel.sync_batchnorm": True},
    {**MOVED, **AGAIN},
    {**MOVED, **COMPILED},
    {**MOVED, **GRAPHS},
)
STEP_BREAKS: tuple[dict[str, Any], ...] = (
    {"parallel.mode": "ddp"},
    {"precision.mode": "16-mixed"},
    {"step": STEP},
    {"loop": {"_target_": "my.loop"}},
    {"model": {"unfreeze_at": 3}},
    {"task": {"_target_": DISTILLATION}},
    {"trainer.compile.dynamic": True},
    {"trainer.compile.mode": "reduce-overhead"},
    {"data.padding": "token_budget"},
)
CASES = [*zip(RULES, BREAKS, strict=True), *zip(STEP_RULES, STEP_BREAKS, strict=True),
         *zip(GPU_RULES, (MOVED,), strict=True)]  # fmt: skip


@pytest.mark.parametrize(("rule", "values"), CASES, ids=[rule.setting for rule, _ in CASES])
def test_each_rule_is_broken_by_its_config_alone(rule: Rule, values: dict[str, Any]) -> None:
    config = replace_values(RunConfig(), values)
    assert not rule.broken(RunConfig())
    assert rule.broken(config)
    fault = rule.build_fault(config)
    assert fault.key in {*settings(), "parallel", "precision", "task", "step", "loop", "model.unfreeze_at",
                         "scheduler.warmup_steps", "scheduler.interval"}  # fmt: skip
    assert str(fault).startswith(fault.key)
    assert "{" not in str(fault).replace(str(values.get("data.mix")).replace("'", ""), "")
    assert rule.why
    assert rule.instead


@pytest.mark.parametrize(("rule", "values"), list(zip(RULES, BREAKS, strict=True)))
def test_each_rule_of_pairs_is_told(rule: Rule, values: dict[str, Any]) -> None:
    config = replace_values(RunConfig(), values)
    assert rule.build_fault(config) in list(iterate_combination_faults(config))


@pytest.mark.parametrize("values", STEP_BREAKS)
def test_a_step_of_one_graph_names_what_stands_against_it(values: dict[str, Any]) -> None:
    config = replace_values(RunConfig(), {**values, "trainer.compile.scope": "step"})
    (obstacle,) = iterate_step_obstacles(config)
    told = [fault for fault in iterate_combination_faults(config) if fault.key == "trainer.compile.scope"]
    assert len(told) == 1
    assert obstacle[0] in told[0].text


def test_a_gpu_is_needed_by_what_moves_tensors_to_the_host() -> None:
    config = replace_values(RunConfig(), MOVED)
    assert [fault.key for fault in check_gpu_settings(config, "cpu")] == ["trainer.activation_offload"]
    assert check_gpu_settings(config, "cuda") == []
