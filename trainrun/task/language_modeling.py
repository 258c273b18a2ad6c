"""Language modelling: cross-entropy of the next token, summed over all tokens that are not ignored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import IGNORED, StepOutput, batch_fields
from trainrun.limits import Auto, Count, Positive
from trainrun.task.batches import extract_output_tensor, run_model, split_inputs_and_optional_target
from trainrun.task.chunked_loss import (
    build_head,
    choose_num_chunks,
    compute_chunked_loss,
    count_correct_in_chunks,
)
from trainrun.task.dict_batches import inspect_forward, unwrap_model


class LanguageModeling:
    """Cross-entropy of logits (B, T, V) against targets (B, T). An item is a target token, so means are per token.

    If a batch has no targets, they are made here: the target of a token is the next token of the same segment.
    Padding has no target.

    bytes_per_token: the divisor for `bpb` (bits per byte); 1 for bytes; None for no `bpb`.
    loss_chunks: the number of chunks in which the logits are computed and dropped (see `compute_chunked_loss`).
        `auto` is 1 if all logits fit into the memory that the runner allows (`limit_memory`), or if the model does
        not support chunks.
    shift_labels: True: the targets belong to the tokens at their own position, like `labels` of transformers, and
        are shifted here. False: they are already the next tokens. None: the same, but targets that equal the inputs
        are refused.
    """

    unit = "tokens"  # useful ones: none at padding counts

    def __init__(
        self, bytes_per_token: Positive | None = None, loss_chunks: Count | Auto = "auto",
        shift_labels: bool | None = None,
    ) -> None:  # fmt: skip
        self.nats_to_bits = None if bytes_per_token is None else 1 / (math.log(2) * bytes_per_token)
        self.loss_chunks, self.shift_labels = loss_chunks, shift_labels
        self.limit_bytes: int | None = None
        self.checked = False

    def limit_memory(self, num_bytes: int) -> None:
        """Set how many bytes the outputs of a micro-batch may use at once. Called before the first step."""
        self.limit_bytes = num_bytes

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError if the loss must be computed in chunks and the model does not support it."""
        if isinstance(self.loss_chunks, int) and self.loss_chunks > 1 and find_last_layer(model) is None:
            raise ConfigError(
                f"task.loss_chunks={self.loss_chunks}: needs a model whose forward accepts return_states=True and "
                "returns (B, T, width), and whose attribute `head` (a torch.nn.Linear) computes the logits; "
                f"{explain_no_last_layer(model)}. Use task.loss_chunks=1"
            )

    def count(self, batch: Any) -> int:
        """Return the number of target tokens that are not ignored. The host waits for a GPU, so the runner prefers
        `sizes`.
        """
        return int((self.split_batch(batch)[1] != IGNORED).sum())

    def sizes(self, batch: Any) -> Tensor:
        return (self.split_batch(batch)[1] != IGNORED).sum(1)

    def split_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        return split_tokens_and_target(batch, bool(self.shift_labels))

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and sums. At the first batch, raise PluginError or DataError if outputs and targets do not
        match.
        """
        tokens, target = self.split_batch(batch)
        layer = None if self.loss_chunks == 1 else find_last_layer(model)
        if not self.checked and self.shift_labels is None:
            check_shifted_targets(tokens, target)
        if layer is not None:
            chunks = choose_num_chunks(self.loss_chunks, tokens.numel(), layer.out_features, self.limit_bytes)
            if chunks > 1:
                return self.step_in_chunks(model, batch, layer, chunks)
        logits = extract_output_tensor(run_model(model, tokens, batch))
        if not self.checked:
            check_tokens(logits, target)
            self.checked = True
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
        return StepOutput(
            loss, {**self.build_bits_per_byte(loss), "acc": lambda: count_correct(logits, target)}
        )

    def step_in_chunks(self, model: nn.Module, batch: Any, layer: nn.Linear, chunks: int) -> StepOutput:
        tokens, target = self.split_batch(batch)
        states = run_model(model, tokens, batch, return_states=True)
        if not self.checked:
            check_states(states, target, layer)
            self.checked = True
        states, target, head = states.flatten(0, 1), target.flatten(), build_head(layer, states)
        loss = compute_chunked_loss(states, target, head, chunks)
        seen = states.detach()
        return StepOutput(
            loss,
            {
                **self.build_bits_per_byte(loss),
                "acc": lambda: count_correct_in_chunks(seen, target, head, chunks),
            },
        )

    def build_bits_per_byte(self, loss: Tensor) -> dict[str, Callable[[], Tensor]]:
        factor = self.nats_to_bits
        return {} if factor is None else {"bpb": lambda: loss.detach() * factor}

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return `prediction` (B, T), its `confidence`, and `target`."""
        tokens, target = self.split_batch(batch)
        confidence, prediction = extract_output_tensor(run_model(model, tokens, batch)).softmax(-1).max(-1)
        return {"prediction": prediction, "confidence": confidence, "target": target}


def split_tokens_and_target(batch: Any, shift_labels: bool = False) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (B, T) of a batch. Without targets, they are the next tokens.

    shift_labels: shift given targets too. Raise DataError for other shapes.
    """
    tokens, target = split_inputs_and_optional_target(batch)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise DataError(
            "data: task=language_modeling reads tokens of shape (B, T); use data=text, or another task"
        )
    if target is not None and target.ndim != 2:
        raise DataError(
            f"data: the targets have shape {tuple(target.shape)}, but task=language_modeling needs one token per "
            "position, (B, T); for one class per sample use task=classification"
        )
    if target is not None and not shift_labels:
        return tokens, target.long()
    fields = batch_fields(batch)
    segments = fields.get("segment_ids", fields.get("attention_mask"))
    return tokens, shift_targets(tokens if target is None else target, segments)


def shift_targets(tokens: Tensor, segments: Tensor | None) -> Tensor:
    """Return the next tokens (B, T) int64, IGNORED at the end of a segment. segments: (B, T), 0 for padding; None
    for one each row.
    """
    target = torch.full_like(tokens, IGNORED, dtype=torch.int64)
    target[:, :-1] = tokens[:, 1:]
    if segments is not None:
        ids = segments.long()
        inside = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        target[:, :-1].masked_fill_(~inside, IGNORED)
    return target


def find_last_layer(model: nn.Module) -> nn.Linear | None:
    """Return the model's last layer if its forward can return that layer's input, else None."""
    bare = unwrap_model(model)
    layer = getattr(bare, "head", None)
    can = isinstance(layer, nn.Linear) and "return_states" in inspect_forward(type(bare).forward)[0]
    return layer if can else None


def explain_no_last_layer(model: nn.Module) -> str:
    """Return why `find_last_layer` is None for this model."""
    bare = unwrap_model(model)
    head = getattr(bare, "head", None)
    if isinstance(head, nn.Module) and not isinstance(head, nn.Linear):
        return f"the head of {type(bare).__name__} is a {type(head).__name__}"
    return f"{type(bare).__name__} is none"


def count_correct(logits: Tensor, target: Tensor) -> Tensor:
    return ((logits.argmax(-1) == target) & (target != IGNORED)).sum()


def check_tokens(logits: Tensor, target: Tensor) -> None:
    """Check shapes and token numbers of the first batch, because the check waits for the device."""
    if logits.ndim != 3 or logits.shape[:2] != target.shape:
        raise PluginError(
            f"model: the output has shape {tuple(logits.shape)}, but task=language_modeling needs "
            f"({target.shape[0]}, {target.shape[1]}, number of tokens)"
        )
    check_range(target, logits.shape[2])


def check_shifted_targets(tokens: Tensor, target: Tensor) -> None:
    """Raise DataError if the targets are the tokens themselves, so that a model would learn to copy."""
    if target.shape != tokens.shape:
        return
    real = target != IGNORED
    copies = bool(real.any()) and torch.equal(target[real], tokens[real].long())
    if copies and not torch.equal(tokens[:, 1:], tokens[:, :-1]):
        raise DataError(
            "data: the targets of task=language_modeling are the tokens themselves, not the next ones; for unshifted "
            "labels, as in transformers, use task.shift_labels=true (or false, to train on copies)"
        )


def check_states(states: Any, target: Tensor, layer: nn.Linear) -> None:
    """Raise PluginError if the hidden states do not have the shape that the last layer reads. Check the targets too."""
    shape = (*target.shape, layer.in_features)
    if not isinstance(states, Tensor) or tuple(states.shape) != shape:
        form = tuple(states.shape) if isinstance(states, Tensor) else type(states).__name__
        raise PluginError(f"model: forward(..., return_states=True) gave {form}, but its head reads {shape}")
    check_range(target, layer.out_features)


def check_range(target: Tensor, vocabulary: int) -> None:
    real = target[target != IGNORED]
    if real.numel() and not 0 <= int(real.min()) <= int(real.max()) < vocabulary:
        raise DataError(
            f"data: the tokens lie between {int(real.min())} and {int(real.max())}, but the model has {vocabulary}; "
            "give it the vocabulary of the data (model.vocab_size)"
        )
