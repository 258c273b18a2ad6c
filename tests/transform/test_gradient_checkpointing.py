"""Computed again is computed the same: bit for bit, with dropout, batch norm, autocast and pictures."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainrun.model.cnn import Cnn
from trainrun.model.gpt import Gpt
from trainrun.model.lstm import Lstm
from trainrun.model.mlp import Mlp
from trainrun.transform import gradient_checkpointing as recompute
from trainrun.transform.blocks import model_blocks
from trainrun.transform.gradient_checkpointing import gradient_checkpointing

MODES = ["full", "selective", 0.5]


class Own(nn.Module):
    """As users write them: blocks that take more than one argument, and change a buffer of their own."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
            self.register_buffer("seen", torch.ones(()))

        def forward(self, x: Tensor, *, scale: tuple[Tensor, float]) -> tuple[Tensor, Tensor]:
            x = x + self.drop(self.norm(self.linear(x))).tanh() * self.seen.clone() * scale[0] * scale[1]
            self.seen.mul_(1.5)
            return x, x.sum()

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part in self.parts:
            x, more = part(x, scale=(self.scale, 0.5))
            total = total + more
        return x + total


def pictures() -> Tensor:
    return torch.randn(6, 3, 16, 16)


def tokens() -> Tensor:
    return torch.randint(20, (3, 12))


MODELS = {
    "cnn": (lambda: Cnn([3, 16, 16], 5, width=4, dropout=0.2), pictures, 4),
    "gpt": (lambda: Gpt(20, 12, layers=3, width=16, heads=2, dropout=0.3), tokens, 3),
    "own": (Own, lambda: torch.randn(6, 8), 3),
}


def trained(model: nn.Module, kind: str, autocast: bool = False) -> list[Tensor]:
    """All that there is after three steps of two micro-batches: weights, buffers, losses, random state."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(MODELS[kind][1]()).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*model.state_dict().values(), *losses, torch.get_rng_state()]


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind][0]()


def kept_bytes(model: nn.Module, kind: str) -> int:
    """What autograd holds after a forward, weights included."""
    storages = {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(MODELS[kind][1]())
    return sum(storages.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_bits_as_plain(kind: str, mode: str | float, autocast: bool) -> None:
    plain, on = model_of(kind), model_of(kind)
    number = gradient_checkpointing(on, mode)
    assert number == (MODELS[kind][2] if isinstance(mode, str) else -(-MODELS[kind][2] // 2))
    before = [parameter.detach().clone() for parameter in on.parameters()]
    for a, b in zip(trained(on, kind, autocast), trained(plain, kind, autocast), strict=True):
        assert torch.equal(a, b)
    assert list(on.state_dict()) == list(plain.state_dict())
    assert all(not torch.equal(old, new) for old, new in zip(before, on.parameters(), strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_activations_are_not_kept(kind: str) -> None:
    """The hooks of a block hide what it saves from those around the model; its inputs are what stays."""
    plain, on = model_of(kind), model_of(kind)
    gradient_checkpointing(on, "full")
    assert kept_bytes(on, kind) < 0.5 * kept_bytes(plain, kind)


def test_selective_computes_no_product_twice() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def flops(mode: str) -> int:
        model = model_of("gpt")
        if mode != "none":
            gradient_checkpointing(model, mode)
        with FlopCounterMode(display=False) as counter:
            model(tokens()).sum().backward()
        return int(counter.get_total_flops())

    plain = flops("none")
    assert flops("selective") == plain
    assert flops("full") > 1.2 * plain


class Drops(nn.Module):
    """Blocks that draw in one operation, as attention with dropout does on a GPU, and then in another."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x, _ = torch.native_dropout(self.linear(x).tanh(), 0.3, True)
            return nn.functional.dropout(self.linear(x).tanh(), 0.3)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_a_product_that_draws_is_computed_again_with_all_later_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "PRODUCTS", recompute.PRODUCTS | {torch.ops.aten.native_dropout.default})
    monkeypatch.setitem(MODELS, "drops", (Drops, lambda: torch.randn(8, 16), 2))
    plain, on = model_of("drops"), model_of("drops")
    gradient_checkpointing(on, "selective")
    for a, b in zip(trained(on, "drops"), trained(plain, "drops"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_attention_is_kept_where_it_does_not_drop(name: str) -> None:
    function = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    names = [argument.name for argument in function._schema.arguments]
    args = [None] * names.index("dropout_p")
    assert recompute.is_saved_product(function, args, {})
    assert recompute.is_saved_product(function, [*args, 0.0, True], {})
    assert not recompute.is_saved_product(function, [*args, 0.1, True], {})
    assert not recompute.is_saved_product(function, args, {"dropout_p": 0.1})


def test_a_copy_uses_its_own_weights() -> None:
    model = model_of("gpt")
    gradient_checkpointing(model, "full")
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data.zero_()
    copied(tokens()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(tokens()).abs().sum() > 0


def test_a_second_backward_computes_again_or_is_refused() -> None:
    for mode in MODES:
        model = model_of("own")
        gradient_checkpointing(model, mode)
        loss = model(torch.randn(6, 8)).sum()
        first = torch.autograd.grad(loss, model.scale, retain_graph=True)
        if mode == "selective":  # what was kept is gone
            with pytest.raises(RuntimeError, match="backward an extra time"):
                torch.autograd.grad(loss, model.scale)
        else:
            assert torch.equal(first[0], torch.autograd.grad(loss, model.scale)[0])


def test_layers_that_would_save_nothing_are_left_alone() -> None:
    assert gradient_checkpointing(Mlp([6], 3, hidden=[8, 8]), "full") == 0
    assert gradient_checkpointing(Lstm(5), "full") == 0
    runs = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    assert [block.layers for block in model_blocks(runs)] == [(runs[1], runs[2])]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Scaled(nn.Sequential):
    """Calls its parts with more than their input."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self:
            x, _ = part(x, scale=(x.new_ones(8), 0.5))
        return x


def shared_activation() -> nn.Module:
    act = nn.GELU()
    return nn.Sequential(act, nn.Linear(8, 8), act, nn.Linear(8, 8), act, nn.Dropout(0.5), nn.Linear(8, 8))


def shared_layers() -> nn.Module:
    a, b = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
    return nn.Sequential(a, b, a, b, b, nn.Linear(8, 8))


def shared_part() -> nn.Module:
    part = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.BatchNorm1d(8))
    return nn.Sequential(part, nn.Linear(8, 8), Residual(part))


@pytest.mark.parametrize(
    ("build", "number"),
    [
        (shared_activation, 2),
        (shared_layers, 5),
        (shared_part, 1),
        (lambda: Residual(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), 0),
        (lambda: Scaled(Own.Part(), Own.Part()), 2),
    ],
)
def test_layers_that_stand_twice_are_called_twice(build: Callable[[], nn.Module], number: int) -> None:
    torch.manual_seed(0)
    plain = build()
    on = copy.deepcopy(plain)
    assert gradient_checkpointing(on, "full") == number
    x, found = torch.randn(4, 8), []
    for model in (plain, on):
        torch.manual_seed(1)
        out = model(x)
        out.square().sum().backward()
        found.append([out, *(parameter.grad for parameter in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_model_that_walks_through_its_layers_is_told() -> None:
    model = Mlp([6], 3, hidden=[8, 8], norm="batch")
    assert gradient_checkpointing(model, "full") == 2
    with torch.no_grad():
        model(torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="calls none of its blocks as a whole"):
        model(torch.randn(4, 6))


def test_inputs_changed_in_place_are_told_not_guessed() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.parts[0](x)
            z = self.parts[1](y)
            y += 1
            return z + y

    model = Outer()
    gradient_checkpointing(model, "full")
    with pytest.raises(RuntimeError, match=r"changed in place.*\n?.*trainer.gradient_checkpointing=none"):
        model(torch.randn(3, 4)).sum().backward()


def test_products_that_were_written_into_are_told_and_full_computes_them_again() -> None:
    parts = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.GELU()) for _ in range(2)]
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    plain = nn.Sequential(*parts)
    on, refused = copy.deepcopy(plain), copy.deepcopy(plain)
    assert gradient_checkpointing(on, "full") == gradient_checkpointing(refused, "selective") == 2
    for model in (plain, on):
        model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), on.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    # torch 2.13 shows the product to the policy; older ones find it in the backward
    with pytest.raises(RuntimeError, match=r"writes into.*gradient_checkpointing=full|has been mutated"):
        refused(x).square().sum().backward()


def test_a_list_may_hold_none() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    assert len(model_blocks(nn.ModuleList([block, None, copy.deepcopy(block)]))) == 2  # type: ignore[list-item]
