"""From a function of tensors to compiled code: what is asked of torch, and what is left out around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainrun.step import graphs


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(("mode", "wrapped"), [(None, False), ("default", False), ("max-autotune", True)])
def test_calls_of_kernels_are_compiled_where_all_is_asked_for(
    mode: str | None, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def compile_graph(graph: Any, inputs: Any, inner_compile: Any, config_patches: dict[str, Any]) -> Any:
        asked.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_graph)
    done = graphs.compiled(lambda x: [x * 2], [torch.ones(3)], "inductor", mode)
    assert done(torch.ones(3))[0].tolist() == [2.0, 2.0, 2.0]
    assert bool(asked[0].get("cpp_wrapper")) is wrapped
    assert asked[0]["triton.cudagraphs"] is False


def both(one: Tensor, other: Tensor) -> list[Tensor]:
    one.add_(1)
    other.mul_(2)
    return [one + other, other.sum()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(("apart", "wrapped"), [(4, False), (2, True)])
@pytest.mark.slow
def test_what_torch_wraps_around_code_is_left_out_unless_inputs_share_memory(
    apart: int, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import compile_fx as inductor

    calls: list[int] = []
    compile_fx = inductor.compile_fx

    def counted(*args: Any, **more: Any) -> Any:
        function = compile_fx(*args, **more)

        def call(*flat: Tensor) -> Any:
            calls.append(len(flat))
            return function(*flat)

        return call

    monkeypatch.setattr(inductor, "compile_fx", counted)
    memory, same = torch.arange(8.0), torch.arange(8.0)
    inputs, plain = [memory[:4], memory[apart : apart + 4]], [same[:4], same[apart : apart + 4]]
    function = graphs.compiled(both, inputs, "inductor", None)
    assert memory.equal(same)
    for _ in range(2):
        for mine, his in zip(function(*inputs), both(*plain), strict=True):
            torch.testing.assert_close(mine, his, rtol=0, atol=0)
    assert memory.equal(same)
    assert bool(calls) is wrapped  # `compile_fx` calls itself
