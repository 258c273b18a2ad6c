"""From a function of tensors to one graph: traced and compiled, or captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.errors import PluginError, TrainrunError
from trainrun.step.body import compiling

Function = Callable[..., list[Tensor]]
Engine = Callable[[Function, list[Tensor], int], Function]  # function, arguments, how many of them it changes


def compiled(function: Function, inputs: list[Tensor], backend: str, mode: str | None) -> Function:
    """One graph for exactly these shapes and strides. Nothing is computed, so nothing changes.

    PluginError: the function asks for a value on the host, or something that no graph can hold.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad(), compiling():
            trace = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)
            graph = trace(*inputs)
            if backend == "inductor" and on_cpu(inputs):
                keep_scalars(graph)
            return lowered(graph, inputs, backend, mode)
    except TrainrunError:
        raise
    except Exception as error:  # of torch's tracer, or of the user's code under it: there are many
        text = " ".join(str(error).split())[:300]
        raise PluginError(
            f"trainer.compile.scope=step: model, loss and optimizer do not become one graph "
            f"({type(error).__name__}: {text}); use trainer.compile.scope=model, or off"
        ) from error


def keep_scalars(graph: torch.fx.GraphModule) -> None:
    """Make numbers that come from numbers alone (Adam's bias corrections) outputs, where others read them.

    Inductor writes an output down once. Otherwise, on a CPU, it computes them again for every vector of
    weights: two powers in float64, which took 200 us in a step of 50,000 weights (torch 2.13).
    """
    scalars: set[torch.fx.Node] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, list | tuple) else [value]
        small = all(isinstance(item, Tensor) and item.dim() == 0 for item in values)
        if small and values and (node.op == "placeholder" or set(node.all_input_nodes) <= scalars):
            scalars.add(node)
    output = graph.graph.output_node()
    made = {n for n in graph.graph.nodes if n in scalars and n.op != "placeholder"}
    single = [
        node
        for node in graph.graph.nodes
        if node in made
        and isinstance(node.meta["val"], Tensor)
        and not made.isdisjoint(node.all_input_nodes)  # else it is one operation, repeated for nothing
        and not scalars.issuperset(node.users)  # each output is a tensor made and freed in every step
        and not _writes(node)
    ]
    before: Any = output.args[0]
    output.args = ([*before, *single],)
    graph.recompile()


def _writes(node: torch.fx.Node) -> bool:
    """Whether it changes an input, which keeps the number already."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def on_cpu(inputs: list[Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in inputs)


def lowered(graph: torch.fx.GraphModule, inputs: list[Tensor], backend: str, mode: str | None) -> Function:
    """A traced graph as a callable of one of torch's backends."""
    if backend == "inductor":
        import torch._inductor

        options: dict[str, Any] = dict(torch._inductor.list_mode_options(mode)) if mode else {}
        options |= {"size_asserts": False, "alignment_asserts": False}  # shapes and strides choose the graph
        # Inductor's CUDA graphs hold nothing that changes in place; ours do, see `captured`.
        options["triton.cudagraphs"] = False
        if (mode or "").startswith("max-autotune") and on_cpu(inputs):
            options["cpp_wrapper"] = True  # what calls the kernels is compiled too, which takes long
        return by_inductor(graph, inputs, options)
    import torch._dynamo

    build: Any = torch._dynamo.lookup_backend(backend)
    other: Function = build(graph, inputs)
    return other


def by_inductor(graph: torch.fx.GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Function:
    """`torch._inductor.compile`, on a CPU without what torch wraps around the code: 6 of 60 us of a call (torch 2.13).

    The wrapper makes inputs that share memory one, changes those that the code does not change itself, and
    makes outputs again that are views: nothing, where the code takes and gives what the graph does.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    outputs = _num_outputs(graph)
    codes: list[tuple[Any, list[int]] | None] = []

    def note(inner: torch.fx.GraphModule, given: list[Any], **more: Any) -> Any:
        alike = on_cpu(inputs) and _num_outputs(inner) == outputs and _are_alike(given, inputs)
        changed = _written(inner)  # ahead of what takes the graph apart
        code = compile_fx_inner(inner, given, **more)
        codes.append((code, changed) if alike else None)
        return code

    wrapped: Any = compile_fx(graph, list(inputs), inner_compile=note, config_patches=options)
    if len(codes) != 1 or codes[0] is None:
        function: Function = wrapped
        return function
    code, changed = codes[0]
    bare = getattr(code, "current_callable", None) or code

    def call(*given: Tensor) -> list[Tensor]:
        done: list[Tensor] = bare(list(given))  # it empties its list
        torch.autograd.graph.increment_version([given[i] for i in changed])  # others ask what has changed
        return done

    return call


def _num_outputs(graph: torch.fx.GraphModule) -> int:
    given: Any = graph.graph.output_node().args[0]
    return len(given)


def _written(graph: torch.fx.GraphModule) -> list[int]:
    """The inputs that a functional graph changes: at its end, by copies."""
    copy = torch.ops.aten.copy_.default
    return [
        number
        for number, place in enumerate(graph.graph.find_nodes(op="placeholder"))
        if any(user.target is copy and user.args[0] is place for user in place.users)
    ]


def _are_alike(given: list[Any], inputs: list[Tensor]) -> bool:
    """Whether they are stand-ins for these inputs, one by one."""
    return len(given) == len(inputs) and all(
        isinstance(one, Tensor)
        and type(other) in (Tensor, nn.Parameter)
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        for one, other in zip(given, inputs, strict=True)
    )
