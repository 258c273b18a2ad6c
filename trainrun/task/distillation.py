"""Distillation: a student learns from the outputs of a trained teacher as well as from the targets.

When: a small network should be as good as possible. When not: the student is as large as its teacher. How: the
    teacher's softened probabilities also say how likely the wrong classes are (Hinton et al., 2015,
    arXiv:1503.02531); hidden states can be matched too (Romero et al., 2015; Zagoruyko and Komodakis, 2017).
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, normalize

from trainrun.errors import ConfigError, PluginError
from trainrun.interfaces import IGNORED, StepOutput, batch_fields
from trainrun.limits import Fraction, NotNegative, Positive
from trainrun.task.batches import (
    extract_output_tensor,
    run_model,
    split_inputs_and_optional_target,
    split_inputs_and_target,
)
from trainrun.task.classification import Classification
from trainrun.task.dict_batches import unwrap_model

LOGITS = ""  # among the teacher's answers, whose other names are those of layers
Answers = Mapping[str, Tensor]


class Teacher:
    """A frozen network in evaluation and inference mode, with its own precision.

    autocast: the dtype of its products; None for the dtype of its weights. layers: the names of layers whose outputs
        are returned.
    """

    def __init__(self, network: nn.Module, autocast: torch.dtype | None, layers: Sequence[str]) -> None:
        self.network, self._autocast = network.eval().requires_grad_(False), autocast
        self.layers = tuple(layers)
        for name in layers:
            check_layer(network, name, "task.hidden: the teacher")

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Return the teacher's outputs by name, as normal tensors that a backward pass may save."""
        inputs = split_inputs_and_optional_target(batch)[0]
        mixed = self._autocast is not None
        device = next((weight.device.type for weight in self.network.parameters()), "cpu")
        with (
            torch.inference_mode(),
            torch.autocast(device, dtype=self._autocast, enabled=mixed),
            collect_outputs(self.network, self.layers) as seen,
        ):
            logits = extract_output_tensor(run_model(self.network, inputs, batch))
        return {name: output.clone() for name, output in {LOGITS: logits, **seen}.items()}

    def hash_weights(self) -> str:
        """Return a hash of the teacher's weights."""
        digest = hashlib.sha256()
        for name, value in self.network.state_dict().items():
            if not isinstance(value, Tensor):  # of a layer's get_extra_state
                continue
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


class Distillation:
    """alpha x T^2 x KL(teacher || student), both softened by the temperature T, + (1 - alpha) x the loss of
    `Classification`.

    teacher: the setting from which the runner builds a `Teacher`. hidden: layers of the student, each with the layer
        of the teacher whose output it should match. Outputs of one shape: mean squared difference. Feature maps (B,
        C, H, W) of one size with other channels: squared distance of their attention maps. The other arguments are
        those of `Classification`.

    Validation, test and predictions use the student alone, so they can be compared with a run without a teacher.
    """

    def __init__(
        self,
        teacher: Any = None,
        temperature: Positive = 3.0,
        alpha: Fraction = 0.7,
        hidden: dict[str, str] | None = None,
        hidden_weight: NotNegative = 1.0,
        loss: Any = None,
        label_smoothing: Fraction = 0.0,
        class_dim: int = 1,
        ignore_index: int | None = IGNORED,
        class_weights: Literal["balanced"] | list[NotNegative] | None = None,
        metrics: str | list[Any] | dict[str, Any] | None = None,
        per_class: bool = False,
    ) -> None:
        self.asked, self.temperature, self.alpha = teacher, temperature, alpha
        self.hidden, self.hidden_weight = dict(hidden or {}), hidden_weight
        self.hard = Classification(
            loss, label_smoothing, class_dim, ignore_index, class_weights, metrics, per_class
        )
        self.monitor, self.count, self.sizes, self.predict = (
            self.hard.monitor, self.hard.count, self.hard.sizes, self.hard.predict,
        )  # fmt: skip
        if metrics:
            self.summarize = self.hard.summarize
        if class_dim == -1:  # a class at every place of a text
            self.unit = "tokens"
        self.teacher: Teacher | None = None
        self.answers: Answers | None = None
        self.mark = ""

    def set_teacher(self, teacher: Teacher, answers: Answers | None) -> None:
        """Set the teacher. answers: the outputs of the teacher for all samples, by sample number, if they are computed
        already. The teacher itself is then not stored.
        """
        self.mark, self.answers = teacher.hash_weights(), answers
        self.teacher = None if answers else teacher

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and sums. Raise PluginError or ConfigError at the first batch if student, teacher and targets
        do not match.
        """
        if not torch.is_grad_enabled():
            return self.hard.step(model, batch)
        inputs, target = split_inputs_and_target(batch)
        answers = self.run_teacher(batch)
        with collect_outputs(model, list(self.hidden)) as seen:
            logits = self.hard.logits(model, inputs, batch)
        out = self.hard.compute_step_from_logits(logits, target)
        soft, near = self.terms(logits, seen, answers, target)
        loss = self.alpha * soft + (1 - self.alpha) * out.loss_sum + self.hidden_weight * near
        parts = {"soft": soft.detach(), "hard": out.loss_sum.detach()}
        parts |= {"hidden": near.detach()} if self.hidden else {}
        return StepOutput(loss, {**out.sums, **parts})

    def run_teacher(self, batch: Any) -> Answers:
        fields = batch_fields(batch)
        if self.answers and "index" in fields:
            return {name: rows[fields["index"]] for name, rows in self.answers.items()}
        if self.teacher is None:
            raise PluginError("task.teacher: the samples of a batch have lost their numbers (index)")
        return self.teacher(batch)

    def terms(self, logits: Tensor, seen: Answers, answers: Answers, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss against the teacher's answers and the loss of the hidden states, each summed over counted
        items.
        """
        taught = self.hard.move_classes_second(answers[LOGITS])
        if taught.shape != logits.shape:
            raise ConfigError(
                f"task.teacher: gives {tuple(taught.shape)} for a batch, and the student {tuple(logits.shape)}; they "
                "must have the same classes"
            )
        soft = self.temperature**2 * kl_div(
            log_softmax(logits / self.temperature, 1), log_softmax(taught / self.temperature, 1),
            reduction="none", log_target=True,
        ).sum(1)  # fmt: skip
        items = torch.ones_like(soft)
        if target.ndim > 1 and not target.is_floating_point() and self.hard.ignore_index is not None:
            items = (target != self.hard.ignore_index).to(soft.dtype)
        near = soft.new_zeros(())
        for name, other in self.hidden.items():
            each = measure_distance(
                self._find_student_output(seen, name), answers[other], f"task.hidden={{{name}: {other}}}"
            )
            near = near + (each * items.reshape(len(each), -1).sum(1)).sum()
        return (soft * items).sum(), near

    def _find_student_output(self, seen: Answers, name: str) -> Tensor:
        if name not in seen:
            raise ConfigError(f"task.hidden: the student's layer {name} was not called in its forward")
        return seen[name]

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.mark} if self.mark else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError if the teacher is not the one of the earlier session."""
        if self.mark and state["teacher"] != self.mark:
            raise ConfigError(
                "task.teacher: its weights differ from those at the start of the run; restore them, or start a new "
                "run with init_from=..."
            )


@contextmanager
def collect_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that collects the outputs of the named layers in forwards inside the block; the first tensor of a
    tuple.
    """
    seen: dict[str, Tensor] = {}

    def store_output(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        seen[name] = first.clone()  # the next layer may write over it, as ReLU(inplace=True) does

    handles = [
        unwrap_model(model)
        .get_submodule(name)
        .register_forward_hook(lambda _layer, _inputs, output, name=name: store_output(name, output))
        for name in names
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def check_layer(model: nn.Module, name: str, whose: str) -> None:
    names = [layer for layer, _ in model.named_modules() if layer]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0) or names[:3]
        raise ConfigError(f"{whose} has no layer {name}; near names: {', '.join(near)}")


def measure_distance(student: Tensor, teacher: Tensor, key: str) -> Tensor:
    """Return the distance (B,) between the outputs of two layers. Raise ConfigError if their shapes cannot be
    compared.
    """
    student, teacher = student.float(), teacher.float()
    if student.shape == teacher.shape:
        return (student - teacher).square().flatten(1).mean(1)
    if student.ndim == teacher.ndim == 4 and student.shape[2:] == teacher.shape[2:]:
        maps = [normalize(features.square().mean(1).flatten(1), dim=1) for features in (student, teacher)]
        return (maps[0] - maps[1]).square().sum(1)
    raise ConfigError(
        f"{key}: the student's output is {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}; choose layers "
        "with outputs of the same shape, or feature maps of the same size"
    )
