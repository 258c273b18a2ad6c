import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.model.mlp import Mlp
from trainrun.transform.compile import compile_model


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch.compiler.reset()


def two_models(backend: str = "aot_eager") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Mlp([6], 3, hidden=[8]).double()
    return plain, compile_model(copy.deepcopy(plain), backend=backend)


def trained(model: nn.Module, num_steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(num_steps):
        x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_training_equals_plain_and_every_parameter_changes() -> None:
    plain, on = two_models()
    before = [parameter.detach().clone() for parameter in on.parameters()]
    after = trained(on)
    torch.testing.assert_close(after, trained(plain), rtol=1e-9, atol=1e-12)
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


# torch alone would compile the first, whose forward is its own, and leave out the second without a word
MODELS = [Mlp([6], 3, hidden=[8]).double(), nn.Sequential(nn.Linear(6, 3), nn.ReLU()).double()]


@pytest.mark.parametrize("model", MODELS)
def test_the_model_is_compiled_in_place_and_its_names_stay(model: nn.Module) -> None:
    calls = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        calls.append(graph)
        return graph

    name = f"counted_{type(model).__name__}".lower()
    torch._dynamo.register_backend(counted, name=name)
    plain, on = model, compile_model(copy.deepcopy(model), backend=name)
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(on(x), plain(x))
    assert len(calls) == 1  # off is plain: only the marked model was compiled
    assert list(on.state_dict()) == list(plain.state_dict())
    averaged = copy.deepcopy(on)  # as a running average is made: plain again, with weights of its own
    with torch.no_grad():
        for parameter in averaged.parameters():
            parameter.zero_()
    assert averaged(x).abs().max() == 0
    assert len(calls) == 1


def test_states_load_both_ways() -> None:
    plain, on = two_models()
    trained(on)
    plain.load_state_dict(on.state_dict())
    again = two_models()[1]
    again.load_state_dict(plain.state_dict())
    for name, value in on.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


@pytest.mark.parametrize(
    ("mode", "backend", "text"),
    [
        (None, "inductr", r"trainer\.compile\.backend=inductr: this torch has no such backend, but .*induc"),
        ("faster", "inductor", r"trainer\.compile\.mode=faster: must be one of default, .*reduce-overhead"),
        ("default", "aot_eager", r"trainer\.compile\.mode=default: only trainer\.compile\.backend=inductor"),
    ],
)
def test_wrong_options_are_refused_with_the_right_ones(mode: str | None, backend: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        compile_model(nn.Linear(2, 2), mode=mode, backend=backend)


def test_without_a_compiler_the_message_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, cpp_builder

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler.*trainer\.compile\.enabled=false"):
            compile_model(nn.Linear(2, 2))
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()
