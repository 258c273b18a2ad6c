"""Continue a run that is in its folder: check that the settings match, and repair damaged files."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainrun.checkpoint.files import FileLayer, list_committed_steps, set_aside
from trainrun.config.saved_config import apply_overrides, load_saved_values, make_paths_absolute
from trainrun.config.saved_values import drop_environment_references, separate_secrets
from trainrun.config.schema import RunConfig, convert_to_plain_values, iterate_config_leaves
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import (
    SEED,
    SEED_DRAWN,
    RunDir,
    build_folder_error,
    has_ever_saved,
    is_run_folder,
    read_bytes,
    read_identity,
    read_json,
    read_valid_identity,
    write_identity,
    write_json,
    write_text,
)
from trainrun.folder.seal import check_files, check_seal
from trainrun.folder.status import read_status
from trainrun.instantiate import TARGET
from trainrun.monitor.metric_rows import read_valid_lines
from trainrun.output import print_note

MAX_WORDS_BYTES = 2**22
SHOWN = 8
KILLED = "ended without a word: killed, or its machine went down"
ABSENT = object()  # of a key that only the other config has


class Difference(NamedTuple):
    """A setting that differs. there: its value in the run folder. here: its new value."""

    key: str
    there: object
    here: object


def load_trusted_config(run: RunDir, overrides: list[str], trust: bool, measured: str = "") -> RunConfig:
    """Load the config of a folder that this user has sealed or trusts now. Raise ConfigError otherwise."""
    values = load_readable_config(run)
    check_seal(run, trust)
    return apply_overrides(values, run.effective_config_path, overrides, measured)


def load_readable_config(run: RunDir) -> dict[str, Any]:
    """Return the config as plain values. Raise ConfigError with advice if it is damaged."""
    path = run.effective_config_path
    try:
        return load_saved_values(path)
    except ConfigError as error:
        seed = ""
        with contextlib.suppress(ConfigError):
            seed = f"seed={read_identity(run)[SEED]} "
        again = shlex.quote(f"ckpt_path={run.root}")
        raise ConfigError(
            f"{error}; continue in another folder with the settings of {run.overrides.name} and {seed}{again}"
        ) from error


def check_modules(run: RunDir, config: RunConfig) -> None:
    """Raise ConfigError if a module that the config names cannot be found here. Import nothing."""
    invalidate_caches()  # a module may be younger than the listing of its folder that Python keeps
    for key, target in iterate_config_leaves(convert_to_plain_values(config)):
        if key.rpartition(".")[2] != TARGET or not isinstance(target, str):
            continue
        module = target.partition(".")[0]
        if not module.isidentifier() or module in sys.modules:
            continue
        if find_spec(module) is None:
            raise ConfigError(
                f"{run.root}: names {target}, but there is no module {module} (looked in {Path.cwd()}, PYTHONPATH and "
                f"what is installed){_describe_origin(run)}"
            )


def _describe_origin(run: RunDir) -> str:
    """Return a hint about where the modules of the run are likely to be."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        environment = read_json(run.environment)
        began, command = environment["working_dir"], environment["command"]
        has_folder = any(argument.startswith(("--config-dir", "-cd")) for argument in command)
        remedy = " with the same --config-dir" if has_folder else f", or set PYTHONPATH={began}"
        return f"; the run began in {began}: run this command there{remedy}"
    return ""


def check_no_foreign_files(run: RunDir) -> None:
    """Raise ConfigError if the folder holds other files under the names that a run writes."""
    places = (
        run.config, run.overrides, run.environment, run.metrics, run.samples, run.pictures, run.tokenizer,
        run.status, run.log, run.report, *run.plots.glob("*.png"),
    )  # fmt: skip
    present = [str(path.relative_to(run.root)) for path in places if path.exists()]
    if has_ever_saved(run):  # the newest stay, and the first ones of a new run would be the oldest
        present.append(run.checkpoints.name)
    if present and not is_run_folder(run):
        remedy = "name another folder, or take them away"
        if has_ever_saved(run):
            remedy += f" (ckpt_path={run.root} continues from a checkpoint)"
        raise ConfigError(
            f"output_dir={run.root}: contains {', '.join(present)} but no {run.identity.name}, so no run wrote it; "
            + remedy
        )


def check_checkpoint_link(run: RunDir) -> None:
    """Raise ConfigError if the folder of checkpoints is a dangling link; otherwise the run would start over."""
    place = run.checkpoints
    if place.is_symlink() and not place.is_dir():
        raise ConfigError(
            f"{place}: leads to {place.readlink()}, which is not a folder; mount or create it, or remove the link to "
            "train without those files"
        )


def load_config_to_continue(run: RunDir, config: RunConfig) -> RunConfig | None:
    """Return the config with the seed of the earlier session; None if the folder holds no run to continue.

    The targets of the config come from this command line, so only the files of the folder can be foreign. Raise
    ConfigError if the folder holds another run, or something else.
    """
    check_no_foreign_files(run)
    check_checkpoint_link(run)
    repair_folder(run)
    if not run.config.exists() or (not has_trained(run) and remove_failed_run(run)):
        return None
    resume = f"trainrun resume {shlex.quote(str(run.root))}"
    check_files(run.root, trust=False, way=f"{resume} --trust")  # a new run takes no such flag
    before = apply_overrides(load_readable_config(run), run.effective_config_path, [])
    if config.seed is None and read_identity(run).get(SEED_DRAWN, True):
        config = replace(config, seed=before.seed)
    if changes := compare_configs(
        make_paths_absolute(before, Path.cwd()), make_paths_absolute(config, Path.cwd())
    ):
        there, here = (
            flatten_config(separate_secrets(item)[0]) for item in (before, config)
        )  # without secrets
        changed = [Difference(key, there.get(key, ABSENT), here.get(key, ABSENT)) for key, _, _ in changes]
        shown = ", ".join(
            f"{key}={format_value_as_typed(old)} (here {format_value_as_typed(new)})"
            for key, old, new in changed[:SHOWN]
        )
        rest = f" and {len(changed) - SHOWN} other values" if len(changed) > SHOWN else ""
        way = f"{resume} (settings that may change can follow)"
        if "trainrun.runs.api.python_object" in run.config.read_text():  # its objects are in no other process
            way = f"trainrun.train(..., 'ckpt_path={run.root}')"
        raise ConfigError(
            f"output_dir={run.root}: already contains a run, which has {shown}{rest}; name another folder, or "
            f"continue that run: {way}"
        )
    if remove_failed_run(run):
        return None
    restore_config(run)
    return config


def check_same_network(run: RunDir, saved: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError if overrides change the network or the weights that it began with.

    saved: the config in the folder.
    """
    changed = compare_configs(saved, config)
    faults = [
        f"{key}={format_value_as_typed(here)}: the run was trained with {format_value_as_typed(there)}, and its "
        f"transforms cannot change; leave it out, or start a new run with its weights: init_from={run.root}"
        for key, there, here in changed
        if key.startswith("transform.")
    ]
    if list_committed_steps(run.checkpoints) and not config.checkpoint.adapter_only:
        faults += [
            f"{key}={format_value_as_typed(here)}: applies only at the start of a run, and this run continues from a "
            "checkpoint; leave it out, or start a new run"
            for key, _, here in changed
            if here is not None
            and (key.startswith(("init_from", "init.")) or key in ("model.init", "ckpt_path"))
        ]
    if faults:
        raise ConfigError(*faults)


def compare_configs(before: RunConfig, config: RunConfig) -> list[Difference]:
    there, here = flatten_config(before), flatten_config(config)
    return [
        Difference(key, there.get(key, ABSENT), here.get(key, ABSENT))
        for key in {**there, **here}
        if there.get(key, ABSENT) != here.get(key, ABSENT)
    ]


def flatten_config(config: RunConfig) -> dict[str, object]:
    """Return the values of a config by their full keys. A list is one value."""

    def flatten(value: Any, key: str) -> Iterator[tuple[str, object]]:
        if not isinstance(value, dict):
            yield key, value
            return
        for name, item in value.items():
            yield from flatten(item, f"{key}.{name}" if key else str(name))

    return dict(flatten(convert_to_plain_values(drop_environment_references(config)), ""))


def format_value_as_typed(value: object) -> str:
    """Format a value as it would be typed."""
    if value is ABSENT:
        return "nothing"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()


def restore_config(run: RunDir) -> None:
    """Restore config and settings from before a resume that was refused or killed before its first step."""
    for before, path in ((run.config_before, run.config), (run.overrides_before, run.overrides)):
        if before.is_file():
            before.replace(path)


def has_trained(run: RunDir) -> bool:
    """Return whether the rows or the status of a run record a step."""
    rows = read_valid_lines(run.metrics)[0] if run.metrics.is_file() else []
    return read_status(run).get("step", 0) > 0 or any('"kind": "train"' in row for row in rows)


def remove_failed_run(run: RunDir) -> bool:
    """Remove the files of a run that ended before it saved anything. Return whether they were removed."""
    state = read_status(run).get("state") if run.status.exists() else "stopped"  # before it could say so
    if state not in ("failed", "stopped") or has_ever_saved(run):
        return False
    for path in (
        run.metrics,
        run.log,
        run.status,
        run.config_before,
        run.overrides_before,
        run.config,
    ):  # the last: until then it is all forgotten again
        path.unlink(missing_ok=True)
    return True


def describe_finished_run(run: RunDir, saved: RunConfig, config: RunConfig) -> str:
    """Return the message for a run that has ended and would end again at once with this config; else "".

    saved: the config in the folder.
    """
    status = read_status(run)
    if status.get("state") != "done":
        return ""
    before, config = (make_paths_absolute(run_config, Path.cwd()) for run_config in (saved, config))
    limits = {name: getattr(config.trainer, name) for name in ("max_epochs", "max_steps", "max_duration")}
    same = replace(before, trainer=replace(before.trainer, **limits)) == config
    reached = [
        limit is not None and status.get(name, 0) >= limit
        for name, limit in (("epoch", limits["max_epochs"]), ("step", limits["max_steps"]))
    ]
    if not same or (before != config and not any(reached)):
        return ""
    reason = str(status.get("reason"))
    remedies = {
        "trainer.max_steps": "trainer.max_steps=...",
        "trainer.max_duration": "trainer.max_duration=...",
        "trainer.max_time": "trainer.max_time=...",
        "early stopping": "trainer.early_stopping=false (or trainer.early_stopping.patience=...)",
    }
    usual = "trainer.max_epochs=... (or null, with trainer.max_steps=...)"
    remedy = next((way for limit, way in remedies.items() if reason.startswith(limit)), usual)
    folder = shlex.quote(str(run.root))
    return (
        f"{run.root}: finished already ({reason}). To train more: trainrun resume {folder} {remedy}. To draw its plots "
        f"again: trainrun report {folder}"
    )


def repair_folder(run: RunDir, note: Callable[[str], None] = print_note) -> None:
    """Repair the folder of a run so that it can continue. Only the process that holds its lock may call this.

    Damaged files are set aside. Raises ConfigError if the folder is not writable.
    """
    try:
        for path in _list_files(run):
            if os.path.lexists(path) and not _is_not_folder(path):
                _set_aside_with_note(path, "is no plain file", note)
        for path in (run.plots, run.nonfinite):
            if os.path.lexists(path) and not path.is_dir() and _may_be_set_aside(path):
                _set_aside_with_note(path, "is no folder", note)
        _repair_identity(run, note)
        _repair_status(run, note)
        _repair_rows(run, note)
    except OSError as error:
        raise build_folder_error(run.root, error) from error


def _list_files(run: RunDir) -> list[Path]:
    """Return all regular files that a run may write; files of single ranks are found by patterns."""
    single_files = (
        run.status, run.overrides, run.environment, run.identity, run.identity_copy, run.metrics, run.log, run.samples,
        run.report, run.job, run.config_before, run.overrides_before, run.best,
    )  # fmt: skip
    patterns = ("rank*.log", "stacks-rank*.txt", ".error-rank*.json")
    return [*single_files, *(path for pattern in patterns for path in sorted(run.root.glob(pattern)))]


def _is_not_folder(path: Path) -> bool:
    """Return whether a path is not a folder. A link counts as its target, a broken link as a file."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return True
    except OSError:  # a link that leads to itself
        return False


def _may_be_set_aside(path: Path) -> bool:
    """Return whether a path is a regular file or a broken link, so that it may be set aside."""
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and not _is_not_folder(path))


def _repair_identity(run: RunDir, note: Callable[[str], None]) -> None:
    for path in (run.identity, run.identity_copy):
        if not read_valid_identity(path):
            try:
                identity = read_identity(run)
            except ConfigError:
                return  # said where it is needed
            if path.exists():
                _set_aside_with_note(path, "is damaged", note)
            elif path == run.identity:
                note(f"{path}: missing; written again from its copy")
            write_identity(run, identity)


def _repair_status(run: RunDir, note: Callable[[str], None]) -> None:
    """Restore the file of overrides from the status, and mark a killed run as stopped."""
    status = read_status(run)
    if run.status.is_file() and not status:
        _set_aside_with_note(run.status, "is damaged", note)
    if run.overrides.is_file() and not _is_utf8_text(run.overrides):
        _set_aside_with_note(run.overrides, "is damaged", note)
    if status and not run.overrides.exists():
        write_text(run.overrides, "".join(f"{word}\n" for word in status.get("overrides", [])))
    if status.get("state") == "running":  # and nobody held its lock
        write_json(run.status, status | {"state": "stopped", "message": KILLED})


def _is_utf8_text(path: Path) -> bool:
    try:
        read_bytes(path, MAX_WORDS_BYTES).decode("utf-8")
    except ValueError:
        return False
    return True


def _repair_rows(run: RunDir, note: Callable[[str], None]) -> None:
    if not run.metrics.is_file():
        return
    lines, num_bad = read_valid_lines(run.metrics)
    if num_bad:
        rows = f"{num_bad} of its {len(lines) + num_bad} rows are damaged"
        _set_aside_with_note(run.metrics, f"{rows}, the others remain", note)
        write_text(run.metrics, "".join(f"{line}\n" for line in lines), durable=True)


def _set_aside_with_note(path: Path, why: str, note: Callable[[str], None]) -> None:
    target = set_aside(path, FileLayer())
    note(f"{path}: {why}; set aside as {target.name}, the run continues without it")
