"""The checks of a config that need no device: each value by its setting, open nodes, arguments, and pairs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from trainrun.config.pair_rules import pair_faults
from trainrun.config.schema import ANY, NAMED, NODES, RunConfig, Setting, settings, value_of
from trainrun.instantiate import named_nodes
from trainrun.limits import choices_of, described, fits

_LOOKS_OTHER = re.compile(r"[+-]?\.?\d|(?i:true|false|null|none)\Z")
TARGET, EXAMPLE = "_target_", "my_file.MyClass"
USUAL_BESIDE = {
    "interval": "step",
    "warmup_steps": 0,
    "lr_scaling": "none",
    "base_batch_size": 256,
}  # scheduler=custom


def closest(word: str, known: Iterable[object]) -> str:
    """The name that was probably meant, in small or large letters, or by its beginning; empty if none is near."""
    names = {str(name).lower(): str(name) for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.55)
    begun = [name for name in names if len(word) > 1 and name.startswith(word.lower())]
    return names[[*found, *begun][0]] if found or begun else ""


def nearest(word: str, known: Iterable[object]) -> str:
    """` Did you mean x?`; empty if no name is near."""
    name = closest(word, known)
    return f" Did you mean {name}?" if name else ""


def check(config: RunConfig) -> list[str]:
    """All faults of the values, one line each; empty when the config can be run."""
    faults, wrong = value_faults(config), node_faults(config)
    return [*faults, *(wrong or pair_faults(config))]


def value_faults(config: Any, schema: type = RunConfig) -> list[str]:
    """One line for each field whose value is not what its setting allows."""
    return [
        f"{key}={fault}"
        for key, setting in settings(schema).items()
        if setting.section is None and (fault := fault_of(setting, value_of(config, key)))
    ]


def fault_of(setting: Setting, value: Any) -> str:
    """The value of a setting with what is wrong with it; empty if nothing is."""
    if setting.parse is not None:
        try:
            setting.parse(value)
        except ValueError as error:
            return f"{value}: {error}"
    return fault_of_value(value, setting.kind)


def fault_of_value(value: Any, kind: Any) -> str:
    """The value with what is allowed; empty if it is of that kind."""
    if fits(value, kind):
        return ""
    choices = choices_of(kind)
    near = nearest(str(value), choices)
    return f"{value if choices else shown(value)}: must be {described(kind)}{'.' if near else ''}{near}"


def shown(value: Any) -> str:
    """A value as it is typed; a text that looks like something else in its quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and _LOOKS_OTHER.match(value):
        return f"'{value}' (a text)"
    return str(value)


def node_faults(config: Any, schema: type = RunConfig) -> list[str]:
    """One line for each open node, or each of several by name, that names no class or function."""
    return [
        fault
        for key, setting in settings(schema).items()
        if setting.opens and (fault := _node_fault(setting, value_of(config, key)))
    ]


def _node_fault(setting: Setting, value: Any) -> str:
    key, empty = setting.typed or setting.key, value is None or value == {}
    target = value.get(TARGET) if isinstance(value, dict) else None
    if setting.opens == NAMED and (several := named_nodes(value)):
        return _beside_fault(setting, several, value)
    if setting.required and (empty or (isinstance(value, dict) and target in (None, "???"))):
        return (
            f"{key}.{TARGET}: nothing to train with; name a class or function, e.g. {key}.{TARGET}={EXAMPLE}"
        )
    if setting.opens == ANY or empty or target or value in setting.also:
        return ""
    if setting.opens in (NODES, NAMED) and isinstance(value, dict):
        wrong = [
            name
            for name, inner in value.items()  # null takes one out
            if inner is not None and not (isinstance(inner, dict) and inner.get(TARGET))
        ]
        if not wrong:
            return ""
        key, value = f"{key}.{wrong[0]}", value[wrong[0]]
    if isinstance(value, dict):
        name, inner = next(iter(value.items()))
        return (
            f"{key}.{name}={inner}: belongs to a class or function that is not named; name it, as "
            f"{key}.{TARGET}={EXAMPLE}"
        )
    also = "".join(f", or be {name}" for name in setting.also)
    return f"{key}={value}: must name a class or function, as {key}.{TARGET}={EXAMPLE}{also}"


def _beside_fault(setting: Setting, several: dict[str, Any], value: dict[str, Any]) -> str:
    """What stands beside nodes by name, is no such node, and would belong to none of them."""
    for name, inner in value.items():
        if name in several or inner is None or inner == USUAL_BESIDE.get(name):
            continue
        key = f"{setting.key}.{name}"
        if isinstance(inner, dict) or setting.key == "data.val":
            return f"{key}={inner}: must name a class or function, as {key}.{TARGET}={EXAMPLE}"
        ways = " or ".join(f"{setting.key}.{one}.{name}={inner}" for one in several)
        return f"{key}={inner}: stands beside {', '.join(several)} and would be for none of them; say {ways}"
    return ""
