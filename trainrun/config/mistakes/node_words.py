"""What is wrong with an open node, or with the arguments in it: one line each, with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainrun.config.mistakes.value_words import misfit, shown
from trainrun.config.schema import RunConfig, value_of
from trainrun.instantiate import TARGET
from trainrun.limits import Setting, fits

EXAMPLE = "my_file.MyClass"
# of scheduler=custom
USUAL_BESIDE = {"interval": "step", "warmup_steps": 0, "lr_scaling": "none", "base_batch_size": 256}
# in no group
OF_ALL = ("fused", "foreach", "differentiable", "capturable", "no_decay", "layer_decay", "groups")
SOURCES = {  # what an argument is by default
    "max_lr": "optimizer.lr", "in_shape": "data.shape", "shape": "data.shape", "num_classes": "data.num_classes",
    "vocab_size": "data.num_classes",
}  # fmt: skip


def no_node(setting: Setting, key: str, value: Any) -> str:
    """What stands at an open node and names no class or function."""
    if isinstance(value, dict):
        name, inner = next(iter(value.items()))
        choice = {"transform.lora": "transform=lora", "scheduler": "scheduler=constant"}
        example = choice.get(key, f"{key}.{TARGET}={EXAMPLE}")
        return (
            f"{key}.{name}={inner}: belongs to a class or function that is not named; name it, as {example}"
        )
    also = "".join(
        f", or be {name}"
        for name in (*setting.also, *(["null"] if key == setting.key and not setting.required else []))
    )
    return f"{key}={value}: must name a class or function, as {key}.{TARGET}={EXAMPLE}{also}"


def beside_fault(setting: Setting, several: dict[str, Any], value: dict[str, Any]) -> str:
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


def group_faults(place: str, groups: Any, kinds: dict[str, Any]) -> Iterator[str]:
    """One line for each fault of `groups` of an optimizer: entries of patterns (`params`) and options."""
    key, example = f"{place}.groups", "{params: 'head.*', lr: 1e-2}"
    if not isinstance(groups, list):
        yield f"{key}={groups}: must be a list of groups, as [{example}]"
        return
    for number, group in enumerate(groups):
        entry = f"{key}[{number}]"
        named = group.get("params") if isinstance(group, dict) else None
        patterns = [named] if isinstance(named, str) else named
        if not patterns or not fits(patterns, list[str]):
            yield f"{entry}={group}: must name parameters and what holds for them, as {example}"
            continue
        if len(group) == 1:
            yield f"{entry}={group}: says nothing of its parameters; add an option, as {example}"
        for name, value in group.items():
            if name in OF_ALL:
                yield f"{entry}.{name}={shown(value)}: holds for all parameters; use {place}.{name}={shown(value)}"
            elif name in kinds and not fits(value, kinds[name]):
                yield f"{entry}.{name}={misfit(value, kinds[name])}"


def source_of(config: RunConfig, group: str, name: str) -> str:
    """The key that an argument has its value from, if it still has that."""
    key = f"{group}.{name}"
    beside = [f"data.train.{name}"] if group.startswith(("data.val", "data.test")) else []
    for source in (*beside, *([SOURCES[name]] if name in SOURCES else [])):
        try:
            if repr(value_of(config, source)) == repr(value_of(config, key)):  # nan is not itself
                key = source
        except (KeyError, TypeError):
            continue
    return key
