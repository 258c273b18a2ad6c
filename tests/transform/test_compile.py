import copy
import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.model.mlp import Mlp
from trainrun.transform.compile import (
    compile_model,
    copy_gradients,
    delete_truncated_library,
    gpu_compiler_problem,
)


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


@pytest.mark.process
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


@pytest.mark.process
def test_without_a_compiler_the_message_says_the_way_out() -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    try:
        # not pytest's monkeypatch, which takes the option away at the end
        with (
            config.patch({"cpp.cxx": ("no-such-compiler",)}),
            pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler.*trainer\.compile\.scope=off"),
        ):
            compile_model(nn.Linear(2, 2))
    finally:
        cpp_builder.cpp_compiler_search.cache_clear()


def counting(name: str) -> list[torch.fx.GraphModule]:
    """Registers a backend of that name; the list gets every graph that it is given."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.register_backend(backend, name=name)
    return graphs


def test_ragged_batches_are_no_reason_to_compile_again() -> None:
    graphs = counting("counting_sizes")
    model = compile_model(Mlp([6], 3, hidden=[8]), {4, 7}, backend="counting_sizes")
    plain = copy.deepcopy(model)
    for rows in (4, 3, 2, 4, 1, 3, 4):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(model(x), plain(x))
    assert len(graphs) == 1
    model.eval()
    with torch.no_grad():
        for rows in (7, 2, 7):
            model(torch.randn(rows, 6))
    assert len(graphs) == 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(5)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_regional_compiles_one_block_for_all_of_its_class() -> None:
    graphs = counting("counting_blocks")
    plain = Deep().double()
    on = compile_model(copy.deepcopy(plain), {16}, backend="counting_blocks", regional=True)
    torch.testing.assert_close(trained(on), trained(plain), rtol=1e-9, atol=1e-12)
    assert len(graphs) <= 2  # the first block's input wants no gradient, the others' do
    before = len(graphs)
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(on(x), plain(x), rtol=1, atol=1)
    assert len(graphs) == before


def test_regional_needs_blocks() -> None:
    with pytest.raises(RuntimeError, match="no repeated block.*scope=model"):
        compile_model(Mlp([6], 3, hidden=[8]), backend="eager", regional=True)


def test_compiled_code_that_is_cut_short_is_removed_and_said(tmp_path: Path) -> None:
    library = tmp_path / "cut.so"
    library.touch()
    with pytest.raises(OSError, match="file too short") as caught:
        ctypes.CDLL(str(library))
    assert "run the same command again" in delete_truncated_library(
        RuntimeError(f"InductorError: {caught.value}")
    )
    assert not library.exists()
    assert delete_truncated_library(RuntimeError("another")) == ""


def test_gradients_outlive_the_memory_that_they_came_in() -> None:
    memory, layer = torch.zeros(1, 3), nn.Linear(3, 1, bias=False)

    class Replayed(torch.autograd.Function):
        """As a CUDA graph: each backward writes its gradient into the same memory."""

        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor, value: float) -> torch.Tensor:
            ctx.value = value
            return weight.sum() * value

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return memory.fill_(ctx.value).view(1, 3), None

    def summed_up() -> list[float]:
        layer.weight.grad = None
        for value in (1.0, 10.0):
            Replayed.apply(layer.weight, value).backward()
        return layer.weight.grad[0].tolist()

    assert summed_up() == [20.0] * 3  # what was there is overwritten
    copy_gradients(layer)
    assert summed_up() == [11.0] * 3
    compiled = compile_model(copy.deepcopy(layer), backend="aot_eager")
    copy_gradients(compiled)
    for _ in range(2):
        compiled(torch.ones(2, 3)).sum().backward()
    assert compiled.weight.grad[0].tolist() == [4.0] * 3


def test_what_a_gpu_needs_to_compile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)

    def problem(capability: tuple[int, int] = (9, 0), compiler: str = "gcc", module: str = "torch") -> str:
        return gpu_compiler_problem(capability, lambda name: name == compiler, str(tmp_path), module)

    assert problem((6, 1)).startswith("needs compute capability 7.0, and this one has 6.1")
    assert problem(module="no_such_module").endswith("not installed: pip install no_such_module")
    assert "found none; install one (Debian: apt install gcc)" in problem(compiler="")
    assert f"found no {tmp_path}/Python.h; install them (Debian: apt install python3-dev)" in problem()
    (tmp_path / "Python.h").touch()
    assert problem() == ""
    monkeypatch.setenv("CC", "my-cc")
    assert problem(compiler="") == ""
