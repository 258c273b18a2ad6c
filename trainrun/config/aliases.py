"""Other names for settings, options and targets: those of other frameworks, and those of earlier versions.

The other names of a setting stand beside its field in `config/schema.py`; here is what has no field.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from trainrun.config.schema import SAME, RunConfig, settings
from trainrun.output import say

KEYS = {  # of groups, of arguments in open nodes, and of the runner itself
    **dict.fromkeys(("lr", "learning_rate", "optimizer.learning_rate"), "optimizer.lr"),
    "weight_decay": "optimizer.weight_decay",
    "layer_decay": "optimizer.layer_decay",
    **dict.fromkeys(("strategy", "trainer.strategy"), "parallel"),
    "trainer.precision": "precision",
    "lr_scheduler_type": "scheduler",
    "optim": "optimizer",
    "output_dir": "hydra.run.dir",
    **dict.fromkeys(("trainer.compile.enabled", "compile.enabled"), "trainer.compile"),
}
OPTIONS = {
    "precision": {
        **dict.fromkeys(("32", "fp32", "float32", "no"), "32-true"),
        **dict.fromkeys(("16", "fp16", "float16", "amp_fp16"), "16-mixed"),
        **dict.fromkeys(("bf16", "bfloat16", "amp_bf16"), "bf16-mixed"),
        **dict.fromkeys(("64", "fp64", "float64", "double"), "64-true"),
    },
    "parallel": {"none": "single", "null": "single", "ddp_spawn": "ddp", "processes": "ddp"},
    "scheduler": {"none": "constant", "null": "constant", "off": "constant"},
    "preset": {"null": "none"},
    "monitor": {"null": "none"},
}
ANSWERS = {  # names of other frameworks that have no single setting here, and the way to the same
    "fp16": "use precision=16-mixed",
    "bf16": "use precision=bf16-mixed",
    "tf32": "use precision.matmul=high",
    "use_cpu": "use parallel.accelerator=cpu",
    "no_cuda": "use parallel.accelerator=cpu",
    "warmup_steps": "use scheduler.warmup_steps",
    "warmup_ratio": "use scheduler.warmup_ratio",
    "report_to": "use monitor.mine._target_=my_file.MyClass, or monitor=tensorboard",
    "logger": "use monitor.mine._target_=my_file.MyClass, or monitor=tensorboard",
    "callbacks": "use hook.mine._target_=my_file.MyClass, or monitor.mine for what only listens",
    "load_best_model_at_end": "the best checkpoint is kept beside the last; see trainrun help checkpoints",
    "eval_strategy": "use trainer.val_check_interval, in steps (100) or epochs (1.0)",
    "num_nodes": "start it with torchrun or Slurm; see trainrun help parallel",
    "fast_dev_run": "use preset=debug",
}
OLD_FORMATS, READERS = "trainrun.data.formats", "trainrun.data.readers"
MOVED = {
    "trainrun.data.digits": f"{READERS}.builtin.digits",
    "trainrun.data.fashion_mnist": f"{READERS}.builtin.fashion_mnist",
    "trainrun.data.synthetic": f"{READERS}.builtin.synthetic",
    "trainrun.data.arrays": f"{READERS}.arrays.numpy_files",
    f"{OLD_FORMATS}.hdf5": f"{READERS}.arrays.hdf5",
    f"{OLD_FORMATS}.idx_files": f"{READERS}.arrays.idx_files",
    f"{OLD_FORMATS}.csv_files": f"{READERS}.tables.csv_files",
    f"{OLD_FORMATS}.parquet": f"{READERS}.tables.parquet",
    f"{OLD_FORMATS}.huggingface": f"{READERS}.tables.huggingface",
    f"{OLD_FORMATS}.image_folder": f"{READERS}.pictures.image_folder",
    f"{OLD_FORMATS}.lmdb_file": f"{READERS}.records.lmdb_file",
    f"{OLD_FORMATS}.tfrecord": f"{READERS}.records.tfrecord",
    f"{OLD_FORMATS}.webdataset": f"{READERS}.records.webdataset",
    f"{OLD_FORMATS}.text": f"{READERS}.text.text",
}  # module -> module; a new move is one line here


@cache
def aliases(schema: type = RunConfig) -> dict[str, str]:
    """Every other name of a setting or section, and the key it stands for."""
    return KEYS | {name: key for key, found in settings(schema).items() for name in found.aliases}


def key_of_today(key: str, is_group: Callable[[str], bool], schema: type = RunConfig) -> str:
    """The key that another name stands for; a section's other name stands for its settings too."""
    known = aliases(schema)
    if key in known:
        return known[key]
    if key.startswith("monitor.listeners."):
        return key.replace(".listeners", "", 1)
    head, dot, tail = key.partition(".")
    return known[head] + dot + tail if head in known and dot and not is_group(head) else key


def value_of_today(key: str, value: str, schema: type = RunConfig) -> str:
    """The value of a setting that another word stands for; any other value as it is."""
    found = settings(schema).get(key)
    return found.words.get(value.lower(), value) if found is not None else value


def with_names_of_today(saved: dict[str, Any], path: Path) -> dict[str, Any]:
    """The plain values of a saved config in which settings that were renamed since have their new names."""
    saved = copy.deepcopy(saved)
    for old, key in aliases().items():
        found = settings().get(key)
        if "." in old and found is not None and found.section is None:
            _move(saved, old, key, path)
    _move(saved, "trainer.compile.enabled", "trainer.compile.scope", path)
    _move(saved, "trainer.return_freed_memory", "trainer.cpu_allocator", path)
    data, parallel = (
        section if isinstance(section, dict) else {} for section in map(saved.get, ("data", "parallel"))
    )
    if data.get("transform") and "val_transform" not in data:
        data["val_transform"] = SAME  # its validations went through data.transform too
        _note(f"{path}: data.transform is of training alone now; data.val_transform=same goes on as before")
    if "stop_grace_seconds" in parallel:
        del parallel["stop_grace_seconds"]  # it was of the ranks alone; the run's own has another meaning
        _note(f"{path}: parallel.stop_grace_seconds is left out; it is trainer.stop_grace_seconds now")
    return saved


def _move(saved: dict[str, Any], old: str, key: str, path: Path) -> None:
    """Give the value at an old key to the key of today, in its words."""
    above, _, name = old.rpartition(".")
    node: Any = saved
    for part in above.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or name not in node:
        return
    value = str(node.pop(name)) if settings()[key].words else node.pop(name)
    meant = value_of_today(key, value) if isinstance(value, str) else value
    target = saved
    *sections, last = key.split(".")
    for part in sections:
        target = target.setdefault(part, {})
    target.setdefault(last, meant)
    _note(f"{path}: {old}={value} is read as {key}={meant}")


def target_of_today(target: Any) -> Any:
    """The path of a target whose module has moved; any other value as it is."""
    module, dot, name = target.rpartition(".") if isinstance(target, str) else ("", "", "")
    return f"{MOVED[module]}{dot}{name}" if module in MOVED else target


def with_targets_of_today(value: Any) -> Any:
    """Plain values of a config with every moved target named as it is today, and a note for each."""
    if isinstance(value, list):
        return [with_targets_of_today(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {name: with_targets_of_today(item) for name, item in value.items()}
    target = found.get("_target_")
    if target is not None and (today := target_of_today(target)) != target:
        found["_target_"] = today
        _note(f"_target_={target} is read as {today}")
    return found


@cache
def _note(text: str) -> None:
    """Print once, though a run reads its config several times."""
    say(f"note: {text}", file=sys.stderr)
