"""Build augmentations from the nodes of `data.augment`. Every message names the setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainrun.data.augment.augmented import NamedAugmentation
from trainrun.errors import ConfigError, PluginError
from trainrun.instantiate import build_node


def build_augmentations(nodes: Mapping[str, Any]) -> tuple[NamedAugmentation, ...]:
    """Build the augmentations in the order of the config. A node set to null is left out.

    Raise PluginError if an object is not an augmentation. A ConfigError of a constructor begins with its argument
    (`padding=-1: ...`) and gets the key before it.
    """
    return tuple(
        _build_named_augmentation(f"data.augment.{name}", node)
        for name, node in nodes.items()
        if node is not None
    )


def _build_named_augmentation(key: str, node: Any) -> NamedAugmentation:
    try:
        built = build_node(node, key)
    except ConfigError as error:
        raise ConfigError(*[f"{key}.{fault}" for fault in error.faults]) from error
    if not callable(built):
        raise PluginError(
            f"{key}: returns a {type(built).__name__}, which cannot be called as augmentation(batch, draws); name "
            f"a class of such objects, as {key}._target_=trainrun.data.augment.flip.RandomFlip"
        )
    return NamedAugmentation(key, built, getattr(built, "random", True))
