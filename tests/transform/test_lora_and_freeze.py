"""LoRA and freezing, alone: what is trained, that nothing changes at first, and that merging keeps the outputs."""

from __future__ import annotations

import copy

import torch
from approved import refused
from torch import nn

from trainrun.model.gpt import Gpt
from trainrun.transform.freeze import FrozenParameters
from trainrun.transform.lora import LoraLinear, lora, merge_lora


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_lora_begins_as_the_network_it_is_given_and_trains_its_own_matrices_alone() -> None:
    model, x = network(), torch.randn(5, 4)
    before = model(x)
    model = lora(model, rank=2, target=["0", "2.*"])
    assert torch.equal(model(x), before)
    layers = ["0", "2.0", "2.1"]
    assert trained(model) == [f"{name}.{half}" for name in layers for half in ("lora_a", "lora_b")]
    assert model[0].lora_a.shape == (2, 4)
    assert model[0].lora_b.shape == (8, 2)


def test_correction_is_the_product_of_its_matrices_times_alpha_by_rank() -> None:
    layer, x = LoraLinear(nn.Linear(4, 3), rank=2, alpha=6.0), torch.randn(5, 4)
    nn.init.normal_(layer.lora_b)
    correction = 6.0 / 2 * x @ (layer.lora_b @ layer.lora_a).T
    torch.testing.assert_close(layer(x), layer.base(x) + correction)


def test_other_layers_are_trained_if_they_are_named() -> None:
    model = lora(network(), rank=1, target="0", train="2.1.*")
    assert trained(model) == ["0.lora_a", "0.lora_b", "2.1.weight", "2.1.bias"]
    assert isinstance(model[2][0], nn.Linear)
    assert [name for name in trained(lora(network(), rank=1, train="*bias")) if "lora" not in name] == [
        "0.base.bias", "2.0.base.bias", "2.1.base.bias",
    ]  # fmt: skip


def test_dropout_is_of_the_corrections_alone_and_of_training_alone() -> None:
    model, x = lora(network(), rank=2, dropout=0.5), torch.ones(50, 4)
    assert torch.equal(model(x)[0], model(x)[1])  # lora_b is zero yet
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if "lora_b" in name else None
    assert not torch.equal(model(x)[0], model(x)[1])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[1])


def test_merging_gives_the_plain_network_with_the_same_outputs() -> None:
    model, x = lora(network(), rank=2, alpha=4.0), torch.randn(5, 4)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    before = model(x)
    merged = merge_lora(model)
    torch.testing.assert_close(merged(x), before, rtol=1e-4, atol=1e-4)
    assert list(merged.state_dict()) == list(network().state_dict())
    assert len(trained(merged)) == 6
    single = lora(nn.Linear(3, 3), rank=1)
    assert isinstance(single, LoraLinear)
    assert type(merge_lora(single)) is nn.Linear


def test_torchs_transformer_has_the_correction_where_it_reads_the_weights() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = lora(nn.TransformerEncoder(layer, 2), rank=2, alpha=4.0).eval(), torch.randn(3, 5, 8)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    slow = model(x)
    with torch.no_grad():  # torch takes its fused kernel
        fast = model(x)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merge_lora(model)(x), slow, rtol=1e-4, atol=1e-4)


def test_a_weight_that_is_an_embeddings_too_is_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    assert trained(lora(model, rank=1)) == ["1.lora_a", "1.lora_b"]
    with refused(ValueError, "target=2"):
        lora(model, target="2")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    FrozenParameters(model, "1.weight").set(model, True)  # by either name
    assert trained(model) == ["0.bias", "1.bias"]
    assert trained(lora(nn.Sequential(model, nn.Linear(4, 2)), target="1", train="0.1.*")) == [
        "0.0.weight", "0.1.bias", "1.lora_a", "1.lora_b",
    ]  # fmt: skip


def test_layers_whose_weights_are_read_and_tied_ones_still_work() -> None:
    attention = lora(nn.TransformerEncoderLayer(8, 2, batch_first=True), rank=2)
    assert not any(name.startswith("self_attn.") for name in trained(attention))
    attention(torch.randn(2, 3, 8)).sum().backward()
    model = lora(Gpt(vocab_size=11, width=8, heads=2, layers=1, context=4), rank=2)
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "lora" not in name)


def test_freezing_by_name_and_training_again() -> None:
    model = network()
    FrozenParameters(model, ["0.*", "2.0.weight"]).set(model, True)
    assert trained(model) == ["2.0.bias", "2.1.weight", "2.1.bias"]
    model[2][0].bias.requires_grad_(False)  # by somebody else
    FrozenParameters(model, "2.0.*").set(model, False)
    assert trained(model) == ["2.1.weight", "2.1.bias"]


def test_a_frozen_batch_norm_keeps_its_statistics_until_it_is_trained() -> None:
    frozen_part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.Sequential(frozen_part, nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4))
    frozen = FrozenParameters(model, "0.*", norms=True)
    assert frozen.norms == ["0.1"]
    frozen.set(model, True)
    copied = copy.deepcopy(model)
    for network in (model, copied):
        network.eval()
        network.train()
        network(torch.randn(9, 4))
        assert (int(network[0][1].num_batches_tracked), int(network[1].num_batches_tracked)) == (0, 1)
    frozen.set(model, False)
    model(torch.randn(9, 4))
    assert int(model[0][1].num_batches_tracked) == 1
    with refused(ValueError, "model.freeze_norm=true"):
        FrozenParameters(model, "0.0.*", norms=True)


def test_what_fits_nothing_is_refused_with_the_nearest_name() -> None:
    with refused(ValueError, "model.freeze=2.0.wieght", "2.0.weight"):
        FrozenParameters(network(), "2.0.wieght")
    with refused(ValueError, "target=head"):
        lora(network(), target="head")
