"""The command line made ready for Hydra: flags first, other names translated, numbers and paths quoted.

Hydra reads `precision=32` as a number and stops; it takes no flags between overrides; it knows nothing
of the names that other frameworks use; in a path it sees lists, quotes and equations. All of that is mended here, on
plain strings. And the folders of options: ours, and the user's, which are searched first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainrun.config.aliases import key_of_today, stands_for, value_of_today
from trainrun.config.schema import is_tracker, open_nodes, settings
from trainrun.errors import ConfigError
from trainrun.instantiate import CALLED
from trainrun.limits import NODE, NODES

WARMUP_UNITS = {"steps": "0", "ratio": "null", "epochs": "null"}
OWN_KEYS = ("hydra.run.dir", "hydra.sweep.dir")
RENAME = "init.rename"
DATA_SETS = ("data.train", "data.val", "data.test")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
SHARE_OF_ALL = re.compile(
    r"(eval|save|logging)_steps=0?\.\d+"
)  # of all steps, by transformers; not known here
CUSTOM = "custom"  # the option of a group that holds nothing but what the user names

# data.path, data.train.val_path, data.train.labels, ... ; init_from, ckpt_path and task.teacher
_PATHS = re.compile(
    r"data\.(?:\w+\.)*(?:\w*path|cache_dir|tokenizer|labels|root|folder|weights)|init_from|ckpt_path|task\.teacher"
)
TRIAL = re.compile(r"(trainer\.|--)?(fast[_-]dev|dry)[_-]run\b")  # wins over any length beside it


@dataclass
class CommandLine:
    """A command line taken apart.

    notes: one line for each name that was translated. twice: one for each key with two values; the last
    one wins, which a program that adds to its own words may want, and a person may not have seen. typed: what was
    typed, by what it was translated to.
    """

    flags: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    typed: dict[str, str] = field(default_factory=dict)

    def as_typed(self, fault: str) -> str:
        """A line on a setting, which names the word and the value that were typed."""
        head, must, allowed = fault.partition(": must be ")
        for word in self.overrides:
            key, _, value = word.lstrip("+").partition("=")
            if must and head.startswith(f"{key}=") and not head.endswith("(a text)"):
                fault = f"{key}={value}{must}{allowed}"
        for meant, word in self.typed.items():
            if fault.startswith((f"{meant}:", f"{meant}=")):
                fault = word + fault[len(meant) :]
        return fault


def split_command_line(argv: list[str]) -> CommandLine:
    """Flags, overrides, and what is meant for the runner itself, wherever they stand."""
    words = CommandLine()
    if any(word[:1] in ("-", "=") or word[-1:] == "=" for word in argv):
        from trainrun.config.other_trainers.flags import without_flags

        found = without_flags(argv, groups([conf_dir()]))
        argv, words.flags, words.config_dirs, words.typed = found
    for word in argv:
        key, _, value = word.partition("=")
        if key not in OWN_KEYS:
            words.overrides.append(word)
            continue
        if words.own.get(key, value) != value:
            words.twice.append(f"{key}={words.own[key]} and {word}: two values; leave one of them out")
        words.own[key] = value
    return words


def translate(
    words: CommandLine, is_option: Callable[[str, str], bool], is_group: Callable[[str], bool]
) -> None:
    """Replace other frameworks' names, shorthands and numbers in place, and note what was meant."""
    out: list[str] = []
    words.overrides.sort(key=lambda word: bool(TRIAL.match(word)))  # the last of two values counts
    typed = {key: (value, f"{key}={value}") for key, value in words.own.items()}
    may_vary = not {"--multirun", "-m"}.isdisjoint(words.flags)
    for word, shown, noted in _without_cases(words):
        bare = word.lstrip("+~")
        sign = word[: len(word) - len(bare)]
        typed_key, equals, value = bare.partition("=")
        key = typed_key if SHARE_OF_ALL.fullmatch(bare) else key_of_today(typed_key, is_group)
        known = settings().get(key)
        if is_group(key) and equals:
            meant = [sign + part for part in _chosen(key, value, is_option)]
        elif known is not None and known.short and equals and not set(value) & set("{(,$"):
            key = f"{key}.{known.short}"
            meant = [f"{key}={value_of_today(key, value)}"]
        elif _takes_a_target(key) and DOTTED.fullmatch(value) and not os.path.exists(value):
            meant = [f"+{key}._target_={value}"]
            if key in DATA_SETS[1:]:
                out.insert(0, f"{key}=null")  # the arguments of the option are not those of another target
        elif key in OWN_KEYS:
            words.twice += _said_twice(f"{key}={value}", shown, typed)
            words.own[key] = value
            words.typed[f"{key}={value}"] = shown
            continue
        elif equals and (is_path(key) or value.startswith("~")):  # of a home folder
            from trainrun.config.typed_values import as_path

            meant = [f"{sign}{key}={as_path(value, may_vary)}"]
            if key == typed_key and shown == word:  # no other word is meant
                words.typed[meant[0].lstrip("+")] = word
                words.twice += _said_twice(f"{key}={value}", word, typed)
                out += meant
                continue
        else:
            value = value_of_today(key, value)
            if key == RENAME:
                from trainrun.config.typed_values import with_bare_keys

                value = with_bare_keys(value)
            meant = [sign + key + equals + value]
        target = meant[-1].removeprefix(
            "+"
        )  # `model=my_net.Net` is our own word, of which nothing is to be said
        is_short = target in (f"{typed_key}._target_={value}", f"{typed_key}.train._target_={value}")
        if meant[-1].replace('"', "") != shown.replace('"', "") and not (noted or is_short):
            words.notes.append(f"{shown} is read as {meant[-1]}")
        for part in meant:
            if part != shown:
                words.typed[part.lstrip("+")] = shown
            words.twice += _said_twice(part, shown, typed)
        out += meant
    words.overrides = _with_custom_groups(_with_ranks(words, out), is_group)


SEVERAL_DEVICES = r"\+*parallel\.devices=(0*([2-9]|[1-9]\d+)|\[[^,]+,.+\])"


def _with_ranks(words: CommandLine, overrides: list[str]) -> list[str]:
    """Several devices mean a rank on each, unless `parallel` is chosen."""
    several = [word for word in overrides if re.fullmatch(SEVERAL_DEVICES, word)]
    if not several or any(re.match(r"\+*parallel(\.mode)?=", word) for word in overrides):
        return overrides
    words.notes.append(f"{several[-1]} is read as {several[-1]} parallel.mode=ddp")
    return [*overrides, "parallel.mode=ddp"]


def _without_cases(words: CommandLine) -> Iterator[tuple[str, str, bool]]:
    """Each setting with the word that was typed, and whether a note has said so."""
    for word in words.overrides:
        shown, meant = words.typed.get(word, word), stands_for(word)
        if meant != [word]:
            words.notes.append(f"{shown} is read as {' '.join(meant)}")
        yield from ((part, shown, meant != [word]) for part in meant)


def _takes_a_target(key: str) -> bool:
    """Whether `key=my_file.MyClass` names what stands at an open node, or what a node calls, as `task.loss`."""
    section, _, name = key.rpartition(".")
    known, above = settings().get(key), settings().get(section)
    if known is not None:
        return known.opens == NODE or key in DATA_SETS
    if name in CALLED and any(f"{section}.".startswith(f"{node}.") for node in open_nodes()):
        return True
    return (above is not None and above.opens == NODES) or (is_tracker(key) and key.count(".") == 1)


def _said_twice(meant: str, word: str, typed: dict[str, tuple[str, str]]) -> list[str]:
    """A line where an earlier word gave the key another value. typed: by key, its value and the word as typed."""
    key, equals, value = meant.lstrip("+").partition("=")
    if not equals or meant.startswith("~") or TRIAL.match(word):
        return []
    earlier_value, earlier_word = typed.setdefault(key, (value, word))
    fault = f"{earlier_word} and {word}: two values for {key}; leave one of them out"
    return [] if earlier_value == value else [fault]


def _chosen(group: str, value: str, is_option: Callable[[str, str], bool]) -> list[str]:
    """The words that choose the options of a group which another word may name."""
    if value.isidentifier() and value != "none" and is_option(group, value):
        return [f"{group}={value}"]
    from trainrun.config.typed_values import group_words

    return group_words(group, value, is_option)


def with_one_warmup(overrides: list[str]) -> list[str]:
    """A warmup that is named replaces the one that the option brings along, in another unit."""
    units = {f"scheduler.warmup_{unit}": empty for unit, empty in WARMUP_UNITS.items()}
    named = {word.lstrip("+").partition("=")[0] for word in overrides} & set(units)
    if len(named) != 1:
        return overrides
    return overrides + [f"{key}={empty}" for key, empty in units.items() if key not in named]


def _with_custom_groups(overrides: list[str], is_group: Callable[[str], bool]) -> list[str]:
    """A `_target_` of the user's own, without a choice of the group, starts from the empty option."""
    chosen = {word.partition("=")[0] for word in overrides}
    added = []
    for word in overrides:
        key = word.lstrip("+").partition("=")[0]
        group = key.partition(".")[0]
        own = key == f"{group}._target_" or re.fullmatch(r"data\.train\.(\w+\.)?_target_", key)
        if own and is_group(group) and group not in chosen:
            added.append(f"{group}={CUSTOM}")
            chosen.add(group)
    return added + overrides


def is_path(key: str) -> bool:
    return _PATHS.fullmatch(key) is not None


def conf_dir() -> Path:
    """The folder of the config groups: inside an installed package, or next to it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "trainrun.yaml").is_file():
            return folder
    raise FileNotFoundError(f"trainrun's own config files are not in {here}: install the package again")


def groups(folders: list[Path]) -> list[str]:
    return sorted({item.name for folder in folders for item in folder.iterdir() if item.is_dir()})


def options(group: str, folders: list[Path]) -> list[str]:
    return sorted({item.stem for folder in folders for item in (folder / group).glob("*.yaml")})


def user_conf_dirs(extra: list[str], working_dir: Path) -> list[Path]:
    """Folders searched before ours: each --config-dir, then ./conf if it has one of our groups."""
    # No link, but to itself.
    folders = [Path(os.path.realpath(os.path.expanduser(folder))) for folder in extra]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {folder}: no such folder")
    beside = (working_dir / "conf").resolve()
    if beside != conf_dir() and any((beside / group).is_dir() for group in groups([conf_dir()])):
        folders.append(beside)
    return folders
