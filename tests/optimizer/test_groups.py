"""Parameter groups against torch's own written down by hand, and what is said of those that do nothing."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from approved import approve, refused
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, Rprop

from trainrun.errors import ConfigError, PluginError
from trainrun.model.cnn import Cnn
from trainrun.model.gpt import Gpt
from trainrun.model.mlp import Mlp
from trainrun.model.resnet import ResNet
from trainrun.optimizer.build_optimizer import build_optimizer
from trainrun.optimizer.groups import GroupRules, count_layers_above, parameters_without_decay
from trainrun.optimizer.muon import Muon
from trainrun.optimizer.plain_step import FusedAdam, build_plain_step

HEAD = {"params": "layers.4.*", "lr": 0.02, "weight_decay": 0.3}
RULES = GroupRules("optimizer", [HEAD], "auto", 0.5)


def network() -> Mlp:
    torch.manual_seed(0)
    return Mlp([6], 3, hidden=[8, 5])  # layers.0, 2 and 4


def by_hand(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    first, second, last = (model.get_submodule(f"layers.{number}") for number in (0, 2, 4))
    return [
        {"params": [second.weight], "lr": lr * 0.5},
        {"params": [second.bias], "lr": lr * 0.5, "weight_decay": 0.0},
        {"params": [first.weight], "lr": lr * 0.5**2},
        {"params": [first.bias], "lr": lr * 0.5**2, "weight_decay": 0.0},
        {"params": list(last.parameters()), "lr": 0.02, "weight_decay": 0.3},
    ]


def trained(model: nn.Module, update: Callable[[], Any]) -> list[Tensor]:
    for step in range(5):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).square().sum().backward()
        update()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("factory", "keywords"),
    [(AdamW, {"lr": 0.01, "weight_decay": 0.1}), (SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1})],
)
def test_groups_of_the_settings_are_those_written_by_hand(
    factory: Callable[..., Optimizer], keywords: dict[str, Any]
) -> None:
    ours, theirs = network(), network()
    optimizer, note = build_optimizer(factory, keywords, ours, rules=RULES)
    plain = factory(
        by_hand(theirs, 0.01), **keywords, **({"fused": True} if "fused" in note.split(",")[1][:7] else {})
    )
    for group, wanted in zip(optimizer.param_groups, plain.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k not in ("params", "fused")} == {
            k: v for k, v in wanted.items() if k not in ("params", "fused")
        }
    step = build_plain_step(optimizer)
    assert isinstance(step, FusedAdam) == (factory is AdamW)
    assert all(map(torch.equal, trained(ours, step), trained(theirs, plain.step)))
    assert note.splitlines()[1:] == [
        "optimizer.layer_decay=0.5: depths 1 to 3 layers.0 ... layers.4; lr x 0.25 to 1",
        f"optimizer: {factory.__name__}: 4 tensors decay, 2 do not, 5 groups",
    ]


def test_muon_keeps_both_its_rates() -> None:
    model = network()
    words = {"lr": 0.01, "adamw_lr": 0.003, "weight_decay": 0.1}
    rules = GroupRules("optimizer", [{"params": "layers.0.bias", "lr": 0.5}], "auto", 0.5)
    optimizer, note = build_optimizer(Muon, words, model, rules=rules)
    found = [(group["muon"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [
        (True, 0.005, 0.1),  # layers.2.weight
        (True, 0.0025, 0.1),  # layers.0.weight
        (False, 0.003, 0.1),  # layers.4.weight
        (False, 0.003, 0.0),  # layers.4.bias
        (False, 0.0015, 0.0),  # layers.2.bias
        (False, 0.5, 0.0),  # layers.0.bias
    ]
    assert "2 matrices by Muon, 4 other parameters by AdamW" in note
    before = [param.detach().clone() for param in model.parameters()]
    assert not any(map(torch.equal, before, trained(model, optimizer.step)))


def test_the_first_pattern_that_fits_holds() -> None:
    groups = [
        {"params": ["layers.4.bias", "layers.0.bias"], "lr": 0.0},
        {"params": "layers.4.*", "lr": 0.1},
        {"params": "*", "weight_decay": 0.0},
    ]
    model = network()
    optimizer, _ = build_optimizer(
        AdamW, {"lr": 0.01, "weight_decay": 0.2}, model, rules=GroupRules("optimizer", groups)
    )
    rates = {param: group["lr"] for group in optimizer.param_groups for param in group["params"]}
    assert [rates[param] for param in model.parameters()] == [0.01, 0.0, 0.01, 0.01, 0.1, 0.0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.2, 0.0]


def test_momentum_of_a_group_begins_as_torchs_own() -> None:
    """With a dampening the fused update would begin with a momentum of other memory."""
    groups = [{"params": "layers.0.*", "momentum": 0.9, "dampening": 0.5}]
    model = network()
    optimizer, _ = build_optimizer(SGD, {"lr": 0.1}, model, rules=GroupRules("optimizer", groups))
    assert not any(group["fused"] for group in optimizer.param_groups)
    theirs = network()
    plain = SGD(
        [
            {"params": list(theirs.parameters())[2:]},
            {"params": theirs.layers[0].parameters(), "momentum": 0.9, "dampening": 0.5},
        ],
        lr=0.1,
    )
    assert all(map(torch.equal, trained(model, optimizer.step), trained(theirs, plain.step)))


class Listed(nn.Module):
    """With every kind of parameter that is told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.names = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm((3, 4))
        self.rms = nn.RMSNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.image_bias = nn.Parameter(torch.zeros(4, 4))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.names.weight

    def no_weight_decay(self) -> set[str]:
        return {"token", "gone"}


def test_what_has_no_decay() -> None:
    model = Listed()
    found = parameters_without_decay(model)
    decays = {name for name, param in model.named_parameters() if param not in found}
    assert decays == {"attention.in_proj_weight", "attention.out_proj.weight"}


def test_a_tied_weight_has_both_names() -> None:
    rules = GroupRules("optimizer", [{"params": "head.weight", "lr": 0.5}])
    model = Listed()
    optimizer, _ = build_optimizer(AdamW, {}, model, rules=rules)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]
    assert optimizer.param_groups[1]["params"] == [model.names.weight]


class Block(nn.Module):
    """With inner rows that are no depths: experts, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(9))
        self.net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Transformer(nn.Module):
    """As in timm: a raw token, a stem, blocks, a norm, and two heads; an embedding that comes last."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.stem = nn.Conv2d(3, 4, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.places = nn.Embedding(7, 4)


class Stages(nn.Module):
    """As ResNet-34 of torchvision: stages of 2, 3 and 1 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(*(Block() for _ in range(number))) for number in (2, 3, 1)
        )
        self.fc = nn.Linear(4, 2)


def above_by_prefix(model: nn.Module) -> dict[str, int]:
    """The number of layers above each part of the model, by the first two names."""
    above, _ = count_layers_above(model, list(model.parameters()), "optimizer.layer_decay=0.5")
    return {
        ".".join(name.split(".")[:2]).removesuffix(".weight").removesuffix(".bias"): above[param]
        for name, param in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (
            Transformer(),
            {"token": 4, "stem": 4, "blocks.0": 3, "blocks.1": 2, "blocks.2": 1, "norm": 0, "heads.0": 0,
             "heads.1": 0, "places": 4},
        ),
        (
            Gpt(11, context=8, layers=2, width=8, heads=2),
            {"tokens": 3, "blocks.0": 2, "blocks.1": 1, "norm": 0},
        ),
        (Mlp([6], 3, hidden=[8, 5], norm="batch"),  # norms count with the layer before
         {"layers.0": 2, "layers.1": 2, "layers.3": 1, "layers.4": 1, "layers.6": 0}),
        (Cnn([1, 8, 8], 3, width=4),
         {"layers.0": 3, "layers.1": 3, "layers.4": 2, "layers.5": 2, "layers.8": 1, "layers.11": 0}),
        (ResNet([3, 8, 8], 3, blocks=[1, 1], width=4),
         {"layers.0": 3, "layers.1": 3, "layers.3": 2, "layers.5": 1, "head": 0}),
        (nn.Sequential(Transformer(2), nn.Linear(2, 2)),
         {"0.token": 3, "0.stem": 3, "0.blocks": 1, "0.norm": 0, "0.heads": 0, "0.places": 3, "1": 0}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_the_depth_of_every_part(model: nn.Module, wanted: dict[str, int]) -> None:
    assert above_by_prefix(model) == wanted


@pytest.mark.parametrize(
    "model",
    [
        nn.ModuleDict({"text": Transformer(), "image": Transformer(2)}),
        nn.ModuleDict({name: nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)) for name in ("a", "b")}),
        Stages(),
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    ],
)  # fmt: skip
def test_where_the_depth_is_not_clear_it_is_refused(model: nn.Module) -> None:
    with refused(ConfigError, "optimizer.layer_decay=0.5: ") as caught:
        build_optimizer(AdamW, {}, model, rules=GroupRules("optimizer", layer_decay=0.5))
    approve(str(caught.value))


def test_one_of_several_optimizers_has_the_depth_of_its_own_part() -> None:
    model = nn.ModuleDict({"text": Transformer(), "image": Transformer(2)})
    params = list(model["image"].parameters())
    rules = GroupRules("optimizer.image", layer_decay=0.5)
    optimizer, note = build_optimizer(AdamW, {"lr": 1.0}, model, params, rules=rules)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5, 0.25, 0.125]
    assert (
        "optimizer.image.layer_decay=0.5: depth 0 image.token, image.stem.weight, image.stem.bias, ..."
        in note
    )
    rules = GroupRules("optimizer.image", [{"params": "text.norm.*", "lr": 1.0}])
    with refused(ConfigError):
        build_optimizer(AdamW, {}, model, params, rules=rules)


def frozen() -> nn.Module:
    model = network()
    model.layers[0].requires_grad_(False)
    return model


def test_a_group_may_be_of_frozen_parameters_which_are_trained_later() -> None:
    rules = GroupRules("optimizer", [{"params": "layers.0.*", "lr": 1.0}])
    optimizer, note = build_optimizer(AdamW, {}, frozen(), rules=rules)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1.0]
    assert "2 tensors are frozen" in note


@pytest.mark.parametrize(
    ("factory", "groups", "more", "key"),
    [
        (AdamW, [{"params": "layer.4.*", "lr": 1.0}], {}, "optimizer.groups[0].params=layer.4.*: "),
        (AdamW, [{"params": "*", "lr": 1.0}, {"params": "layers.4.*", "lr": 2.0}], {},
         "optimizer.groups[1].params=layers.4.*: "),
        (AdamW, [{"params": "*", "betas": [0.9, 1.5]}], {}, "optimizer.groups[0]: Invalid beta parameter"),
        (Rprop, [], {"no_decay": "auto"}, "optimizer.no_decay: "),
        (torch.optim.LBFGS, [{"params": "layers.4.*", "lr": 1.0}], {}, "per-parameter options"),
        (lambda params, lr=0.1, boost=1.0: SGD(params, lr=lr * boost), [{"params": "*", "boost": 2.0}], {},
         "optimizer.groups[0].boost: "),
    ],
    ids=["no name matches", "earlier group matches", "wrong value", "no such option", "no groups", "option of all"],
)  # fmt: skip
def test_groups_that_do_nothing_are_refused_in_one_line(
    factory: Callable[..., Optimizer], groups: list[dict[str, Any]], more: dict[str, Any], key: str
) -> None:
    with pytest.raises((ConfigError, PluginError), match=re.escape(key)):
        build_optimizer(factory, {}, frozen(), rules=GroupRules("optimizer", groups, **more))


def test_an_optimizer_that_makes_groups_of_its_own_is_refused() -> None:
    def joined(params: Any) -> Optimizer:
        return SGD([param for group in params for param in group["params"]])

    rules = GroupRules("optimizer", [{"params": "layers.4.*", "lr": 1.0}])
    with refused(PluginError):
        build_optimizer(joined, {}, network(), rules=rules)


def test_groups_that_a_class_makes_itself_are_divided_further() -> None:
    class Grouped(SGD):
        @staticmethod
        def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
            return [{"params": list(model.parameters()), "lr": 0.25, "momentum": 0.5}]

    rules = GroupRules("optimizer", [{"params": "layers.4.*", "lr": 1.0}], layer_decay=0.5)
    optimizer, _ = build_optimizer(Grouped, {}, network(), rules=copy.deepcopy(rules))
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [
        (0.125, 0.5), (0.0625, 0.5), (1.0, 0.5),
    ]  # fmt: skip
