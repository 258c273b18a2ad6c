"""Private names of torch can go with any release: each has a reason here, and they get fewer, not more."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "trainrun"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.expr) -> list[str]:
    """`a.b.c` as its names; empty for what does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def private_names(tree: ast.Module) -> set[str]:
    """Up to the first private part, as `torch._inductor`: attributes, imports, and names that `getattr` asks for."""
    found = set()
    for node in ast.walk(tree):
        paths: list[list[str]] = []
        if isinstance(node, ast.Attribute):
            paths = [chain(node)]
        elif isinstance(node, ast.Import):
            paths = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            paths = [[*node.module.split("."), alias.name] for alias in node.names]
        elif isinstance(node, ast.Call) and chain(node.func) == ["getattr"]:
            asked = node.args[1]
            paths = [[*chain(node.args[0]), str(asked.value)]] if isinstance(asked, ast.Constant) else []
        for path in paths:
            private = [number for number, name in enumerate(path) if is_private(name)]
            if path[:1] == ["torch"] and private:
                found.add(".".join(path[: private[0] + 1]))
    return found


REASONS = {
    # Batched kernels; there are loops for versions without them.
    "torch._foreach_copy_": "one kernel for many small tensors on a GPU",
    "torch._amp_foreach_non_finite_check_and_unscale_": "finds bad gradients in one pass: 2.5 us, their norms take 6",
    # Time at the start and in every step; the public call is the fallback.
    "torch._fused_adamw_": "AdamW with its lists prepared: 15 us of a step for 33",
    "torch.autograd.graph._engine_run_backward": "sympy is not imported (0.3 s), 69 us for 88",
    # Torch's compiler
    "torch._dynamo": "names of backends, what was compiled again",
    "torch._inductor": "options of a mode, the C++ compiler; a step that is one graph",
    "torch.utils.data._utils": "`collate` (documented); torch's handler of SIGCHLD, which raises anywhere, is not used",
    "torch._C": "the flight recorder's dump; without it a failed exchange is not named",
    # Documented or in wide use, though private by their place
    "torch.utils._python_dispatch": "the documented mode that sees every operation; for parallel.meta_device alone",
}
TODAY = 9


def test_every_private_name_of_torch_has_a_reason_and_every_reason_a_name() -> None:
    found = {name for file in PACKAGE.rglob("*.py") for name in private_names(ast.parse(file.read_text()))}
    assert found == set(REASONS)
    assert len(REASONS) <= TODAY


def test_the_ways_to_a_private_name_are_seen() -> None:
    ways = (
        "torch._a_(x)", "import torch._b.c", "from torch._c import d", "from torch.utils import _d", "x = torch.e._e.f",
        'getattr(torch.g, "_f", None)', "torch.__version__", 'getattr(own, "_g")', "self._h", "torch.public",
    )  # fmt: skip
    found = [private_names(ast.parse(way)) for way in ways]
    names = ["torch._a_", "torch._b", "torch._c", "torch.utils._d", "torch.e._e", "torch.g._f"]
    assert found == [{name} for name in names] + [set()] * 4
