"""Choose names by patterns such as `blocks.*.qkv`: `*` matches any text, `?` matches one character."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

SHOWN = 8
COMPUTED = re.compile(r"\bparametrizations\.(\w+)\.original$")
Patterns = str | int | Sequence[str | int]  # a layer of a Sequential is called by a number


def match_names(
    names: Iterable[str], patterns: Patterns, key: str, things: str = "name in the model"
) -> list[str]:
    """Return the names that match one of the patterns, in their order. Raise ValueError if a pattern matches none.

    Patterns may be integers, as for the layers of a Sequential. things: what the names are, for the message.
    """
    all_names = list(names)
    pattern_list = [patterns] if isinstance(patterns, str | int) else patterns
    texts = [str(pattern) for pattern in pattern_list]
    faults = []
    for pattern in texts:
        if not any(matches_name(name, pattern) for name in all_names):
            near = difflib.get_close_matches(pattern, all_names, n=1, cutoff=0.3)
            guess = f"; did you mean {near[0]}?" if near else "."
            shown = ", ".join(all_names[:SHOWN]) + (", ..." if len(all_names) > SHOWN else "")
            faults.append(f"{key}={pattern}: matches no {things}{guess} There are: {shown or 'none'}")
    if faults:
        raise ValueError("; ".join(faults))
    return [name for name in all_names if any(matches_name(name, pattern) for pattern in texts)]


def matches_name(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern.

    A weight that `torch.nn.utils.parametrize` computes is also matched by its original name.
    """
    before = COMPUTED.sub(r"\1", name)
    return fnmatchcase(name, pattern) or (before != name and fnmatchcase(before, pattern))
