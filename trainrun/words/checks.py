"""Every rule of a config that needs no device: values, units, and what does not go together."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trainrun.config import SAME, RunConfig
from trainrun.model.names import CHOICES
from trainrun.words.argument_rules import is_finite, rule_of
from trainrun.words.check_compile import compile_faults
from trainrun.words.memory_rules import memory_faults
from trainrun.words.pair_rules import pair_faults

_INTERVAL = re.compile(r"(\d+(?:\.\d*)?)\s*(step|epoch)s?\Z")
_DURATION = re.compile(r"(\d+(?:\.\d*)?)\s*(s|sec|second|m|min|minute|h|hour|d|day)s?\Z")
VAE, VAE_TASK = "trainrun.model.vae.Vae", "trainrun.task.vae.Vae"
GPT, LSTM = "trainrun.model.gpt.Gpt", "trainrun.model.lstm.Lstm"
CLASSIFICATION = "trainrun.task.classification.Classification"
INTERVALS = ("step", "epoch")
LR_SCALINGS = ("none", "linear", "sqrt")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Interval:
    """So many steps, or so many (parts of) epochs; exactly one of the two is set."""

    steps: int | None = None
    epochs: float | None = None


def parse_interval(value: Any) -> Interval:
    """100 or `100step`: steps. 0.25, 1.0, `0.25epoch`, `2epoch`: epochs. Raises ValueError."""
    allowed = "a whole number of steps (100), a fraction of an epoch (0.25, 1.0), or `100step`, `0.25epoch`, `2epoch`"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"must be {allowed}")
    if isinstance(value, int) and value >= 1:
        return Interval(steps=value)
    if isinstance(value, float) and 0 < value <= 1:
        return Interval(epochs=value)
    match = _INTERVAL.match(value.strip()) if isinstance(value, str) else None
    if match and float(match[1]) > 0:
        amount = float(match[1])
        if match[2] == "step" and amount.is_integer():
            return Interval(steps=int(amount))
        if match[2] == "epoch" and (amount <= 1 or amount.is_integer()):
            return Interval(epochs=amount)
    raise ValueError(f"must be {allowed}")


def parse_seconds(value: Any) -> float | None:
    """None, seconds, `90s`, `10min`, `2h`, `1d`, or DD:HH:MM:SS. Raises ValueError."""
    allowed = "must be seconds, `90s`, `10min`, `2h`, `1d` or DD:HH:MM:SS"
    seconds: float
    if value is None:
        return None
    if is_finite(value) and value > 0:
        return float(value)
    if isinstance(value, str):
        parts = value.split(":")
        if 1 < len(parts) <= 4 and all(part.isdigit() for part in parts):
            scale = (1, 60, 3600, 86400)
            seconds = sum(int(part) * scale[i] for i, part in enumerate(reversed(parts)))
        else:
            match = _DURATION.match(value.strip())
            seconds = float(match[1]) * _SECONDS[match[2][0]] if match else 0
        if seconds > 0:
            return float(seconds)
    raise ValueError(allowed)


def closest(word: str, known: Iterable[object]) -> str:
    """The name that was probably meant, in small or large letters, or by its beginning; empty if none is near."""
    names = {str(name).lower(): str(name) for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.55)
    begun = [name for name in names if len(word) > 1 and name.startswith(word.lower())]
    return names[[*found, *begun][0]] if found or begun else ""


def nearest(word: str, known: Iterable[object]) -> str:
    """` Did you mean x?`, or nothing where no name is near."""
    name = closest(word, known)
    return f" Did you mean {name}?" if name else ""


def check(config: RunConfig) -> list[str]:
    """All faults of the values, one line each; empty when the config can be run."""
    faults = list(_field_faults(config, ""))
    nodes = {"model": config.model, "task": config.task, "optimizer": config.optimizer, "scheduler": config.scheduler,
             "loop": config.loop, "data.train": config.data.train,
             **{f"monitor.listeners.{name}": node for name, node in config.monitor.listeners.items()}}  # fmt: skip
    flat = [f"{key}={value}: must name a class or function, as {key}._target_=my_file.MyClass"
            for key, value in nodes.items() if value is not None and not isinstance(value, dict)]  # fmt: skip
    if isinstance(config.loop, dict) and config.loop and "_target_" not in config.loop:
        flat += [f"loop.{key}: sets a loop of your own, and none is named (loop._target_=my_file.fit); ours is "
                 f"set in trainer.*" for key in config.loop]  # fmt: skip
    if flat:
        return [*faults, *flat]
    trainer = config.trainer
    for key, value, parse in (
        ("trainer.val_check_interval", trainer.val_check_interval, parse_interval),
        ("trainer.max_time", trainer.max_time, parse_seconds),
        ("checkpoint.train_time_interval", config.checkpoint.train_time_interval, parse_seconds),
        ("trainer.limit_train_batches", trainer.limit_train_batches, _parse_limit),
        ("trainer.limit_val_batches", trainer.limit_val_batches, _parse_limit),
        ("trainer.limit_test_batches", trainer.limit_test_batches, _parse_limit),
    ):
        try:
            parse(value)
        except ValueError as error:
            faults.append(f"{key}={value}: {error}")
    if trainer.max_epochs is None and trainer.max_steps is None and trainer.max_time is None:
        faults.append("trainer.max_epochs=null: give a limit: trainer.max_epochs, max_steps or max_time")
    faults += [*pair_faults(config), *compile_faults(config)]
    for key in ("data.train", "model", "task", "optimizer"):
        faults += _node_faults(config, key)
    return [
        *faults, *_callable_faults(config), *_rate_faults(config), *_kernel_faults(config), *_model_faults(config),
        *_task_faults(config), *_pair_faults(config), *memory_faults(config),
    ]  # fmt: skip


def _callable_faults(config: RunConfig) -> Iterator[str]:
    data = config.data
    ours = {"data.val_transform": data.val_transform, "data.test_transform": data.test_transform}
    for key, value in {"data.transform": data.transform, "data.collate_fn": data.collate_fn, **ours}.items():
        if key in ours and value == SAME:
            if data.transform is None:
                yield f"{key}=same: there is no data.transform; name that, or {key}._target_=my_file.MyClass"
        elif value is not None and not (isinstance(value, dict) and "_target_" in value):
            more = f", or {key}=same for that of data.transform" if key in ours else ""
            yield f"{key}={value}: must name a class or function of yours, as {key}._target_=my_file.MyClass{more}"


def _pair_faults(config: RunConfig) -> Iterator[str]:
    """A network that only its own task can train."""
    model, task = ((node or {}).get("_target_") for node in (config.model, config.task))
    ours = isinstance(task, str) and task.startswith("trainrun.task.")
    if model == VAE and ours and task != VAE_TASK:
        yield "model=vae: gives a reconstruction, not classes; its task is task=vae"
    class_dim = (config.task or {}).get("class_dim", 1)
    if task == CLASSIFICATION and class_dim in (0, 1) and (name := _classes_last(config)):
        yield (
            f"model={name}: reads tokens and gives classes for each of them, in the last dimension, where "
            f"task.class_dim={class_dim} does not look; for text: data=text task=language_modeling; for a class of "
            "every token: task.class_dim=-1"
        )


def _classes_last(config: RunConfig) -> str:
    """Which of our networks gives (B, T, classes); "" if it is none of those."""
    model = config.model or {}
    each = model.get("_target_") == LSTM and model.get("outputs", "each") == "each"
    return "gpt" if model.get("_target_") == GPT else "lstm" if each else ""


def _task_faults(config: RunConfig) -> Iterator[str]:
    """Said by the task too, but seconds later, once torch is there."""
    task = config.task if isinstance(config.task, dict) else {}
    chunks = task.get("loss_chunks", "auto")
    ours = str(task.get("_target_")).startswith("trainrun.task.")
    if ours and chunks != "auto" and not (type(chunks) is int and chunks >= 1):
        yield f"task.loss_chunks={chunks}: must be auto, or a whole number, 1 or more"


def _model_faults(config: RunConfig) -> Iterator[str]:
    """Check the choices of our own networks before they are built; a user's models are left to the user."""
    model = config.model if isinstance(config.model, dict) else {}
    known = CHOICES.get(str(model.get("_target_")))
    if known is None:
        return
    for name, choices in known.items():
        value = model.get(name, choices[0])
        if str(value) not in choices:
            yield f"model.{name}={value}: must be one of {', '.join(choices)}.{nearest(str(value), choices)}"


def _kernel_faults(config: RunConfig) -> Iterator[str]:
    """Check torch's two switches for the update; an optimizer without them says so when it is built."""
    optimizer = config.optimizer or {}
    for name in ("fused", "foreach"):
        if optimizer.get(name) not in (None, True, False):
            yield f"optimizer.{name}={optimizer[name]}: must be true, false or null"
    if optimizer.get("fused") is True and optimizer.get("foreach") is True:
        yield "optimizer.foreach=true: does not go with optimizer.fused=true; leave one of them out"
    elif optimizer.get("differentiable") is True and optimizer.get("fused") is True:
        yield "optimizer.fused=true: does not go with optimizer.differentiable=true; leave one of them out"


def _rate_faults(config: RunConfig) -> Iterator[str]:
    """The keys of optimizer and scheduler that every target shares; the others are the target's own."""
    optimizer, scheduler = config.optimizer or {}, config.scheduler or {}
    nodes = {"optimizer.lr": optimizer.get("lr"), "optimizer.weight_decay": optimizer.get("weight_decay")}
    nodes |= {
        f"scheduler.{name}": scheduler.get(name) for name in ("warmup_steps", "warmup_ratio", "warmup_epochs")
    }
    for key, value in nodes.items():
        if value is None:
            continue
        if not is_finite(value) or value < 0:
            yield f"{key}={value}: must be a number, 0 or more"
    warmup, most = scheduler.get("warmup_steps"), config.trainer.max_steps
    if warmup is not None and is_finite(warmup) and most is not None and warmup > most:
        yield f"scheduler.warmup_steps={warmup}: longer than the run: trainer.max_steps={most}; choose fewer"
    interval = scheduler.get("interval", "step")
    if interval not in INTERVALS:
        yield f"scheduler.interval={interval}: must be step or epoch.{nearest(str(interval), INTERVALS)}"
    own_loop = str((config.loop or {}).get("_target_", "trainrun."))
    if interval == "epoch" and not own_loop.startswith("trainrun."):
        yield "scheduler.interval=epoch: a loop of your own ends its epochs itself; use scheduler.interval=step"
    rule = scheduler.get("lr_scaling", "none")
    if rule not in LR_SCALINGS:
        yield f"scheduler.lr_scaling={rule}: must be one of {', '.join(LR_SCALINGS)}.{nearest(str(rule), LR_SCALINGS)}"
    base = scheduler.get("base_batch_size", 1)
    if type(base) is not int or base < 1 or not is_finite(base):
        yield f"scheduler.base_batch_size={base}: must be a whole number, 1 or more"


def _parse_limit(value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not whole and not (isinstance(value, float) and 0 < value <= 1):
        raise ValueError("must be a fraction above 0 up to 1.0, or a whole number of batches")


def _node_faults(config: RunConfig, key: str) -> Iterator[str]:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    target = value.get("_target_") if isinstance(value, dict) else None
    if not target or target == "???":
        yield f"{key}._target_: nothing to train with; name a class or function, e.g. {key}._target_=my_file.MyClass"


def _field_faults(section: Any, prefix: str) -> Iterator[str]:
    for item in dataclasses.fields(section):
        key, value = prefix + item.name, getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from _field_faults(value, key + ".")
        elif "choices" in item.metadata and value not in item.metadata["choices"]:
            choices = item.metadata["choices"]
            yield f"{key}={value}: must be one of {', '.join(choices)}.{nearest(str(value), choices)}"
        elif "at_least" in item.metadata:
            yield from _number_faults(key, value, item)


def _number_faults(key: str, value: Any, item: dataclasses.Field[Any]) -> Iterator[str]:
    optional = "None" in str(item.type)
    if (value is None and optional) or (value == "auto" and item.default == "auto"):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        auto = " or auto" if item.default == "auto" else ""
        yield f"{key}={value}: must be a whole number{auto}"
        return
    if item.default == "auto" and not isinstance(value, int):
        yield f"{key}={value}: must be a whole number or auto"
        return
    limits = item.metadata
    wrong = (
        not is_finite(value)
        or (limits["at_least"] is not None and value < limits["at_least"])
        or (limits["above"] is not None and value <= limits["above"])
        or (limits["at_most"] is not None and value > limits["at_most"])
        or (limits["below"] is not None and value >= limits["below"])
    )
    if wrong:
        yield f"{key}={value}: must be {rule_of(limits) or 'a finite number'}"
