"""From a function of tensors to compiled code: what is asked of torch, and what is left out around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainrun.step import graphs


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


def both(one: Tensor, other: Tensor, read: Tensor) -> list[Tensor]:
    one.add_(1)
    other.mul_(2)
    return [one + other, (other * read).sum()]


def three(shared: bool) -> list[Tensor]:
    memory = torch.arange(8.0)
    return [memory[:4], memory[2:6] if shared else torch.arange(4.0), torch.arange(4.0)]


@pytest.mark.process
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.slow
def test_what_torch_wraps_around_code_is_left_out_unless_inputs_share_memory(
    shared: bool, monkeypatch: pytest.MonkeyPatch
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
    inputs, plain = three(shared), three(shared)
    function = graphs.compiled(both, inputs, "inductor", None)
    for one, same in zip(inputs, three(shared), strict=True):
        assert one.equal(same)
    for _ in range(2):
        versions = [tensor._version for tensor in inputs]
        for mine, his in zip(function(*inputs), both(*plain), strict=True):
            torch.testing.assert_close(mine, his, rtol=0, atol=0)
        for one, same in zip(inputs, plain, strict=True):
            assert one.equal(same)
        changed = [tensor._version > version for tensor, version in zip(inputs, versions, strict=True)]
        assert changed == [True, True, False]
    assert bool(calls) is shared  # `compile_fx` calls itself
