"""Which attributes the code of a model reads: others that a forward writes change no result."""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch import nn

from trainrun.user_code import is_users_class


def names_read(model: nn.Module) -> set[str] | None:
    """Attributes that the user's classes of the model read, or name in a text; None if their source is not there."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if is_users_class(kind)}
    try:
        trees = [ast.parse(textwrap.dedent(inspect.getsource(kind))) for kind in kinds]
    except (OSError, TypeError, SyntaxError):
        return None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    changed_in_place = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    return {str(node.value) for node in nodes if isinstance(node, ast.Constant)} | {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and (isinstance(node.ctx, ast.Load) or id(node) in changed_in_place)
    }
