"""Messages for a wrong override or config file: one line with the text as typed and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainrun.config.aliases import CASES, collect_aliases, format_replacement_hint, load_replacement_hints
from trainrun.config.argv import OWN_KEYS, find_conf_dir, list_groups
from trainrun.config.saved_values import LOADER, describe_yaml_error, read_yaml_text
from trainrun.config.schema import RunConfig, list_open_nodes, list_setting_fields, settings
from trainrun.config.validate import (
    describe_kind,
    describe_missing_target,
    find_closest_name,
    suggest_closest_name,
)
from trainrun.errors import ConfigError
from trainrun.limits import parse_duration
from trainrun.model.choices import WORDS

KINDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
    "bool": "true or false",
}
_FILE_FAULT = re.compile(r"In '(.+?)': \w+ raised while composing config:\n(.*)\n\s*full_key: (\S+)")
_NO_SECTION = re.compile(r"In '(.+?)': .*\bis not a subclass of (\w+)\. value: (\S+)", re.DOTALL)
MAX_NAMES = 12  # that are listed where none is near


def explain_composition_error(
    error: Exception, words: list[str], folders: list[Path]
) -> tuple[str, str | None]:
    """Return a message for Hydra's error, and the override to remove; None if no single override is the cause."""
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        fault = explain_unknown_option(group, option, [name for name in error.options if "/" not in name])
        culprit = next((word for word in words if word.partition("=")[0].lstrip("+~") == group), None)
        return fault, culprit
    if match := _NO_SECTION.match(text):
        section = next(
            setting
            for setting in settings().values()
            if setting.section and setting.section.__name__ == match[2]
        )
        inner = f"{{{section.short or 'NAME'}: {match[3].lower()}}}"
        way = f"is a section; write {section.key.rpartition('.')[2]}: {inner}"
        return f"{match[1]}.yaml: {section.key}: {way}", _find_override_of_option(match[1], words)
    if match := _FILE_FAULT.match(text):
        return _explain_file_fault(match[1], match[2], match[3], folders), _find_override_of_option(
            match[1], words
        )
    for word in words:
        name = word.partition("=")[0].lstrip("+~")
        if word.startswith("~") and f"'{word[1:]}'" in text:
            return f"{word}: is not chosen, so it cannot be removed", word
        if f"'{name}'" in text and any((folder / name).is_dir() for folder in folders):
            return f"{word}: no option of {name} is chosen yet; add one, as +{word}", word
        if f"'{name}'" in text:
            return explain_unknown_key(name, word.lstrip("+"), "", list_top_level_names(folders)), word
    return " ".join(text.split()[:60]), None


def _find_override_of_option(file: str, words: list[str]) -> str | None:
    """Return the override that chooses an option's file; None without one."""
    return next((word for word in words if word.lstrip("+").replace("=", "/", 1) == file), None)


def _explain_file_fault(file: str, text: str, key: str, folders: list[Path]) -> str:
    """Return why an option file of the user does not fit the schema."""
    if "not in" not in text:
        return f"{file}.yaml: {key}: {_extract_rule(text)}"
    if key == file.partition("/")[0]:
        return f"{file}.yaml: no section {key}; settings of other sections need `# @package _global_` as first line"
    above = key.rpartition(".")[0]
    names = (
        [item.name for item in fields(attrgetter(above)(RunConfig()))]
        if above
        else list_top_level_names(folders)
    )
    return explain_unknown_key(key, f"{file}.yaml: {key}", above, names)


def explain_unknown_option(group: str, option: Any, known: list[str]) -> str:
    if not known:
        return explain_unknown_key(group, f"{group}={option}", "", list_top_level_names([]))
    return (
        f"{group}={option}: there is no such {group}.{suggest_closest_name(str(option), known)} "
        f"Choose from: {', '.join(known)}"
    )


def explain_unused_hydra_setting(word: str) -> str:
    """Return the message for one of Hydra's own settings that has no effect in a run."""
    return f"{word}: has no effect; of Hydra's settings a run reads only {' and '.join(OWN_KEYS)}"


def explain_unparsable_override(word: str) -> str:
    """Return the likely reason why an override cannot be parsed. Hydra's own message is about tokens of its grammar."""
    if not word.strip():
        return f"{word!r}: an empty argument, perhaps from a shell variable that is not set; leave it out"
    word = word.strip()
    key, equals, _ = word.partition("=")
    name = key.lstrip("~")
    if not equals:
        return f"{word}: cannot be read as key=value"
    if not name or name != name.rstrip():
        return f"{word}: cannot be read as key=value; leave out the spaces around ="
    if not re.fullmatch(r"[\w$/@:-]+(\.[\w$-]+)*", name):
        return f"{word}: cannot be read as key=value; a key consists of names with dots between them, as model.hidden"
    return (
        f"{word}: cannot be read as key=value; a bracket or quote may be open, or the value holds one of "
        f"= , : ( ) [ ] {{ }} or a quote: then quote it twice, as '{key}=\"...\"'"
    )


def explain_wrong_value(error: OmegaConfBaseException, key: str, value: str, folders: list[Path]) -> str:
    """Return why a value cannot be set, or why a reference cannot be resolved."""
    text, full_key = read_first_error_line(error), str(error.full_key or key)
    place = f"{full_key} " if full_key != key else ""
    if "does not support deletion" in text:
        return f"~{key}: a setting cannot be removed; give it another value, as {key}=null"
    if "is not a subclass of" in text:
        return f"{key}={value}: is a section, not a single value; see trainrun --help all | grep '^{key}[.]'"
    if "to Dict[" in text:
        expected = (
            f", or choose {', '.join(CASES[key])}, as {key}={next(iter(CASES[key]))}" if key in CASES else ""
        )
        return f"{key}={value}: contains named entries, as {key}.mine._target_=my_file.MyClass{expected}"
    if "not in" in text or "is not in struct" in text:
        above = full_key.rpartition(".")[0]
        rate = find_learning_rate(error.parent_node)
        return explain_unknown_key(
            full_key, f"{key}={value}", above, list_known_names(error.parent_node), rate
        )
    if "is not a ListConfig" in text:
        return f"{key}={value}: must be a list, as [1,28,28]"
    setting = settings().get(key) if not place else None
    allowed = (
        f"must be {describe_kind(setting.kind)}"
        if setting and setting.kind is not Any
        else _extract_rule(text)
    )
    if key in ("trainer.max_epochs", "trainer.max_steps"):
        with suppress(ValueError):
            parse_duration(value)
            return f"{key}={value}: {allowed}; with a unit: trainer.max_duration={value}"
    return f"{key}={value}: {place}{allowed}"


def _extract_rule(text: str) -> str:
    """Return what a value must be, according to the message of OmegaConf."""
    kinds = (
        word for kind, word in KINDS.items() if f"converted to {kind}" in text or f"valid {kind}" in text
    )
    return next((f"must be {word}" for word in kinds), text)


def explain_broken_reference(error: OmegaConfBaseException) -> str:
    """Return why a composed config cannot be read: a `${...}` refers to nothing, or to a value of a wrong type."""
    key, text = str(error.full_key or "config"), read_first_error_line(error)
    node = error.parent_node
    above = OmegaConf.to_container(node, resolve=False) if isinstance(node, DictConfig) else {}
    value = str(above.get(error.key, "")) if isinstance(above, dict) else ""
    for start in ("raised while resolving interpolation: ", f"interpolation '{value}': "):
        text = text.rpartition(start)[2]
    if (single := re.search(r"node `(.+?)` is not a container", text)) and node is not None:
        return describe_missing_target(
            settings()[single[1]], single[1], OmegaConf.select(node._get_root(), single[1])
        )
    missing = re.fullmatch(r"Interpolation key '(.+)' not found", text)
    return f"{key}={value}: {f'there is no setting {missing[1]}' if missing else _extract_rule(text)}"


def explain_missing_key(key: str, word: str, above: str, node: Any, folders: list[Path]) -> str:
    """Return why a key does not exist. above: the part of the key that exists. node: the value at that part."""
    if isinstance(node, DictConfig):
        names = list_known_names(node) if above else list_top_level_names(folders)
        return explain_unknown_key(key, word, above, names, find_learning_rate(node))
    if node is None and above in list_open_nodes():
        return f"{word}: no such setting; no class is set for {above}, which {above}._target_=my_file.MyClass does"
    return f"{word}: no such setting; {above} is a single value, as {above}=..."


def explain_unknown_key(key: str, word: str, above: str, names: list[str], learning_rate: Any = None) -> str:
    """Return the message for an unknown key, with similar names or the hint for another trainer's name.

    above: the part of the key that exists. names: the names that exist there. learning_rate: of the optimizer.
    """
    if "/" in key:
        return f"{word}: no such group; a setting is written with dots, as {key.replace('/', '.')}=..."
    head = f"{above}." if above else ""
    part, dot, below = key.removeprefix(head).partition(".")
    kind = "no such setting" if head or below else "no such group or setting"
    sections = [item.name for item in list_setting_fields(RunConfig)]
    last = key.rpartition(".")[2]
    elsewhere = [
        name for name, setting in settings().items() if not setting.section and name.endswith(f".{last}")
    ]
    if last in load_replacement_hints():
        value = word.partition("=")[2]
        answer = format_replacement_hint(last, value, learning_rate)
        if not above.startswith("data.") or f"write {key}=" not in answer:
            return f"{word}: {kind}; {answer}"
        return f"{word}: {kind} of this data.{_format_known_names(names, above)}"
    if last in CASES:
        return f"{word}: must be {' or '.join(f'{last}={case}' for case in CASES[last])}, or be left out"
    if meant := collect_aliases().get(key, collect_aliases().get(last)):
        return f"{word}: {kind}. Did you mean {meant}?"
    if not below and 0 < len(elsewhere) <= 2:
        return f"{word}: {kind}. Did you mean {' or '.join(elsewhere)}?"
    candidates = sections if below and not head else [*names, *(WORDS if above == "model" else ())]
    candidates = list(dict.fromkeys(candidates))
    if near := find_closest_name(part, candidates):
        return f"{word}: {kind}. Did you mean {head}{near}{dot}{below}?"
    if not candidates and above in list_open_nodes():
        return f"{word}: {kind}. Available: names of your own, as {head}{part}._target_=my_file.MyClass"
    return f"{word}: {kind}.{_format_known_names(candidates, above)}"


def _format_known_names(names: list[str], above: str) -> str:
    if not names:
        return ""
    if above and len(names) > MAX_NAMES:
        return f" Available: {', '.join(names[:MAX_NAMES])}, ... (trainrun --help {above.partition('.')[0]})"
    return f" Available: {', '.join(names)}"


def find_learning_rate(node: Any) -> Any:
    """Return `optimizer.lr` of the config that contains a node; None if it is missing."""
    config = node._get_root() if isinstance(node, DictConfig) else None
    values = OmegaConf.to_container(config, resolve=False) if isinstance(config, DictConfig) else None
    optimizer = values.get("optimizer") if isinstance(values, dict) else None
    return optimizer.get("lr") if isinstance(optimizer, dict) else None


def list_known_names(node: Any) -> list[str]:
    """Return the names that a user may type below a node. The internal name `listeners` is left out."""
    return [str(name) for name in node.keys() if name != "listeners"] if isinstance(node, DictConfig) else []  # noqa: SIM118


def list_top_level_names(folders: list[Path]) -> list[str]:
    """Return the names of groups and top-level settings."""
    return sorted(
        {*(item.name for item in list_setting_fields(RunConfig)), *list_groups(folders or [find_conf_dir()])}
    )


def read_first_error_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def filter_config_files(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that can be config files. Hidden files and dangling links are left out."""
    return [path for path in paths if path.is_file() and not path.name.startswith(".")]


def check_config_file(path: Path) -> str:
    """Return why Hydra must not read a config file; "" if it may. Hydra reports invalid YAML itself."""
    try:
        events = list(yaml.parse(read_yaml_text(path, aliases=True), Loader=LOADER))
    except ConfigError as error:
        return "" if isinstance(error.__cause__, yaml.YAMLError | OSError) else str(error)
    first = next((event for event in events if isinstance(event, yaml.NodeEvent)), None)
    if first is not None and not isinstance(first, yaml.MappingStartEvent):
        return f"{path}: must hold `key: value` lines, not a list or a single value"
    for event in events:
        if is_base_60_number(event):
            line = event.start_mark.line + 1
            return (
                f"{path}: line {line}: {event.value}: YAML reads a number to base 60; write '{event.value}'"
            )
    return ""


def is_base_60_number(event: yaml.Event) -> bool:
    """Return whether YAML reads a value with colons, such as 10:30, as one number."""
    if not isinstance(event, yaml.ScalarEvent) or not event.implicit[0] or ":" not in event.value:
        return False
    tag: str = yaml.resolver.Resolver().resolve(yaml.ScalarNode, event.value, event.implicit)
    return tag.endswith((":int", ":float"))


def explain_yaml_error(error: yaml.YAMLError) -> str:
    """Return the file, the line and the problem of a YAML file that Hydra could not parse."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f"{mark.name if mark is not None else 'a config file'}: not YAML: {describe_yaml_error(error)}"
