"""`init_from` takes a part: names that differ, tensors left out, tied ones, sharded files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from approved import approve, refused
from safetensors.torch import save_file
from torch import Tensor, nn

from trainrun.checkpoint.weights import load_initial
from trainrun.config.schema import InitConfig
from trainrun.errors import CheckpointError
from trainrun.parallel.single import Single
from trainrun.transform.lora import lora

BOTH = {"embedding.weight": torch.ones(7, 4), "head.weight": torch.zeros(7, 4)}
HERE = Single(torch.device("cpu"))


def network(seed: int = 0, classes: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"body": nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)), "head": nn.Linear(5, classes)}
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def taken(model: nn.Module, tensors: dict[str, Tensor], path: Path, **chosen: object) -> list[str]:
    save_file(tensors, path / "w.safetensors")
    return load_initial(model, str(path / "w.safetensors"), HERE, InitConfig(**chosen)).lines


class OwnNorm(nn.BatchNorm1d):
    """One of the user's own."""


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, OwnNorm])
def test_a_layer_of_torch_whose_statistics_are_off_is_given_none(
    kind: type[nn.BatchNorm1d], tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 5), kind(5, track_running_stats=False))
    there = copied(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)))
    assert (
        "only in the file: 1.num_batches_tracked, 1.running_mean, 1.running_var"
        in taken(model, there, tmp_path, strict=False)[-1]
    )
    assert model[1].running_mean is None


def test_a_buffer_that_a_forward_makes_is_filled_and_told(tmp_path: Path) -> None:
    there, model = copied(network(1)), network(0)
    model.register_buffer("scale", None)
    lines = taken(model, there | {"scale": torch.ones(3)}, tmp_path)
    assert lines[1:] == ["weights: nothing here before, as it is there: scale"]
    assert model.scale.tolist() == [1, 1, 1]


def test_a_head_of_another_shape_is_left_out(tmp_path: Path) -> None:
    there, model = copied(network(1, classes=9)), network(0)
    before = copied(model)
    lines = taken(model, there, tmp_path, skip="head.*")
    assert lines[1] == "weights: skipped (init.skip): head.weight, head.bias"
    after = model.state_dict()
    assert all(
        torch.equal(after[name], (before if name.startswith("head") else there)[name]) for name in after
    )


def test_without_strict_what_fits_is_taken_and_the_rest_is_told(tmp_path: Path) -> None:
    there = copied(network(1, classes=9)) | {"more": torch.ones(2)}
    del there["body.0.bias"]
    model, before = network(0), copied(network(0))
    lines = taken(model, there, tmp_path, strict=False)
    assert lines[1:] == [
        "weights: not in the file, so they stay as initialised: body.0.bias",
        "weights: only in the file: more",
        "weights: of another shape in the file, so they stay as initialised: "
        "head.weight is (9, 5) in the checkpoint and (3, 5) in the model, "
        "head.bias is (9,) in the checkpoint and (3,) in the model",
    ]
    assert torch.equal(model.state_dict()["body.0.weight"], there["body.0.weight"])
    assert torch.equal(model.state_dict()["body.0.bias"], before["body.0.bias"])


def test_weights_with_lora_are_to_be_merged_first(tmp_path: Path) -> None:
    with refused(CheckpointError):
        taken(network(), copied(lora(network(), rank=1)), tmp_path)


@pytest.mark.parametrize(
    ("there", "rename"),
    [
        ("backbone.{}", {"backbone.": ""}),
        ("{}", None),
        ("module.{}", {"other.": "", "module.": ""}),
        ("x{}", {"x": ""}),
    ],
)
def test_names_may_begin_in_another_way(tmp_path: Path, there: str, rename: dict[str, str] | None) -> None:
    source, model = copied(network(1)), network(0)
    renamed = {there.format(name): tensor for name, tensor in source.items()}
    if rename and "other." in rename:
        renamed["other.head.lost"] = torch.ones(1)
    taken(model, renamed, tmp_path, rename=rename, strict=not (rename and "other." in rename))
    assert all(torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items())


def test_a_bare_network_becomes_a_part_of_another(tmp_path: Path) -> None:
    source, model = copied(network(1)["body"]), network(0)
    lines = taken(model, source, tmp_path, rename={"*": "body."}, skip=["head.*"])
    assert lines[0].startswith("weights: 7 tensors of ")
    assert torch.equal(model.state_dict()["body.0.weight"], source["0.weight"])


def test_one_name_of_a_tied_tensor_is_enough(tmp_path: Path) -> None:
    weights = torch.randn(7, 4)
    for name in ("embedding.weight", "head.weight"):
        model = Tied()
        taken(model, {name: weights}, tmp_path)
        assert torch.equal(model.embedding.weight, weights)
        assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize(
    ("tensors", "chosen"),
    [
        (BOTH, {}),
        ({"embedding.weight": torch.ones(7, 4)}, {"skip": "haed.*"}),
        ({"embedding.weight": torch.ones(7, 4)}, {"rename": {"net.": ""}}),
        (BOTH, {"rename": {"embedding.": "head."}}),
        ({"embedding.weight": torch.ones(7, 4)}, {"skip": "*"}),
        ({"embedding.weight": torch.ones(7, 5)}, {"strict": False}),
        ({"net.embedding.weight": torch.ones(7, 4)}, {}),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], chosen: dict[str, object]
) -> None:
    model = Tied()
    before = copied(model)
    with pytest.raises(CheckpointError) as error:
        taken(model, tensors, tmp_path, **chosen)
    approve(str(error.value))
    assert chosen.get("strict", True) or "init.strict" not in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def sharded(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard)
    return places


def test_sharded_files_are_read_by_their_index_or_folder(tmp_path: Path) -> None:
    source, index = copied(network(1)), tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": sharded(tmp_path, source)}))
    for place in (tmp_path, index):
        model = network(0)
        load_initial(model, str(place), HERE)
        assert all(torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [
        {"head.weight": "../secret.safetensors"},
        {"head.weight": "model-9.safetensors"},
        {"more": "model-0.safetensors"},
        None,
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, change: dict[str, str] | None) -> None:
    places = sharded(tmp_path, copied(network(1)))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[1]" if change is None else json.dumps({"weight_map": places | change}))
    with pytest.raises(CheckpointError) as error:
        load_initial(network(0), str(index), HERE)
    approve(str(error.value))
