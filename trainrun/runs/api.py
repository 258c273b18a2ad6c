"""The Python interface to a run: train one, load one, and read its config, numbers and model from its folder."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from trainrun.checkpoint.files import format_folder_name, list_committed_steps
from trainrun.checkpoint.load import choose_checkpoint, read_checkpoint
from trainrun.config.compose import compose_run
from trainrun.config.saved_config import load_config
from trainrun.config.schema import RunConfig
from trainrun.data.facts import count_quantities
from trainrun.errors import ConfigError, TrainingError
from trainrun.folder.run_folder import LaunchSpec, RunDir, read_json
from trainrun.folder.status import read_status
from trainrun.monitor.metric_rows import parse_non_finite, read_metric_rows
from trainrun.output import say
from trainrun.runs.restore_config import load_network
from trainrun.runs.run import open_or_create_run, open_run, start_training
from trainrun.runtime.memory_layout import make_dense
from trainrun.runtime.network_copy import copy_network
from trainrun.seeding import restore_random_state
from trainrun.transform.lora import LoraLinear, merge_lora

if TYPE_CHECKING:
    from torch import Tensor, nn

FRAME = "width: 100%; height: 40em; border: 0"  # of a page in a notebook

STATE_WORDS = {"done": "ended", "stopped": "stopped", "pruned": "pruned"} | {
    "failed": "failed",
    "running": "running",
}


@dataclass(frozen=True, repr=False)
class Run:
    """One run folder. Files are read when they are needed.

    trust: whether its config may name code from somebody else. objects: the Python objects that the run was given.
    """

    folder: Path
    trust: bool = False
    objects: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        status = read_status(self.files)
        reason = str(status.get("message") or status.get("reason") or "").partition("\n")[0]
        value, metric = status.get("value"), status.get("monitor")
        best = "" if value is None else f", best {metric} {value:.5g} at step {status.get('best_step')}"
        state = STATE_WORDS.get(str(status.get("state")), "unknown state")
        why = f" ({reason})" if reason else ""
        return f"Run({str(self.folder)!r}): {state} at step {status.get('step', 0)}{why}{best}"

    @property
    def files(self) -> RunDir:
        return RunDir(self.folder)

    @property
    def config(self) -> RunConfig:
        return load_config(self.files.config, [])

    @property
    def status(self) -> dict[str, Any]:
        """Return the content of `status.json`: state, reason, best value, step, seconds."""
        return parse_non_finite(read_json(self.files.status))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return all rows of `metrics.jsonl`. The value `kind` says what a row is about."""
        return read_metric_rows(self.files.metrics)

    def load_model(
        self, which: str | None = None, model: nn.Module | None = None, merge: bool = False
    ) -> nn.Module:
        """Return the trained network in evaluation mode, on the CPU.

        which: best, last, or a checkpoint's name; by default the best, or the last if no metric chose a best one.
        model: a network built like the one that the run got from Python, if this is another process; it is not
            changed.
        merge: return a plain network, with the LoRA corrections added to its weights.

        The network takes inputs like the batches of the run: images scaled (0 to 1 for `data=image_folder`), and
        normalised if `data.augment.normalize` was set.
        """
        with register_objects(dict(self.objects) | ({} if model is None else {"model": model})):
            network = load_network(self.files, choose_checkpoint(self.files.checkpoints, which), self.trust)
        if merge:
            if not any(isinstance(layer, LoraLinear) for layer in network.modules()):
                raise ConfigError(f"{self.folder}: merge=True: its network has no LoRA layers; leave it out")
            return merge_lora(network)
        return network

    def predict(
        self, samples: Any, which: str | None = None, num_classes_shown: int = 3
    ) -> dict[str, list[Any]]:
        """Return the predictions for new samples as columns. `prediction` holds class names if the classes have
        names.

        samples: paths, folders or patterns; one or several images (PIL, uint8 arrays (H, W, C) or tensors (C, H,
            W)); table rows (a mapping, a list of mappings, a DataFrame); or an array (N, ...) of inputs like those
            of the run's data.
        num_classes_shown: the number of most likely classes that get columns.

            run = trainrun.load("runs/plants")
            run.predict({"height": 3.1, "width": 0.4})["prediction"]
        """
        satellite = import_module("trainrun.prediction.new_samples")
        with register_objects(dict(self.objects)):
            columns: dict[str, list[Any]] = satellite.predict_new_samples(
                self.files, samples, which, self.trust, num_classes_shown
            )
        return columns

    def history(self) -> Any:
        """Return the logged training and validation metrics as columns by name; None where a row lacks the value.

        The result is a DataFrame if pandas is installed, else a dict of lists.
        """
        rows = [row for row in self.metrics if row.get("kind") in ("train", "eval")]
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {name: [row.get(name) for row in rows] for name in names}
        if find_spec("pandas") is None:
            return columns
        return import_module("pandas").DataFrame(columns)

    def plot(self) -> RunPage:
        """Return a page with the curves of the run, which a notebook shows as charts."""
        from trainrun.plots.report import curves_page

        return RunPage(curves_page(self.files))

    def _repr_html_(self) -> str:
        """Show result, evaluations and curves in a notebook."""
        from trainrun.plots.report import overview_page

        return RunPage(overview_page(self.files))._repr_html_()


@dataclass(frozen=True)
class RunPage:
    """A page for the output of a notebook cell. `str(page)` is the HTML of a file."""

    html: str = field(repr=False)

    def __str__(self) -> str:
        return self.html

    def _repr_html_(self) -> str:
        """Return the page in an iframe, so that its style and script do not affect the notebook."""
        return f'<iframe srcdoc="{escape(self.html, quote=True)}" style="{FRAME}"></iframe>'


def load_run(run_dir: str | Path, trust: bool = False) -> Run:
    """Return the run in a folder. Raise ConfigError if there is none.

    trust: let `load_model` run the code that the folder names, as `trainrun evaluate --trust` does.
    """
    return Run(open_run(run_dir, "run_dir").root, trust)


def train(
    *words: str,
    model: nn.Module | None = None,
    data: Any = None,
    val: Any = None,
    test: Any = None,
    task: Any = None,
) -> Run:
    """Train like the command `trainrun` with the same settings, and return the run.

    model: a network; it has the last weights afterwards. data, val, test: data sets, or tensors or arrays of equal
        length such as `(x, y)`. `val` may be a dict of named sets; without it nothing is validated. task: an object
        as in `trainrun help tasks`.

    The objects stay in this process. To resume such a run, pass the same objects again, with the same `output_dir=`
    or with `ckpt_path=`.

    Raises TrainrunError. A run that a signal stopped is returned, with `status["state"] == "stopped"`.
    """
    for word in words:
        if not isinstance(word, str) or (word.startswith("-") and not word.startswith("--config-dir=")):
            raise ConfigError(
                f"trainrun.train({word!r}): takes key=value words, as train('data=digits', 'seed=1')"
            )
    began = time.perf_counter()
    named = {"model": model, "data": data, "val": val, "test": test, "task": task}
    if isinstance(val, Mapping) and not any(hasattr(part, "shape") for part in val.values()):  # not columns
        if wrong := [name for name in val if not (isinstance(name, str) and name.isidentifier())]:
            raise ConfigError(
                f"trainrun.train(val=...): {wrong[0]!r} is not a valid name of a set; use letters, digits and _"
            )
        named |= {"val": None, **{f"val.{name}": part for name, part in val.items()}}
    objects = {name: value for name, value in named.items() if value is not None}
    all_words = [*build_object_settings(objects, list(words)), *words]
    quantities = describe_real_targets(objects.get("data"))
    composition = compose_run(all_words, quantities=quantities)
    for note in composition.notes:
        if quantities and note.startswith(quantities):
            say(f"note: {note}", file=sys.stderr)
    if objects and composition.config.parallel.mode != "single":
        raise ConfigError(
            f"trainrun.train({next(iter(objects))}=...): an object exists only in this process, but ranks are other "
            "processes; use a class in a file, as model=my_net.Net, or use parallel=single"
        )
    paths = [path for path in sys.path if path]
    # a notebook's own random numbers go on as if nothing had been trained
    with (
        register_objects(objects) as used,
        open_or_create_run(composition, all_words) as (run, config, again),
        restore_random_state(),
    ):
        code = start_training(run, config, LaunchSpec(again, paths, began))
    if code == TrainingError.exit_code:
        raise TrainingError(f"{run.root}: {read_json(run.status)['message']}")
    trained = Run(run.root, objects=objects)
    if model is not None and "model" in used:
        copy_trained_weights(model, used["model"].state_dict())
    elif model is not None and (steps := list_committed_steps(run.checkpoints)):  # it was finished already
        last = read_checkpoint(run.checkpoints / format_folder_name(steps[-1]))
        copy_trained_weights(model, last.shared["model"])
    elif model is not None:
        say(f"note: {run.root}: finished already and without a checkpoint; the network is as it was")
    return trained


# What the call that trains now was given, and where it notes the copies.
GIVEN: dict[str, tuple[Any, dict[str, Any]]] = {}
PLACES = {"model": "model", "data": "data.train", "val": "data.val", "test": "data.test", "task": "task"}


def resolve_config_key(name: str) -> str:
    """Return the config key of an object: `data.val.day` for `val.day`."""
    head, dot, rest = name.partition(".")
    return PLACES[head] + dot + rest


@contextmanager
def register_objects(objects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Make Python objects available to configs inside the block. Yield a dict of those that the run uses, some as
    copies.
    """
    if GIVEN and objects:
        raise ConfigError("trainrun.train: a run of objects is trained in this process already")
    used: dict[str, Any] = {}
    GIVEN.update({name: (value, used) for name, value in objects.items()})
    try:
        yield used
    finally:
        for name in objects:
            del GIVEN[name]


def python_object(name: str, about: str) -> Any:
    """Return the Python object of that name. Raise ConfigError if the object does not exist in this process, or if it
    has changed.

    A network is copied, so that changes to its layers do not reach the caller. A task is copied shallowly.
    """
    if name not in GIVEN:
        raise ConfigError(
            f"{resolve_config_key(name)}: this run received it from Python ({about}); pass the same kind of object "
            "again, as "
            f"trainrun.train(..., {name.partition('.')[0]}=...)"
            + (" or load_model(run_dir, model=...)" if name == "model" else "")
        )
    value, used = GIVEN[name]
    if describe_object(value) != about:
        raise ConfigError(
            f"{resolve_config_key(name)}: this run received {about}, and now {describe_object(value)}"
        )
    if name == "model":
        make_dense(
            value
        )  # the copy is dense in any case, and its weights are loaded into the caller's at the end
        value = copy_network(value)
    elif name == "task":
        value = copy.copy(value)
    used[name] = value
    return value


def build_object_settings(objects: Mapping[str, Any], words: list[str]) -> list[str]:
    """Return the settings that stand for the objects, such as `model._target_=...`.

    Raise ConfigError for an unusable object, or if a setting is given twice.
    """
    from torch import nn
    from torch.utils.data import DataLoader

    if not objects:
        return []
    typed_keys = {word.lstrip("+~").partition("=")[0] for word in words}
    out = []
    for name, entry in objects.items():
        place = resolve_config_key(name)
        if twice := typed_keys & {place.partition(".")[0], place, f"{place}._target_"}:
            raise ConfigError(
                f"trainrun.train({name}=...): {twice.pop()}= sets it too; leave one of them out"
            )
        if name == "model" and not isinstance(entry, nn.Module):
            raise ConfigError(
                f"trainrun.train(model=...): must be a module, such as Net(), not {entry!r:.80}"
            )
        if isinstance(entry, DataLoader):
            size = "" if entry.batch_size is None else f", and 'data.batch_size={entry.batch_size}'"
            raise ConfigError(
                f"trainrun.train({name}=...): pass the data set of the loader, {name}=loader.dataset{size}. In place "
                "of its sampler and collate_fn use data.sampling and data.collate_fn; order, workers and resume are "
                "settings of the run"
            )
        if name != "data" and place.startswith("data.") and "data" not in objects:
            raise ConfigError(f"trainrun.train({name}=...): give data=... too")
        target = f"{__name__}.{python_object.__name__}"
        node = {"_target_": target, "name": name, "about": quote_as_text(describe_object(entry))}
        out += [f"+{place}.{key}={value}" for key, value in node.items()]
    if "model" in objects and "run_name" not in typed_keys:
        out.append(f"run_name={type(objects['model']).__name__}")
    return [*(f"{group}=custom" for group in ("model", "task", "data") if group in objects), *out]


def describe_real_targets(data: Any) -> str:
    """Return how many different real numbers the targets have; "" if they are not real numbers.

    data: the targets are the last of several arrays.
    """
    import numpy as np

    target = data[-1] if isinstance(data, tuple | list) and len(data) > 1 else None
    if not hasattr(target, "dtype") or not hasattr(target, "shape"):
        return ""
    values = np.asarray(target)
    count = count_quantities(values.reshape(-1)) if values.size == len(values) else 0
    return f"the targets hold {count:,} different real numbers" if count else ""


def quote_as_text(text: str) -> str:
    return '"' + text.replace("\\", "").replace('"', "'").replace("$", "") + '"'


def describe_object(found: Any) -> str:
    """Describe an object in one line: its class, or the shapes and dtypes of its tensors."""
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    if hasattr(found, "shape") and hasattr(found, "dtype"):
        return f"{tuple(found.shape)} {found.dtype}"
    if isinstance(found, Mapping):
        return ", ".join(f"{name} {describe_object(part)}" for name, part in found.items())
    if isinstance(found, tuple | list):
        return ", ".join(map(describe_object, found[:8])) + (", ..." if len(found) > 8 else "")
    if callable(getattr(found, "named_parameters", None)):
        sizes = [0 if is_lazy(p) else p.numel() for p in found.parameters()]
        return f"{kind}, {sum(sizes):,} parameters"
    tensors = getattr(found, "tensors", None)
    if isinstance(tensors, tuple):
        return f"{kind}, {describe_object(tensors)}"
    return f"{kind}, {len(found):,} samples" if callable(getattr(found, "__len__", None)) else kind


def copy_trained_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the trained weights into the caller's network. Print a note if the names of parameters differ."""
    weights = model.state_dict()
    if state.keys() == weights.keys() and all(
        is_lazy(v) or v.shape == state[name].shape for name, v in weights.items()
    ):
        model.load_state_dict(state)
    else:
        say(
            "note: the run has changed the names of the network's parameters; it is as it was, and "
            "run.load_model() gives the trained one"
        )
