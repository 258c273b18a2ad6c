"""Models in shards on real ranks under gloo, against one process that holds the whole model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))

from exact_groups import BY_SETTINGS
from exact_parts import composed, histograms_of, parts_of, result
from test_exactness import LOSS_TOLERANCES, TOKENS, TOLERANCES, difference, same_rows
from things import LateModule

from trainrun.assemble.step_function import check_task_before_sharding
from trainrun.checkpoint.files import format_folder_name
from trainrun.checkpoint.load import is_intact_checkpoint, read_checkpoint
from trainrun.errors import ConfigError, PluginError
from trainrun.folder.run_folder import RunDir, read_json, write_json
from trainrun.interfaces import StepOutput
from trainrun.parallel.launch import launch_ranks
from trainrun.train_state import TrainState
from trainrun.training import loop
from trainrun.training.recovery.restore import load_tree

pytestmark = pytest.mark.process
fsdp = LateModule("trainrun.parallel.fsdp")
SCRIPT = Path(__file__).with_name("fsdp_ranks.py")
NUM_RANKS = int(os.environ.get("FSDP_RANKS", "2"))  # 4 in the long check
ADAMW = ("optimizer=adamw", "optimizer.lr=0.03")
DOUBLE = "precision=64"
PICTURES = ("model=exact_parts.PictureNet", "data.train.count=19", "data.train._target_=exact_parts.pictures")
# words, and arguments of the backend
SCENARIOS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a filler in a window": ((DOUBLE, "data.train.count=17", "trainer.accumulate_grad_batches=3"), {}),
    "averaged over epochs": ((DOUBLE, *ADAMW, "data.train.count=9", "trainer.max_epochs=3", "ema=true",
                              "ema.decay=0.5", "trainer.ema.update_every_n_steps=2"), {"reshard": False}),
    "clipped": ((DOUBLE, *TOKENS, "data.train.count=27", "trainer.gradient_clip_val=0.05"), {}),
    "two copies": ((DOUBLE, *TOKENS, "data.train.count=27", "trainer.gradient_clip_val=0.05"), {"replicate": 2}),
    "one sample to evaluate": ((DOUBLE, "data.train.count=16", "data.val._target_=exact_parts.samples",
                                "data.val.count=1"), {}),
    "evaluated averages": ((DOUBLE, *TOKENS, "data.train.count=16", "data.val._target_=exact_parts.tokens",
                            "data.val.count=23", "ema=true", "trainer.val_check_interval=1"), {"reshard": False}),
    "counts with the outputs": ((DOUBLE, *TOKENS, "task=exact_tasks.Rich", "data.train.count=29",
                                 "trainer.accumulate_grad_batches=2", "data.val._target_=exact_parts.tokens",
                                 "data.val.count=9"), {}),
    "a step that is not finite": ((DOUBLE, "data.train.count=19", "data.train.bad=3", "trainer.nan_policy=skip",
                                   "trainer.max_epochs=2", "scheduler=cosine", "ema=true"), {}),
    "clipped, a step that is not finite": ((DOUBLE, "data.train.count=19", "data.train.bad=3",
                                            "trainer.nan_policy=skip", "trainer.gradient_clip_val=0.5"), {}),
    "no target counts": ((DOUBLE, *TOKENS, "data.train.count=19", "+data.train.empty_below=9"), {}),
    "groups": ((DOUBLE, *BY_SETTINGS, "data.train.count=29", "trainer.max_epochs=2"), {}),
    "frozen, trained later": ((DOUBLE, "data.train.count=29", "+model.freeze=layers.0.*", "+model.unfreeze_at=2step",
                               "trainer.max_epochs=2"), {}),
    "LoRA": ((DOUBLE, *ADAMW, "data.train.count=29", "transform=lora", "transform.lora.target=layers.2"), {}),
    "pictures in channels_last": ((DOUBLE, *PICTURES, "trainer.channels_last=true"), {"blocks": "auto"}),
    "pictures, built without memory": ((DOUBLE, *PICTURES, "trainer.channels_last=true"),
                                       {"blocks": "auto", "meta_device": True}),
    "built without memory": ((DOUBLE, *ADAMW, "data.train.count=27", "ema=true", "transform=lora",
                              "transform.lora.target=layers.2"), {"meta_device": True}),
    "hooks and attributes of weights": ((DOUBLE, "model=unusual_weights.Marked", "data.train.count=27",
                                         "trainer.accumulate_grad_batches=3"), {}),
    "float32": ((*TOKENS, *ADAMW, "data.train.count=27"), {}),
    "bf16-mixed": (("precision=bf16-mixed", *TOKENS, "data.train.count=27"), {}),
}  # fmt: skip
SCENARIOS = {name: case for name, case in SCENARIOS.items() if NUM_RANKS % case[1].get("replicate", 1) == 0}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of `fsdp_ranks.py` saw; one start of the ranks for all tests of this file."""
    run = RunDir(tmp_path_factory.mktemp("fsdp"))
    write_json(run.root / "scenarios.json", SCENARIOS)
    for words, _ in SCENARIOS.values():
        composed(words)  # once for this process and the ranks that are forked from it
    env = dict(os.environ, PYTHONPATH=str(SCRIPT.parents[2]), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    command = [sys.executable, str(SCRIPT), str(run.root)]
    assert (
        launch_ranks(lambda attempt: command, NUM_RANKS, run, grace_seconds=5, alone_seconds=60, env=env) == 0
    )
    return {**read_json(run.root / "results.json"), "folder": run.root}


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_with_shards_equal_one_process(name: str, seen: dict[str, Any]) -> None:
    words = SCENARIOS[name][0]
    one = json.loads(json.dumps(result(words, batch_size=8)))
    mode = "64-true" if DOUBLE in words else "bf16-mixed" if "bf16-mixed" in name else "32-true"
    ranks = seen[name]
    assert one["train"]
    assert difference(ranks["weights"], one["weights"]) <= TOLERANCES[mode]
    assert difference(ranks["averaged"], one["averaged"]) <= TOLERANCES[mode]
    same_rows(ranks["train"], one["train"], max(LOSS_TOLERANCES[mode], 1e-11))
    same_rows(ranks["eval"], one["eval"], 1e-12)
    assert ranks["skipped"] == one["skipped"]


def test_a_resume_on_the_same_ranks_is_the_run_that_never_stopped(seen: dict[str, Any]) -> None:
    assert seen["saved"]["tensors"] > 12
    assert seen["saved"]["same"]


def test_a_resume_reads_the_rows_of_each_rank_alone(seen: dict[str, Any]) -> None:
    saved = seen["saved"]
    rows_of_largest = -(-9 // NUM_RANKS)  # layers.0.weight: (9, 5), float64
    assert saved["largest_read"] <= rows_of_largest * 5 * 8
    assert saved["bytes_read"] >= saved["bytes_held"]


def test_one_process_goes_on_from_the_shards_of_all_ranks(seen: dict[str, Any]) -> None:
    words = ("optimizer=adamw", "optimizer.lr=0.03", "data.train.count=88", "ema=true", "ema.decay=0.5",
             "trainer.gradient_clip_val=0.5", "precision=64", "trainer.max_steps=4")  # fmt: skip
    middle, end = (
        read_checkpoint(seen["folder"] / "checkpoints" / format_folder_name(step)) for step in (2, 4)
    )
    one = parts_of(words, batch_size=4 * NUM_RANKS)
    state: TrainState = load_tree(one, "middle", middle.shared, None)
    one.triggers.start(state)
    loop.fit(one, state)
    for part in ("model", "ema"):
        stored = end.shared[part] if part == "model" else end.shared[part]["module"]
        here = one.held.state_dict() if part == "model" else one.ema.state_dict()["module"]
        assert stored.keys() == here.keys()
        for name, tensor in stored.items():
            torch.testing.assert_close(tensor, here[name], rtol=0, atol=1e-12)
    shapes = {name: list(param.shape) for name, param in one.model.named_parameters()}
    assert end.shared["optimizer"]["shapes"] == shapes


def test_each_rank_writes_its_rows_alone_with_the_layout_of_torch(seen: dict[str, Any]) -> None:
    folder = seen["folder"] / "checkpoints" / format_folder_name(4)
    rows = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            layout = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            assert layout.keys() == set(file.keys())
            name = "shared/model/layers.0.weight"
            if name in layout:  # the last of many ranks has no rows
                rows[layout[name]["saved_offsets"][0]] = len(file.get_tensor(name))
    assert sum(rows.values()) == 9
    assert len(rows) == -(-9 // max(rows.values()))
    assert seen["saved"]["bytes_held"] < 0.8 * sum(
        path.stat().st_size for path in folder.glob("*.safetensors")
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_reader_loads_the_shards(seen: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    folder = seen["folder"] / "checkpoints" / format_folder_name(4)
    stored = read_checkpoint(folder).shared["model"]
    tree = {f"shared/model/{name}": torch.zeros_like(tensor) for name, tensor in stored.items()}
    load(tree, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(tree[f"shared/model/{name}"], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("file", ["shared.safetensors", "rank-00001.safetensors", "rank-00001.json"])
def test_a_flipped_bit_in_any_file_is_found(file: str, seen: dict[str, Any]) -> None:
    folder = seen["folder"] / "checkpoints" / format_folder_name(2)
    path = folder / file
    before = path.read_bytes()
    assert is_intact_checkpoint(folder, "run")
    path.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
    try:
        assert not is_intact_checkpoint(folder, "run")
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("name", "error", "key"),
    [("no blocks", "ConfigError", "parallel.blocks="), ("replicate", "ConfigError", "parallel.replicate=3"),
     ("muon", "PluginError", "optimizer: Muon"), ("lbfgs", "PluginError", "LBFGS"),
     ("offload", "ConfigError", "parallel.offload=true"), ("sparse", "ConfigError", "sparse=False"),
     ("a part of the model", "PluginError", "parallel=ddp"),
     ("a gradient of a gradient", "PluginError", "create_graph=True"),
     ("list", "PluginError", "layers.0.weight"), ("object", "PluginError", "layers.0.weight"),
     ("function", "PluginError", "layers.0.weight"), ("view", "PluginError", "layers.0.weight (by kept)"),
     ("buffer", "ConfigError", "kept"), ("parameter", "ConfigError", "kept"),
     ("list, without memory", "PluginError", "layers.0.weight"),
     ("view, without memory", "PluginError", "layers.0.weight (by kept)"),
     ("changed in the forward", "PluginError", "layers.2.weight"),
     ("changed through data", "PluginError", "layers.2.weight"),
     ("post-accumulate hook", "ConfigError", "layers.0.weight"), ("max_norm", "PluginError", "max_norm=1")],
)  # fmt: skip
def test_what_shards_cannot_do_is_refused(name: str, error: str, key: str, seen: dict[str, Any]) -> None:
    assert seen[name][0] == error
    assert key in seen[name][1]


def test_histograms_are_of_whole_tensors(seen: dict[str, Any]) -> None:
    one = histograms_of(None, 8)
    assert len(one) == 8
    assert seen["histograms"].keys() == one.keys()
    for name, (low, high, counts) in one.items():
        assert seen["histograms"][name][:2] == pytest.approx([low, high], abs=1e-12)
        assert seen["histograms"][name][2] == counts


class MeanLoss:
    """A task that returns a mean in the place of a sum."""

    def count(self, batch: Any) -> int:
        return len(batch[1])

    def step(self, model: Any, batch: Any) -> StepOutput:
        inputs, target = batch
        return StepOutput(torch.nn.functional.cross_entropy(model(inputs), target))


def test_a_custom_task_is_checked_while_the_model_is_whole() -> None:
    run = parts_of((), batch_size=8)
    with pytest.raises(PluginError):
        check_task_before_sharding(
            MeanLoss(), run.model, run.train, run.parallel, run.precision, run.counting, print
        )


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("layers.*", ["layers.0", "layers.1"]),  # not layers.0.linear1
        ("*", ["layers.0", "layers.1", "norm"]),  # not the list, which is never called
        (["layers.0.linear?", "layers.1*"], ["layers.0.linear1", "layers.0.linear2", "layers.1"]),
    ],
)
def test_a_pattern_names_whole_blocks(patterns: Any, expected: list[str]) -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, norm=torch.nn.LayerNorm(4))
    modules = dict(model.named_modules())
    assert fsdp.find_blocks(model, patterns) == [modules[name] for name in expected]
    with pytest.raises(ConfigError, match=r"parallel.blocks=layers: .*layers\.\*"):
        fsdp.find_blocks(model, "layers")


def layers_with(change: str) -> torch.nn.Module:
    """Two layers, one of which has a weight that torch cannot divide."""
    first, second = torch.nn.Conv2d(2, 2, 3), torch.nn.Conv2d(2, 2, 3)
    if change == "type":
        second.double()
    elif change == "scalar":
        second.scale = torch.nn.Parameter(torch.ones(()))
    else:
        second.scale = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return torch.nn.Sequential(first, second)


@pytest.mark.parametrize(
    ("change", "named"), [("type", "float64"), ("scalar", "1.scale"), ("complex", "1.scale")]
)
def test_a_weight_that_torch_cannot_divide_is_named(change: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        fsdp.check_weights(layers_with(change))


def test_a_weight_of_two_blocks_is_refused() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    with pytest.raises(ConfigError):
        fsdp.check_tied_weights(torch.nn.Sequential(first, second), [first, second])
