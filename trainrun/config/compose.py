"""Compose a `RunConfig` from overrides. Each mistake becomes one readable line, and all are reported together.

The result contains no objects of Hydra or OmegaConf.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from trainrun.config.aliases import resolve_value_alias
from trainrun.config.argv import (
    CUSTOM,
    CommandLine,
    find_conf_dir,
    find_user_conf_dirs,
    keep_one_warmup,
    list_groups,
    list_options,
    quote_path,
    split_command_line,
    translate_overrides,
)
from trainrun.config.messages import explain_broken_reference
from trainrun.config.overrides import check_override, compose_overrides, move_trackers, parse_override
from trainrun.config.rules import check_data_path
from trainrun.config.saved_values import LOADER, add_references, build_values_to_save, expand_home_folder
from trainrun.config.schema import RunConfig, list_setting_fields, read_value, replace_values, settings
from trainrun.config.validate import check_config, check_target_arguments
from trainrun.data.readers.path_contents import list_data_options
from trainrun.errors import ConfigError, DataError
from trainrun.folder.status import find_best_run, is_sweep
from trainrun.limits import NODES, list_choices

MODELS_OF_DATA = {  # beside the option that a path chooses
    "text": ("model=gpt", "task=language_modeling"),
    "image_folder": ("model=cnn",),
}
FILES_OF_TASK = ("trainrun.yaml", "task/classification.yaml")  # in a folder of the user's, which say the task
SAYS_TASK = re.compile(
    r"(task|experiment|preset)\b.*|.*\bnum_classes=0*([2-9]|1\d)\d*|.*monitor=\S*/acc", re.DOTALL
)


@dataclass(frozen=True)
class Composition:
    """A checked config. overrides: as passed to Hydra. own: the settings of the runner itself, such as its folder."""

    config: RunConfig
    choices: dict[str, str]
    overrides: list[str]
    own: dict[str, str]
    notes: list[str] = field(default_factory=list)


def prepare_command_line(argv: list[str], working_dir: Path) -> tuple[CommandLine, list[Path]]:
    """Return the command line in the form that Hydra needs, and all config folders, the user's first."""
    words = split_command_line(argv)
    folders = [*find_user_conf_dirs(words.config_dirs, working_dir), find_conf_dir()]
    known_groups = list_groups(folders)
    translate_overrides(
        words, lambda group, option: option in list_options(group, folders), lambda name: name in known_groups
    )
    choose_data_option(words, folders)
    faults = [
        f"{key}={value}: {'${...} cannot be used here; name a folder' if value else 'names no folder; give one'}, or "
        "leave it out"
        for key, value in words.own.items()
        if not value or "${" in value
    ]
    if faults:
        raise ConfigError(*map(words.restore_typed_setting, faults))
    return words, folders


def choose_data_option(words: CommandLine, folders: list[Path]) -> None:
    """Add the option that can read `data.path` if no option is typed, and note it.

    Nothing is added if an experiment or a root config of the user chooses the data. Raise ConfigError if several
    options can read the path.
    """
    paths = [word for word in words.overrides if word.lstrip("+").startswith("data.path=")]
    has_own_root = any((folder / "trainrun.yaml").is_file() for folder in folders[:-1])
    typed_keys = {word.lstrip("+~").partition("=")[0] for word in words.overrides}
    chosen_groups = typed_keys | list_experiment_groups(words, folders)
    if not paths or has_own_root or "data" in chosen_groups:
        return
    path = resolve_path(paths[-1], words.overrides, folders)
    ways = [] if path is None else list_reader_settings(path)
    typed = words.typed.get(paths[-1].lstrip("+"), paths[-1])
    path_word = paths[-1].lstrip("+")
    if len(ways) > 1:
        lines = " or ".join(shlex.join([*way, path_word]) for way in ways)
        raise ConfigError(f"{typed}: several readers can read this; write {lines}")
    for way in ways:
        added = [word for word in way if word.partition("=")[0] not in chosen_groups]
        words.notes.append(f"{typed} is read as {' '.join([*added, path_word])}")
        words.overrides[:0] = added


def resolve_path(word: str, overrides: list[str], folders: list[Path]) -> str | None:
    """Return the path of `data.path=...` with its references resolved; None if it is not a single path."""
    override = parse_override(word, [])
    value = None if override is None else override.value()
    if isinstance(value, str) and "${" in value:
        cfg = compose_overrides([word for word in overrides if not check_override(word)], folders, [])
        with suppress(OmegaConfBaseException):  # which the composition reports
            value = None if cfg is None else OmegaConf.select(cfg, "data.path")
    return value if isinstance(value, str) and "${" not in value else None


def list_experiment_groups(words: CommandLine, folders: list[Path]) -> set[str]:
    """Return the groups whose option is chosen by the typed experiment."""
    names = [word.partition("=")[2] for word in words.overrides if word.startswith("experiment=")]
    files = [folder / "experiment" / f"{name}.yaml" for name in names for folder in folders]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    return {group for text in texts for group in re.findall(r"^\s*- override /(\w+):", text, re.MULTILINE)}


def list_reader_settings(path: str) -> list[list[str]]:
    """Return a list of settings for each option that can read the path."""
    ways = {option: [f"data={option}", *MODELS_OF_DATA.get(option, ())] for option in list_data_options(path)}
    if "image_folder" in ways and "csv" in ways:
        tables = sorted(file.name for file in Path(path).expanduser().glob("*.csv"))
        ways["image_folder"] += [f"data.train.labels={quote_path(name, False)}" for name in tables[:1]]
    return list(ways.values())


def compose_run(argv: list[str], working_dir: Path | None = None, quantities: str = "") -> Composition:
    """Return the config of a command line. Raise ConfigError with all of its faults.

    quantities: a description of the targets if they are real numbers and come from Python; else "".
    """
    words, folders = prepare_command_line(argv, working_dir or Path.cwd())
    words.quantities = quantities
    return compose_command_line(words, folders)


def compose_command_line(words: CommandLine, folders: list[Path]) -> Composition:
    """Return the config of a prepared command line. Raise ConfigError with all of its faults."""
    try:
        return _compose_and_check(words, folders)
    except ConfigError as error:
        # A word may stand for several settings.
        faults = dict.fromkeys(map(words.restore_typed_setting, error.faults))
        raise ConfigError(*faults) from error


def _compose_and_check(words: CommandLine, folders: list[Path]) -> Composition:
    wrong = {word: fault for word in words.overrides if (fault := check_override(word))}
    faults = list(wrong.values())
    overrides = keep_one_warmup([word for word in words.overrides if word not in wrong])
    cfg = compose_overrides(overrides, folders, faults)
    if cfg is None:
        raise ConfigError(*faults)
    choices = {
        key: str(value) for key, value in cfg.hydra.runtime.choices.items() if not key.startswith("hydra")
    }
    try:
        config = build_run_config(cfg)
    except ConfigError as error:
        raise ConfigError(*faults, *error.faults) from error
    except OmegaConfBaseException as error:
        raise ConfigError(*faults, explain_broken_reference(error)) from error
    faults += check_config(config)
    if config.data.path is not None:
        faults += check_data_path(config)
    faults += drop_reported_faults(check_target_arguments(config), faults)
    if faults:
        raise ConfigError(*faults)
    config = replace_sweeps_by_best_runs(config, words.notes)
    if config.run_name is None:
        data = _format_option_name(config.data.name, config.data.train)
        model = _format_option_name(choices.get("model", "model"), config.model)
        config = replace(config, run_name=f"{data}-{model}")
    if is_task_undecided(config, words.overrides, folders) and (reason := explain_regression(config, words)):
        words.notes.append(reason)
        words.overrides.insert(0, "task=regression")
        return _compose_and_check(words, folders)
    return Composition(config, choices, overrides, words.own, words.notes)


def is_task_undecided(config: RunConfig, overrides: list[str], folders: list[Path]) -> bool:
    """Return whether the task is the default one and no setting of the user requires classes.

    folders: of configs, the user's first.
    """
    text = (folders[-1] / "task/classification.yaml").read_text(encoding="utf-8")
    usual = yaml.load(text, Loader=LOADER)
    has_own = any((folder / name).is_file() for folder in folders[:-1] for name in FILES_OF_TASK)
    if has_own or config.task != usual:
        return False
    if any(SAYS_TASK.fullmatch(word.lstrip("+~")) for word in overrides):
        return False
    counts = (config.data.num_classes, (config.model or {}).get("num_classes"))
    has_classes = any(isinstance(count, int) and count > 1 for count in counts)
    return not (has_classes or config.data.sampling == "balanced" or config.data.stratified)


def explain_regression(config: RunConfig, words: CommandLine) -> str:
    """Return a note that the targets are real numbers, with the setting that makes them classes; "" if they are not."""
    node = config.data.train or {}
    quantities, way = words.quantities, "integers as targets"
    if not quantities and str(node.get("_target_")).startswith("trainrun.data.readers.tables."):
        from trainrun.data.readers.tables.table_choice import describe_quantities  # others need none

        way = "task=classification data.train.target_dtype=class"
        with suppress(DataError):  # which the run reports
            quantities = describe_quantities(node)
    return quantities and f"{quantities}, so task=regression is added ({way} for classes)"


def replace_sweeps_by_best_runs(config: RunConfig, notes: list[str]) -> RunConfig:
    """Return the config with each folder of a sweep replaced by the folder of its best run.

    Raise ConfigError for a sweep without a finished run.
    """
    named: dict[str, Any] = {"init_from": config.init_from, "ckpt_path": config.ckpt_path}
    if isinstance(config.task, dict):
        named["task.teacher"] = config.task.get("teacher")
    best: dict[str, Any] = {}
    for key, value in named.items():
        folder = Path(value).expanduser().absolute() if isinstance(value, str) else None
        if folder is not None and is_sweep(folder):
            run, line = find_best_run(folder)
            best[key] = str(run.root)
            notes.append(f"{key}: {line}")
    return replace_values(config, best)


def _format_option_name(option: str, node: Any) -> str:
    """Return the name of an option; for the option `custom`, the name of the class or function."""
    target = node.get("_target_") if option == CUSTOM and isinstance(node, dict) else None
    name = str(target).rpartition(".")[2]
    return name if target and name.isidentifier() else option


def drop_reported_faults(more: dict[str, str], faults: list[str]) -> list[str]:
    """Return the messages of `more` about keys that no message in `faults` is about."""
    keys_with_fault = {fault.partition("=")[0] for fault in faults}
    return [fault for key, fault in more.items() if key not in keys_with_fault]


def build_run_config(cfg: DictConfig) -> RunConfig:
    """Return the composed config as plain dataclasses, with every reference resolved. Raise ConfigError.

    All types are checked already, because Hydra composes into the schema.
    """
    if faults := move_trackers(cfg):
        raise ConfigError(*faults)
    try:
        config = replace_value_aliases(
            RunConfig(
                **{item.name: _convert_to_object(cfg[item.name]) for item in list_setting_fields(RunConfig)}
            )
        )
        with open_dict(cfg):
            del cfg["hydra"]  # half of all values, none of them a run's
        return add_references(cfg, expand_home_folder(config))
    except MissingMandatoryValue as error:
        missing = sorted(key for key in OmegaConf.missing_keys(cfg) if not key.startswith("hydra."))
        raise ConfigError(*[f"{key}: needs a value; add {key}=..." for key in missing]) from error


def replace_value_aliases(config: RunConfig) -> RunConfig:
    """Return the config with the values that aliases stand for, and without entries that are null."""
    sets = {  # `hook.x=null` takes an entry away
        key: {name: node for name, node in read_value(config, key).items() if node is not None}
        for key, setting in settings().items()
        if setting.opens == NODES and isinstance(read_value(config, key), dict)
    }
    spoken = [key for key, setting in settings().items() if setting.words]
    words = {key: resolve_value_alias(key, str(read_value(config, key))) for key in spoken}
    return replace_values(
        config,
        sets | {key: word for key, word in words.items() if word in list_choices(settings()[key].kind)},
    )


def _convert_to_object(value: Any) -> Any:
    return OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def format_config(config: RunConfig) -> str:
    """Return the config as YAML text with references and without secrets. `load_config` reads it."""
    return format_yaml(build_values_to_save(config))


def format_yaml(values: dict[str, Any]) -> str:
    """Return plain values as YAML text. libyaml needs a tenth of the time of the writer in Python."""
    try:
        return dump_yaml(values, getattr(yaml, "CSafeDumper", yaml.SafeDumper))
    except UnicodeEncodeError:  # libyaml takes no path with bytes that are not UTF-8
        return dump_yaml(values, yaml.SafeDumper)


def dump_yaml(values: dict[str, Any], writer: Any) -> str:
    class Dumper(writer):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(str, represent_text)
    text: str = yaml.dump(
        values, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=Dumper
    )
    return text


def represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    """Return the YAML node of a text, in quotes if OmegaConf would read it as a number or a boolean."""
    style = "'" if text in ("y", "Y", "n", "N") or is_read_as_number(text) else None
    node: yaml.ScalarNode = dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
    return node


def is_read_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
