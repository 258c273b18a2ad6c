"""Report each typed setting that no code has read, as an error.

`instantiate.BUILT` has the nodes that were built, and `schema.READ` the settings that were read. Both are recorded
from the start of a run until its first batch, never during steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainrun.assemble.data_pipeline import format_split_key
from trainrun.config.schema import READ, RunConfig, read_value, settings
from trainrun.data.tensor_dataset import find_reader_attribute, list_parts
from trainrun.errors import ConfigError
from trainrun.instantiate import BUILT, is_node, named_nodes
from trainrun.interfaces import Parallel

# A node below one of these is read when it is built.
ROOTS = ("data.train", "data.val", "data.test", "data.transform", "data.val_transform", "data.test_transform",
         "data.collate_fn", "data.augment", "hook", "transform", "model", "task")  # fmt: skip
TRAINING = "data.train."


def check_settings_are_read(config: RunConfig, parallel: Parallel) -> None:
    """Raise ConfigError for every typed setting that no rank has read, unless it has its default value.

    The settings of a section that is off, such as `trainer.ema`, may not even have that.
    """
    read = set().union(*parallel.gather(sorted(READ)))
    all_settings, typed_keys = settings(), set(config.typed)
    faults = []
    for key in sorted(typed_keys & all_settings.keys() - read):
        setting = all_settings[key]
        if setting.section is not None or setting.opens or setting.read_by:
            continue
        value = read_value(config, key)
        section = all_settings.get(key.rpartition(".")[0])
        if section is not None and section.short:
            switch = f"{section.key}.{section.short}"
            if switch in typed_keys:  # as in a sweep over the switch
                continue
            if read_value(config, switch) in (False, "off"):
                faults.append(f"{key}={value}: {switch} is off; add {section.key}=true, or leave it out")
                continue
        if value != setting.default:
            faults.append(f"{key}={value}: no code reads it in this run ({setting.help}); leave it out")
    if faults:
        raise ConfigError(*faults)


def check_nodes_are_read(config: RunConfig, sources: Mapping[str, Any]) -> None:
    """Raise ConfigError for every typed setting of a node that no code has read.

    sources: the data sets by split. A built-in data set has an attribute `unused_arguments`: the arguments that it
        did not use, each with the reason.
    """
    unused = {
        format_split_key(name): list_unused_arguments(source)
        for name, source in sources.items()
        if source is not None
    }
    faults = []
    for key in dict.fromkeys(config.typed):
        node = find_enclosing_node(key, config)
        is_of_folds = config.data.folds is not None and str(node).startswith("data.val")  # a line names it
        if node is not None and node not in BUILT and not is_of_folds:
            faults.append(f"{key}: no code reads it, since this run does not use {node}; leave it out")
        elif reason := explain_unused_argument(key, config, unused):
            faults.append(f"{key}: no code reads it: {reason}; leave it out")
    if faults:
        raise ConfigError(*faults)


def find_enclosing_node(key: str, config: RunConfig) -> str | None:
    """Return the key of the node that contains a setting; None for other settings and for a node that is off."""
    root = next((root for root in ROOTS if key == root or key.startswith(f"{root}.")), None)
    if root is None:
        return None
    value = read_value(config, root)
    name = key.removeprefix(root).lstrip(".").partition(".")[0]
    if name in named_nodes(value):  # of several data sets below one key
        return f"{root}.{name}"
    return root if is_node(value) else None


def list_unused_arguments(source: Any) -> dict[str, str]:
    """Return the arguments that no part of a source used, with reasons."""
    each = [find_reader_attribute(part, "unused_arguments") or {} for part in list_parts(source)]
    return {name: reason for name, reason in each[0].items() if all(name in others for others in each)}


def explain_unused_argument(key: str, config: RunConfig, unused: Mapping[str, Mapping[str, str]]) -> str:
    """Return why an argument was not used; "" if it was used or is off.

    Other splits inherit the arguments of the training set.
    """
    above, _, name = key.rpartition(".")
    if not above.startswith("data.") or above.startswith(TRAINING):
        return ""
    value = find_data_node(above, config).get(name)
    if not value or value == "auto":  # it asks for nothing
        return ""
    if f"{above}." == TRAINING:
        takers = [taker for taker in unused if name in find_data_node(taker, config)]
    else:
        takers = [taker for taker in unused if taker == above]
    reasons = [unused[taker].get(name, "") for taker in takers]
    return reasons[0] if reasons and all(reasons) else ""


def find_data_node(key: str, config: RunConfig) -> Mapping[str, Any]:
    """Return the node of a data set; {} for a fold, which uses `data.train`."""
    root = ".".join(key.split(".")[:2])
    node = read_value(config, root)
    rest = key.removeprefix(root).lstrip(".")
    node = node.get(rest) if rest and isinstance(node, dict) else node
    return node if isinstance(node, dict) else {}
