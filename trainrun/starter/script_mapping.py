"""Translate the lines of a small script of another trainer into settings. The script is parsed, never run.

Names of arguments are looked up in `config/aliases.py`, as on the command line. A line that no rule covers is
reported as not understood.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainrun.config.aliases import (
    OPTIONS,
    format_replacement_hint,
    load_replacement_hints,
    resolve_alias,
    resolve_value_alias,
    translate_setting,
)
from trainrun.config.argv import find_conf_dir, list_groups, list_options
from trainrun.config.schema import settings

ARGUMENT_CALLS = {  # whose arguments are settings, by the kind of the script
    "lightning": ("Trainer",),
    "hf": ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"),
    "loop": ("Accelerator",),
}
KINDS = tuple(ARGUMENT_CALLS)
SEEDS = ("manual_seed", "seed_everything", "set_seed")
LOSSES = {
    **dict.fromkeys(("cross_entropy", "CrossEntropyLoss"), "classification"),
    **dict.fromkeys(("mse_loss", "MSELoss"), "regression"),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"), "multilabel"),
}
DONE = {  # what every run does
    **dict.fromkeys(
        ("zero_grad", "backward", "step", "update", "unscale_", "scale", "accumulate"), "done in every step"
    ),
    **dict.fromkeys(("train", "eval", "no_grad", "inference_mode", "evaluate"), "done in every validation"),
    **dict.fromkeys(
        ("to", "cuda", "is_available", "device", "prepare"), "done: a GPU is used if there is one"
    ),
    **dict.fromkeys(("log", "log_dict", "print", "item", "format"), "done: losses and metrics are logged"),
    **dict.fromkeys(("save", "save_model", "save_state"), "done: the best and the last state are saved"),
    **dict.fromkeys(("fit", "Trainer"), "the command itself"),
    **dict.fromkeys(("GradScaler",), "done with precision=16-mixed"),
    **dict.fromkeys(("save_hyperparameters", "__init__", "super"), "left out"),
}
OF_A_RATE = ("params", "lr", "betas", "eps", "weight_decay")
POSITIONS = {  # the names of positional arguments, by call
    **dict.fromkeys(SEEDS, ("seed",)),
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), OF_A_RATE),
    "SGD": ("params", "lr", "momentum", "dampening", "weight_decay"),
    "CosineAnnealingLR": ("optimizer", "T_max"),
    "StepLR": ("optimizer", "step_size", "gamma"),
    "MultiStepLR": ("optimizer", "milestones", "gamma"),
    "ExponentialLR": ("optimizer", "gamma"),
    "DataLoader": ("dataset", "batch_size", "shuffle"),
    "Trainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "EarlyStopping": ("monitor", "min_delta", "patience"),
    "ModelCheckpoint": ("dirpath", "filename", "monitor"),
    "clip_grad_norm_": ("parameters", "max_norm"),
    "clip_grad_value_": ("parameters", "clip_value"),
    **{name: ("input", "target") for name in LOSSES if name.islower()},
}
HF_DEFAULTS = {
    "num_train_epochs": 3, "per_device_train_batch_size": 8, "learning_rate": 5e-5, "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0, "weight_decay": 0.0,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {  # of arguments whose settings have another default, by call
    "SGD": {"momentum": 0.0},
    "CosineAnnealingWarmRestarts": {"T_mult": 1},
    "ReduceLROnPlateau": {"patience": 10},
    "DataLoader": {"batch_size": 1, "shuffle": False},
    **dict.fromkeys(("TrainingArguments", "Seq2SeqTrainingArguments"), HF_DEFAULTS),
    "SFTConfig": {**HF_DEFAULTS, "learning_rate": 2e-5},
}
OF_TASKS = ("task.label_smoothing", "task.ignore_index")
# Arguments that need no setting, and those of the Hugging Face Trainer.
IMPLIED = ("dataset", "optimizer", "parameters", "input", "target", "T_max", "total_steps")
OBJECTS = ("model", "args", "train_dataset", "eval_dataset", "processing_class", "tokenizer")
COUNTED_BY_EPOCH = ("step", "multistep", "exponential", "cosine_restarts")  # that have scheduler.interval
NAMELESS = ("autocast", "compile", "DistributedDataParallel", *DONE)  # positional arguments need no names
NO_BATCHES = ("parameters", "named_parameters", "modules", "named_modules", "children", "items", "keys")
QUIET = ("log", "log_dict", "print", "DataLoader", "fit")  # calls whose arguments may hold any other call
HARMLESS = {  # calls that change nothing in a line whose other calls are known
    "forward", "parameters", "named_parameters", "state_dict", "range", "enumerate", "len", "zip", "list",
    "tuple", "dict", "next", "iter", "float", "int", "str", "long", "tqdm",
}  # fmt: skip
NETWORKS = {"Module", "PreTrainedModel"}
DATASETS = ("Dataset", "IterableDataset")
HELD_OUT = ("val", "test", "eval", "dev")


@dataclass
class Mapping:
    """The translation of a script. known: line number, code and meaning. unknown: line number and code."""

    known: list[tuple[int, str, str]] = field(default_factory=list)
    unknown: list[tuple[int, str]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        return shlex.join(["trainrun", *(f"{key}={value}" for key, value in self.settings.items())])


def map_script(text: str, kind: str, module: str) -> Mapping:
    """Return the translation of a script. kind: one of `KINDS`. module: its name as a Python module."""
    tree = ast.parse(text)
    reader = ScriptReader(kind, module, tree)
    for statement in reader.iterate_statements(tree.body):
        reader.read(statement, text.splitlines()[statement.lineno - 1].strip())
    return reader.mapping


class ScriptReader:
    """A parser of one script that collects the meaning of its statements in a `Mapping`."""

    def __init__(self, kind: str, module: str, tree: ast.Module) -> None:
        self.mapping, self.kind, self.module = Mapping(), kind, module
        self.constants: dict[str, Any] = {}
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        bases = {node.name: {find_call_name(base) for base in node.bases} for node in classes}
        self.networks = [name for name, above in bases.items() if above & NETWORKS]
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        self.imported = {alias.name: node.module or "" for node in imports for alias in node.names}
        self.known_groups = list_groups([find_conf_dir()])
        self.models, self.schedules = {"model", "net", "self"}, set[str]()  # names of variables
        self.is_counted_by_step = kind != "lightning" or bool(
            re.search("interval.{1,5}step", ast.unparse(tree))
        )

    def iterate_statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield the statements that need a line in the mapping; networks and imports are left out."""
        for statement in body:
            if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass) or is_docstring(statement):
                continue
            if isinstance(statement, ast.ClassDef):
                bases = {find_call_name(base) for base in statement.bases}
                is_plain = not bases & {"LightningModule", "LightningDataModule"}
                yield statement
                yield from () if is_plain else self.iterate_statements(statement.body)
                continue
            if not isinstance(statement, ast.FunctionDef) and not is_main_guard(statement):
                yield statement
            for part in ("body", "orelse", "finalbody"):
                yield from self.iterate_statements(getattr(statement, part, []))

    def read(self, statement: ast.stmt, code: str) -> None:
        """Record a statement as known, with its meaning, or as unknown."""
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = self.read_constant(statement.value)
            if value is not None:
                self.constants[statement.targets[0].id] = value
                self.mapping.known.append((statement.lineno, code, "a constant"))
                return
        meanings: list[str] = []
        faults: list[str] = []
        for meaning, is_fault in self.iterate_meanings(statement):
            (faults if is_fault else meanings).append(meaning)
        if meanings:
            self.mapping.known.append((statement.lineno, code, "; ".join(dict.fromkeys(meanings))))
        if faults or not meanings:
            reason = f": {', '.join(dict.fromkeys(faults))}" if faults else ""
            self.mapping.unknown.append((statement.lineno, f"`{code}`{reason}"))

    def iterate_meanings(self, statement: ast.stmt) -> Iterator[tuple[str, bool]]:
        """Yield (meaning, is_fault) for each part of a statement. is_fault: whether the part is not understood."""
        if isinstance(statement, ast.ClassDef):
            yield from self.explain_class(statement)
        elif isinstance(statement, ast.For):
            yield from self.explain_loop(statement)
        elif isinstance(statement, ast.Return) and self.kind == "lightning" and not list_calls(statement):
            yield "the result is used by the run", False
        else:
            yield from self.explain_calls(list_calls(statement), find_assigned_name(statement))

    def explain_calls(self, calls: list[ast.Call], target: str) -> Iterator[tuple[str, bool]]:
        """Yield (meaning, is_fault) for the calls of a line. If one call is known, the unknown calls are faults."""
        meanings = [(call, list(self.explain_call(call, target))) for call in calls]
        inside = {
            id(node) for call in calls if find_call_name(call) in QUIET for node in walk_arguments(call)
        }
        is_known = any(own for _, own in meanings)
        for call, own in meanings:
            yield from own
            name = find_call_name(call)
            if own and (nameless := find_nameless_arguments(call)):
                yield f"{name}: name its arguments {', '.join(nameless)}", True
            if is_known and not own and id(call) not in inside and name not in HARMLESS | self.models:
                hints = load_replacement_hints()
                yield f"{name}: {format_replacement_hint(name)}" if name in hints else f"{name}(...)", True

    def explain_class(self, statement: ast.ClassDef) -> Iterator[tuple[str, bool]]:
        bases = {find_call_name(base) for base in statement.bases}
        path = f"{self.module}.{statement.name}"
        if statement.name in self.networks:
            yield self.add_setting("model", path), False
            if self.kind == "hf":  # its Trainer takes the loss from the network
                yield self.add_setting("task", "model_loss"), False
        elif bases & set(DATASETS):
            yield f"data.train={path}, with its arguments as data.train.NAME=VALUE", False
        elif "LightningModule" in bases:
            yield "its network is the model, its training_step a task: trainrun help from_lightning", False
        elif "LightningDataModule" in bases:
            yield "its data sets are data.train and data.val", False

    def explain_loop(self, statement: ast.For) -> Iterator[tuple[str, bool]]:
        call = statement.iter
        is_outer = any(isinstance(node, ast.For) for child in statement.body for node in ast.walk(child))
        if (
            is_outer
            and isinstance(call, ast.Call)
            and find_call_name(call) in ("range", "trange")
            and call.args
        ):
            count = self.read_constant(call.args[-1])
            yield (self.add_setting("trainer.max_epochs", count), False) if count else ("no constant", True)
            steps = {ast.unparse(child) for child in statement.body}
            if any(f"{name}.step()" in steps for name in self.schedules):
                yield from self.count_schedule_by_epoch()
        elif isinstance(statement.target, ast.Tuple | ast.Name) and find_call_name(call) not in NO_BATCHES:
            yield "done: the batches of the data", False
            if isinstance(call, ast.Call) and find_call_name(call) == "split":
                yield self.add_setting("data.batch_size", self.read_constant(call.args[0])), False

    def count_schedule_by_epoch(self) -> Iterator[tuple[str, bool]]:
        """Yield the setting for a schedule that counts epochs, if its option has this setting."""
        if self.mapping.settings.get("scheduler") in COUNTED_BY_EPOCH:
            yield self.add_setting("scheduler.interval", "epoch"), False

    def explain_call(self, call: ast.Call, target: str) -> Iterator[tuple[str, bool]]:
        """Yield the meanings of a call and of each argument; nothing for an unknown call."""
        name = find_call_name(call)
        named = name_arguments(call)
        if name in ARGUMENT_CALLS[self.kind]:
            yield from self.explain_arguments(named)
        elif name == "Trainer":
            yield DONE[name], False
            yield from self.explain_arguments({key: named[key] for key in named if key not in OBJECTS})
        elif name == "DataLoader":
            yield from self.explain_loader(named, target)
        elif name in SEEDS:
            yield from self.explain_values({"seed": named.get("seed")})
        elif name in LOSSES:
            yield self.add_setting("task", LOSSES[name]), False
            yield from self.explain_prefixed_arguments("task", named)
        elif name in ("clip_grad_norm_", "clip_grad_value_"):
            value = named.pop("clip_value" if name == "clip_grad_value_" else "max_norm", None)
            yield from self.explain_values({"trainer.gradient_clip_val": value})
            if name == "clip_grad_value_":
                yield self.add_setting("trainer.gradient_clip_algorithm", "value"), False
            yield from self.explain_prefixed_arguments("", named)
        elif name == "autocast":
            is_bfloat16 = any("bfloat16" in ast.unparse(value) for value in [*call.args, *named.values()])
            yield self.add_setting("precision", "bf16-mixed" if is_bfloat16 else "16-mixed"), False
        elif name == "EarlyStopping":
            yield self.add_setting("trainer.early_stopping", "true"), False
            yield from self.explain_prefixed_arguments("trainer.early_stopping", named)
        elif name == "ModelCheckpoint":
            yield DONE["save"], False
            yield from self.explain_prefixed_arguments("checkpoint", named)
        elif name == "compile":
            yield self.add_setting("trainer.compile", "true"), False
            yield from self.explain_prefixed_arguments("trainer.compile", named)
        elif name == "DistributedDataParallel":
            yield self.add_setting("parallel", "ddp"), False
        elif name in self.networks or (
            name in self.imported and target.rpartition(".")[2] in ("model", "net")
        ):
            yield self.add_setting("model", f"{self.imported.get(name, self.module)}.{name}"), False
            yield from self.explain_prefixed_arguments("model", named)
            self.models.add(target.rpartition(".")[2])
        elif is_optimizer(call):
            yield from self.explain_optimizer(call, name, named, target)
        elif name == "train" and self.kind == "hf":
            yield DONE["Trainer"], False
        elif name in DONE:
            yield DONE[name], False

    def explain_optimizer(
        self, call: ast.Call, name: str, named: dict[str, ast.expr], target: str
    ) -> Iterator[tuple[str, bool]]:
        """Yield the settings for an optimizer or a schedule of torch."""
        if is_in_module(call, "lr_scheduler"):
            schedules = OPTIONS["scheduler"] | {
                f"{option}lr": option for option in list_options("scheduler", [find_conf_dir()])
            }
            if name.lower() not in schedules:
                yield f"{name}: see trainrun help training", True
                return
            yield self.add_setting("scheduler", schedules[name.lower()]), False
            yield from self.explain_prefixed_arguments("scheduler", named)
            self.schedules.add(target)
            if not self.is_counted_by_step:
                yield from self.count_schedule_by_epoch()
            return
        if name.lower() in list_options("optimizer", [find_conf_dir()]):
            yield self.add_setting("optimizer", name.lower()), False
        else:
            yield self.add_setting("optimizer._target_", f"torch.optim.{name}"), False
        groups = named.pop("params", None)
        yield from self.explain_prefixed_arguments("optimizer", named)
        if groups is not None and find_call_name(groups) != "parameters":
            yield f"{ast.unparse(groups)}: write optimizer.groups, see trainrun help training", True

    def explain_loader(self, named: dict[str, ast.expr], target: str) -> Iterator[tuple[str, bool]]:
        """Yield the settings for a DataLoader. One with held-out data sets data.val_batch_size."""
        if any(word in target.lower() for word in HELD_OUT):
            yield "data.val: the data set of this loader", False
            if "batch_size" in named:
                yield from self.explain_values({"data.val_batch_size": named["batch_size"]})
            return
        yield "data.train: the data set of this loader", False
        yield from self.explain_prefixed_arguments("data", named)

    def explain_arguments(self, named: dict[str, ast.expr]) -> Iterator[tuple[str, bool]]:
        """Yield the settings for another trainer's arguments, translated as on the command line."""
        for name, node in named.items():
            value = self.read_constant(node)
            if value is None:
                yield from self.explain_object(name, node)
                continue
            text = format_setting_value(value)
            words = translate_setting(f"{name}={text}")
            if words != [f"{name}={text}"]:
                yield "; ".join(self.add_setting(*word.split("=", 1)) for word in words), False
                continue
            key = resolve_alias(name, lambda word: word in self.known_groups)
            key = "output_dir" if key == "hydra.run.dir" else key
            key = f"trainer.{key}" if f"trainer.{key}" in settings() else key
            if (
                key in (*settings(), *self.known_groups, "output_dir")
                or key.partition(".")[0] in self.known_groups
            ):
                yield self.add_setting(key, resolve_value_alias(key, text)), False
            elif name in load_replacement_hints():
                yield f"{name}: {format_replacement_hint(name, text)}", False
            else:
                yield name, True

    def explain_object(self, name: str, node: ast.expr) -> Iterator[tuple[str, bool]]:
        """Yield the meaning of an argument whose value is not a constant. Calls in it are explained by themselves."""
        if not any(isinstance(child, ast.Call) for child in ast.walk(node)):
            yield f"{name}={ast.unparse(node)}", True

    def explain_prefixed_arguments(
        self, section: str, named: dict[str, ast.expr]
    ) -> Iterator[tuple[str, bool]]:
        """Yield a setting for each argument. section: of the settings; "" if no argument has one."""
        for name in [name for name in named if name not in IMPLIED]:
            key = f"{section}.{name}"
            if key in settings() or key in OF_TASKS or section in ("optimizer", "scheduler", "model"):
                yield from self.explain_values({key: named[name]})
            else:
                yield f"{name}={ast.unparse(named[name])}", True

    def explain_values(self, nodes: dict[str, ast.expr | None]) -> Iterator[tuple[str, bool]]:
        """Yield the settings whose values are constants, and as faults those whose values are not. nodes: by key."""
        for key, node in nodes.items():
            value = None if node is None else self.read_constant(node)
            if value is not None:
                yield self.add_setting(key, value), False
            else:
                yield f"{key}={'' if node is None else ast.unparse(node)}", True

    def add_setting(self, key: str, value: Any) -> str:
        """Record the first value of a setting. Return the setting as it is typed."""
        text = format_setting_value(value)
        if key.endswith(".monitor"):
            text = re.sub(r"^(train|val|test)_", r"\1/", text)
        self.mapping.settings.setdefault(key, text)
        return f"{key}={text}"

    def read_constant(self, node: ast.expr) -> Any:
        """Return the value of a constant, or of a variable with a constant value; None for anything else."""
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            return None


def find_call_name(node: ast.expr) -> str:
    """Return the last part of the name of a call, an attribute or a name."""
    inner = node.func if isinstance(node, ast.Call) else node
    return inner.attr if isinstance(inner, ast.Attribute) else inner.id if isinstance(inner, ast.Name) else ""


def list_calls(statement: ast.stmt) -> list[ast.Call]:
    """Return the calls in a statement; for one with a body, those in its first line."""
    parts: list[ast.AST] = [statement]
    if isinstance(statement, ast.With):
        parts = [item.context_expr for item in statement.items]
    elif isinstance(statement, ast.If | ast.While):
        parts = [statement.test]
    return [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Call)]


def walk_arguments(call: ast.Call) -> list[ast.AST]:
    """Return all nodes of the arguments of a call."""
    arguments = [*call.args, *(word.value for word in call.keywords)]
    return [node for argument in arguments for node in ast.walk(argument)]


def name_arguments(call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call by name, with the defaults that differ from those of the settings."""
    named = dict(zip(find_argument_names(call), call.args, strict=False))
    named |= {word.arg: word.value for word in call.keywords if word.arg}
    defaults = DEFAULTS.get(find_call_name(call), {})
    unused = {"num_train_epochs"} if "max_steps" in named else set[str]()
    return {name: ast.Constant(defaults[name]) for name in defaults if name not in unused} | named


def find_argument_names(call: ast.Call) -> tuple[str, ...]:
    """Return the names of the positional arguments of a call, as far as they are known."""
    others = ("optimizer",) if is_in_module(call, "lr_scheduler") else ("params", "lr")
    return POSITIONS.get(find_call_name(call), others if is_optimizer(call) else ())


def find_nameless_arguments(call: ast.Call) -> list[str]:
    """Return the arguments of a call that cannot become settings because their names are unknown."""
    values = call.args[len(find_argument_names(call)) :]
    nameless = [] if find_call_name(call) in NAMELESS else list(map(ast.unparse, values))
    return nameless + [f"**{ast.unparse(word.value)}" for word in call.keywords if word.arg is None]


def is_optimizer(call: ast.Call) -> bool:
    """Return whether a call builds an optimizer or a schedule of torch."""
    return is_in_module(call, "optim") or find_call_name(call) in ("AdamW", "Adam", "SGD")


def is_in_module(call: ast.Call, module: str) -> bool:
    return module in ast.unparse(call.func).split(".")[:-1]


def find_assigned_name(statement: ast.stmt) -> str:
    """Return the name to which a statement assigns; "" for other statements."""
    return ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def format_setting_value(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_setting_value, value))}]"
    return str(value)


def format_mapping_page(mapping: Mapping, script: str) -> str:
    """Return the mapping as Markdown: a table, what is not understood, and the command."""
    mapped = [(line, code.replace("|", r"\|"), meaning) for line, code, meaning in mapping.known]
    rows = [f"| {line} | `{code}` | {meaning} |" for line, code, meaning in mapped]
    unknown = [f"- line {line}: {text}" for line, text in mapping.unknown] or [
        "Every line has a counterpart."
    ]
    parts = [
        f"# {script} in trainrun",
        "\n".join(["| line | in the script | here |", "| --- | --- | --- |", *rows]),
        "## Not understood",
        "\n".join(unknown),
        "## The command",
        "Data and network are importable names, as `data.train=my_data.make` and `model=my_model.Net`.",
        f"    {mapping.command}",
    ]
    return "\n\n".join(parts) + "\n"
