"""torch.compile: the model is compiled for each input shape at the first call with that shape.

what: it fuses operations. Rounding may differ from the eager model in the last bits.
when: long runs of larger networks on a GPU. when not: small networks, short runs, shapes that change with every
    batch, and usually CPUs.
regional: one block is compiled for all blocks of its class, so a deep model compiles as fast as one block.
source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
gain: in float32 on 2 cores of a Xeon with AMX none: digits MLP 0.69x, CNN of 220k parameters 0.77x, small GPT 0.9 to
    1.0x, and 7 to 13 s more until the first step. In bf16 1.27x for a GPT of width 128 with many small operations.
    Not measured on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

OLDEST_GPU = (7, 0)  # that triton compiles for
WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of inductor


def compile_model(
    model: nn.Module, sizes: Collection[int] = (), regional: bool = False, *, mode: str | None = None,
    backend: str = "inductor", fullgraph: bool = False, dynamic: bool | None = None,
) -> nn.Module:  # fmt: skip
    """Compile the model in place and return it. The names in its `state_dict` stay.

    sizes: the batch sizes to compile. Batches of another size (the last of an epoch) run eagerly, so that they never
        cause a recompilation. Empty: compile all sizes. regional: compile only the repeated blocks. The other
        arguments are those of `torch.compile`.

    Raises RuntimeError for an unknown backend or mode, without repeated blocks, or without a C++ compiler for a CPU.
    """
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    check_compile_options(mode, backend, on_cpu)
    options: dict[str, Any] = {"mode": mode, "backend": backend, "fullgraph": fullgraph, "dynamic": dynamic}
    plain_call: Callable[..., Any] = model._call_impl
    call = plain_call
    if regional:
        for block in repeated_blocks(model):
            block.compile(**options)
    else:
        # Dynamo skips frames that begin in torch itself: nn.Sequential.compile() compiles nothing, without
        # a word (pytorch/pytorch#132923, torch 2.13). A frame that begins in this file is compiled.
        call = torch.compile(lambda *args, **kwargs: plain_call(*args, **kwargs), **options)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if not sizes or first is None or first.shape[0] in sizes:
            return call(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return plain_call(*args, **kwargs)

    model._compiled_call_impl = dispatch
    return model


def copy_gradients(model: nn.Module) -> None:
    """Copy the gradients of each micro-batch before the next one adds to them.

    A CUDA graph of inductor overwrites its gradients when it is replayed (torch 2.13, pytorch issue 169545).
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(torch.clone)  # type: ignore[no-untyped-call]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with siblings of their class in a list, such as the layers of a transformer.

    Raise RuntimeError if there are none.
    """
    blocks = _list_blocks(model)
    if not blocks:
        raise RuntimeError(
            f"trainer.compile.scope=regional: {type(model).__name__} has no repeated block (two or more modules of "
            "one class, with modules inside, in a ModuleList or Sequential); use trainer.compile.scope=model"
        )
    return blocks


def _list_blocks(module: nn.Module) -> list[nn.Module]:
    children = list(module.children())
    if isinstance(module, nn.ModuleList | nn.Sequential):
        kinds = Counter(type(child) for child in children)
        if blocks := [child for child in children if kinds[type(child)] > 1 and any(child.children())]:
            return blocks
    return [block for child in children for block in _list_blocks(child)]


def check_compile_options(mode: str | None, backend: str, on_cpu: bool) -> None:
    import torch._dynamo  # a second to import: only where it is used

    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        usual = ", ".join(torch._dynamo.list_backends())
        raise RuntimeError(f"trainer.compile.backend={backend}: this torch has no such backend, but {usual}")
    if backend == "inductor":
        from torch._inductor import list_mode_options

        modes = list(list_mode_options())
        if mode is not None and mode not in modes:
            raise RuntimeError(f"trainer.compile.mode={mode}: must be one of {', '.join(modes)}, or null")
        if on_cpu:
            check_compiler()
    elif mode is not None:
        raise RuntimeError(
            f"trainer.compile.mode={mode}: only trainer.compile.backend=inductor has modes; remove one"
        )


def check_compiler() -> None:
    """Raise RuntimeError if there is no C++ compiler. Without this check, inductor would fail in the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:
        raise RuntimeError(
            "trainer.compile.backend=inductor: torch.compile needs a C++ compiler on a CPU and found none; "
            "install one (Debian: apt install g++), or train without compiling: trainer.compile.scope=off"
        ) from error


def gpu_compiler_problem(
    capability: tuple[int, int],
    find: Callable[[str], object] = shutil.which,
    include: str | None = None,
    module: str = "triton",
) -> str:
    """Return which part of the GPU compiler is missing and how to install it; "" if nothing is missing.

    The GPU compiler also needs a C compiler, for a launcher of every kernel.
    """
    include = include or sysconfig.get_path("include")
    if capability < OLDEST_GPU:
        have, needed = (".".join(map(str, version)) for version in (capability, OLDEST_GPU))
        return f"needs compute capability {needed}, and this one has {have}; use another GPU"
    if importlib.util.find_spec(module) is None:
        return f"needs triton, and it is not installed: pip install {module}"
    if not (os.environ.get("CC") or any(map(find, ("cc", "gcc", "clang")))):
        return "needs a C compiler and found none; install one (Debian: apt install gcc)"
    if not Path(include, "Python.h").exists():
        return f"needs Python's headers and found no {include}/Python.h; install them (Debian: apt install python3-dev)"
    return ""


def delete_truncated_library(error: BaseException) -> str:
    """Delete a truncated library of compiled code that torch failed to load. Return a message; "" for other errors.

    A killed compiler leaves such a library in torch's cache, and torch would load it every time.
    """
    match = re.search(r"(/\S+\.so): file too short", str(error))
    if match is None:
        return ""
    Path(match[1]).unlink(missing_ok=True)
    return (
        f"{match[1]}: compiled code is cut short, as a compiler leaves it that was killed; it is removed now: run "
        "the same command again"
    )
