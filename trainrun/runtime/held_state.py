"""Turn the attributes of an object into texts that can be compared: plain values, tensors, and generators.

what: compare the `format_attributes` of two moments with `list_changed_names`. Iterators and open files are compared
    by their position. when not: for objects with more than 10,000 entries or unreadable content. Their text is
    empty.
"""

from __future__ import annotations

import hashlib
import io
import operator
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainrun.interfaces import KeepsState
from trainrun.user_code import is_users_class

DEEPEST = 6
MOST_ENTRIES = 10_000  # of an attribute, with all that it holds
MOST_NUMBERS = 1 << 20  # of an attribute with all its tensors; of larger ones a sample is compared
MOST_NAMES = 6  # in a message
OF_MODULES = frozenset(vars(nn.Module()))
Numbers = Tensor | np.ndarray[Any, Any]
PLAIN = (bool, int, float, complex, str, bytes)
EMPTY: tuple[Iterable[Any], ...] = ([], (), "", b"", {}, set(), range(0), {}.values(), {}.items())
ITERATORS = tuple(type(iter(one)) for one in EMPTY)


def list_unsaved_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object; for a module, those that its state_dict does not contain."""
    held = getattr(owner, "__dict__", {})
    if not isinstance(owner, nn.Module):
        return dict(held)
    unsaved = {name: owner._buffers[name] for name in owner._non_persistent_buffers_set}
    return {name: value for name, value in held.items() if name not in OF_MODULES} | unsaved


def format_attributes(owner: Any, known: set[int]) -> dict[str, str]:
    """Return the attributes of an object as texts, without those that cannot be compared. known: ids that are left
    out.
    """
    texts = {name: format_state(value, known) for name, value in list_unsaved_attributes(owner).items()}
    return {name: text for name, text in texts.items() if text}


def list_changed_names(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the sorted names that are in both mappings with different texts."""
    return sorted(name for name in before.keys() & after.keys() if before[name] != after[name])


def format_first_names(names: list[str]) -> str:
    rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + rest


def extract_shape(text: str) -> str:
    return text.partition("|")[0]


def format_state(value: Any, known: set[int]) -> str:
    """Return `shape|digest`, equal for equal contents; "" for a value whose state cannot be compared.

    known: ids of objects that are left out.
    """
    leaves = list(islice(iterate_held_values(value, known), 2 * MOST_ENTRIES + 1))  # names and values
    if len(leaves) > 2 * MOST_ENTRIES:
        return ""
    most = MOST_NUMBERS // max(sum(not isinstance(leaf, str) for leaf in leaves), 1)
    texts = [leaf if isinstance(leaf, str) else format_numbers(leaf, most) for leaf in leaves]
    if texts and not any(texts):
        return ""
    if isinstance(value, Tensor | np.ndarray):
        shape = str(tuple(value.shape))
    else:
        shape = f"{type(value).__name__} {len(texts)}"
    return f"{shape}|{hash_bytes(repr(texts).encode())}"


def iterate_held_values(value: Any, known: set[int], above: tuple[int, ...] = ()) -> Iterator[str | Numbers]:
    """Yield the names and values of a tree: tensors, arrays, and texts of all others; "" if it cannot be compared."""
    if id(value) in known or id(value) in above or len(above) == DEEPEST:
        yield ""
        return
    children = list_children(value)
    if children is None:
        yield format_leaf(value)
        return
    for name, child in children:
        yield repr(name)
        yield from iterate_held_values(child, known, (*above, id(value)))


def list_children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the named parts of a container; None for a value that is compared as a whole."""
    if value is None or isinstance(value, (*PLAIN, Tensor, type)):
        return None
    if isinstance(value, nn.Module):
        return [*value.named_parameters(), *value.named_buffers()]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple | deque):
        return enumerate(value)
    if isinstance(value, set | frozenset):
        return [(name, None) for name in sorted(map(repr, islice(value, MOST_ENTRIES + 1)))]
    if isinstance(value, KeepsState):  # optimizers and torch's schedulers
        return list(value.state_dict().items())
    if is_users_class(type(value)) and hasattr(value, "__dict__"):
        return list(vars(value).items())
    return None


def format_leaf(value: Any) -> str | Numbers:
    """Return a tensor, an array, or the text of another value without parts; "" if it cannot be compared."""
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor | np.ndarray):
        return value
    if isinstance(value, np.generic):
        return hash_bytes(value.tobytes())
    if isinstance(value, torch.Generator):
        return hash_bytes(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return hash_bytes(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return hash_bytes(repr(value.bit_generator.state).encode())
    if isinstance(value, np.random.RandomState):
        return hash_bytes(repr(value.get_state()).encode())
    if isinstance(value, ITERATORS):
        return f"{operator.length_hint(value)} to come"
    return read_file_position(value) if isinstance(value, io.IOBase) else ""


def read_file_position(file: io.IOBase) -> str:
    """Return the position in an open file as text; "" if it has none, such as a pipe."""
    try:
        return str(file.tell())
    except (OSError, ValueError):  # a text file that is read line by line says none, but its bytes do
        below = getattr(file, "buffer", None)
        return "" if below is None else read_file_position(below)


def format_numbers(values: Numbers, most: int) -> str:
    """Return the shape and a digest of at most about `most` numbers; the host waits for the device.

    Return "" if the numbers cannot be read, as of an array of objects.
    """
    if isinstance(values, np.ndarray):
        flat: Any = None if values.dtype.hasobject else values.reshape(-1)
    else:
        flat = flatten_tensor(values)
    if flat is None:
        return ""
    every = len(flat) // most | 1 if len(flat) > most else 1  # odd: no column of a table alone
    sample = flat[::every]
    if isinstance(sample, Tensor):
        sample = sample.cpu().contiguous().view(torch.uint8).numpy()
    return f"{tuple(values.shape)} {hash_bytes(sample.tobytes())}"


def flatten_tensor(tensor: Tensor) -> Tensor | None:
    """Return the numbers of a tensor; None if it belongs to a graph, has no memory, or is not strided."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not is_lazy(tensor) and tensor.grad_fn is None
    if not is_plain or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    return tensor.detach().resolve_conj().resolve_neg().flatten()


def hash_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
