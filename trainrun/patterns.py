"""Names chosen by patterns, as `blocks.*.qkv`: `*` stands for any text, `?` for one letter."""

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
    """Return the names that fit a pattern, in their order; a number is a name too. Raise ValueError if a pattern fits
    none.

    things: what has these names, for the message.
    """
    known = list(names)
    given = [patterns] if isinstance(patterns, str | int) else patterns
    texts = [str(pattern) for pattern in given]
    faults = []
    for pattern in texts:
        if not any(matches_name(name, pattern) for name in known):
            near = difflib.get_close_matches(pattern, known, n=1, cutoff=0.3)
            guess = f"; did you mean {near[0]}?" if near else "."
            shown = ", ".join(known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")
            faults.append(f"{key}={pattern}: fits no {things}{guess} There are: {shown or 'none'}")
    if faults:
        raise ValueError("; ".join(faults))
    return [name for name in known if any(matches_name(name, pattern) for pattern in texts)]


def matches_name(name: str, pattern: str) -> bool:
    """Return whether a name fits. A weight that `torch.nn.utils.parametrize` computes also has its earlier name."""
    before = COMPUTED.sub(r"\1", name)
    return fnmatchcase(name, pattern) or (before != name and fnmatchcase(before, pattern))
