"""The tokenizer that was trained on the data of a run. It is stored in the run folder, also for later runs that
start from this run.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from trainrun.checkpoint.files import list_committed_steps
from trainrun.config.schema import RunConfig, replace_values
from trainrun.data.readers.text.text import find_tokenizer
from trainrun.data.readers.text.tokenizer import open_tokenizer
from trainrun.data.readers.text.trained_tokenizer import is_trained
from trainrun.errors import ConfigError
from trainrun.folder.run_folder import RunDir, read_identity, write_identity, write_text
from trainrun.interfaces import Parallel

SEAL = "tokenizer"  # in RUN.json: the hash of the file


def apply_run_tokenizer(config: RunConfig, run: RunDir, parallel: Parallel, notes: list[str]) -> RunConfig:
    """Return the config with a tokenizer file instead of `bpe:4096`; rank 0 trains it if it does not exist.

    A run that starts with the weights of another one uses that run's tokenizer. Raise ConfigError if the file is
    missing or has changed.
    """
    if "_target_" not in config.data.train:  # each set would have another
        raise ConfigError(
            "data.train: several sets by name cannot share a tokenizer that is trained for the run; train it with one "
            "of them, and name its RUN_DIR/tokenizer.json as the tokenizer of all"
        )
    if not is_trained(config.data.train.get("tokenizer")):
        return config
    if parallel.rank == 0:
        _provide_tokenizer(config, run, notes)
    text = parallel.gather(run.tokenizer.read_text(encoding="utf-8") if parallel.rank == 0 else "")[0]
    if not run.tokenizer.is_file():  # this rank does not see the folder of rank 0
        write_text(run.tokenizer, text)
    spec = f"{config.data.train['tokenizer'].partition('@')[0]}@{run.tokenizer}"
    nodes = {name: _set_tokenizer_file(getattr(config.data, name), spec) for name in ("train", "val", "test")}
    return replace_values(config, {f"data.{name}": node for name, node in nodes.items()})


def _set_tokenizer_file(node: Any, spec: str) -> Any:
    """Return the node, or each of several named nodes, with the tokenizer file."""
    if not isinstance(node, dict):
        return node
    if str(node.get("tokenizer")).startswith("bpe:"):
        return {**node, "tokenizer": spec}
    return (
        node
        if "_target_" in node
        else {name: _set_tokenizer_file(inner, spec) for name, inner in node.items()}
    )


def saved_tokenizer(run: RunDir) -> Path:
    """Return the tokenizer file of a run. Raise ConfigError if it is missing or has changed since the training."""
    if not run.tokenizer.is_file():
        raise ConfigError(f"{run.tokenizer}: is missing, but this run was trained with it; restore it")
    identity = read_identity(run) if run.identity.is_file() else {}  # none of a trial
    digest = _hash_file(run.tokenizer)
    if identity.get(SEAL, digest) != digest:
        raise ConfigError(f"{run.tokenizer}: differs from the file of the training; restore that file")
    return run.tokenizer


def _provide_tokenizer(config: RunConfig, run: RunDir, notes: list[str]) -> None:
    if run.tokenizer.is_file() or list_committed_steps(run.checkpoints):
        saved_tokenizer(run)
        return
    source = _find_parent_tokenizer(config)
    if source is not None:
        notes.append(f"data.train.tokenizer: that of {source.parent}, whose weights this run begins with")
    else:
        source, wanted = Path(find_tokenizer(config.data.train)), config.data.train["tokenizer"]
        size = open_tokenizer(str(source))[0].vocabulary
        if f"bpe:{size}" != wanted:
            notes.append(f"data.train.tokenizer={wanted}: the text gives {size:,} tokens, no more")
    run.root.mkdir(parents=True, exist_ok=True)
    making = run.tokenizer.with_suffix(".tmp")
    shutil.copyfile(source, making)
    making.replace(run.tokenizer)
    if run.identity.is_file():
        write_identity(run, read_identity(run) | {SEAL: _hash_file(run.tokenizer)})


def _find_parent_tokenizer(config: RunConfig) -> Path | None:
    """Return the tokenizer of the run that `init_from` or `ckpt_path` names; None without one."""
    for named in filter(None, (config.ckpt_path, config.init_from)):
        place = Path(named).expanduser().absolute()
        for folder in (place, *place.parents[:2]):
            if RunDir(folder).config.is_file() and RunDir(folder).tokenizer.is_file():
                return RunDir(folder).tokenizer
    return None


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
