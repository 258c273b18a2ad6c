"""The next token: cross-entropy summed over all tokens that are not ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import StepOutput
from trainrun.task.batches import inputs_and_maybe_target, output_tensor, run_model

IGNORED = -100  # torch's ignore_index


class LanguageModeling:
    """Logits (B, T, V) against targets (B, T); an item is a target token, so means are per token.

    A batch without targets is shifted here: the target of a token is the one after it, in the same
    segment, and none at padding. bytes_per_token: what `bpb` (bits per byte) divides by; 1 for bytes.
    ConfigError: it is not above 0.
    """

    unit = "tokens"  # useful ones: none at padding counts

    def __init__(self, bytes_per_token: float = 1.0) -> None:
        if not bytes_per_token > 0:
            raise ConfigError(f"task.bytes_per_token={bytes_per_token}: must be above 0")
        self.nats_to_bits = 1 / (math.log(2) * bytes_per_token)
        self.checked = False

    def count(self, batch: Any) -> int:
        """Target tokens that are not ignored; waits for the device."""
        return int((tokens_and_target(batch)[1] != IGNORED).sum())

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """PluginError, DataError: outputs and targets do not fit each other, at the first batch."""
        tokens, target = tokens_and_target(batch)
        logits = output_tensor(run_model(model, tokens, batch))
        if not self.checked:
            check(logits, target)
            self.checked = True
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
        return StepOutput(
            loss,
            {"bpb": lambda: loss.detach() * self.nats_to_bits, "acc": lambda: num_right(logits, target)},
        )

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """`prediction` (B, T), its `confidence`, and `target`."""
        tokens, target = tokens_and_target(batch)
        confidence, prediction = output_tensor(run_model(model, tokens, batch)).softmax(-1).max(-1)
        return {"prediction": prediction, "confidence": confidence, "target": target}


def tokens_and_target(batch: Any) -> tuple[Tensor, Tensor]:
    """Of pairs and dicts; where there is no target, the tokens moved by one."""
    tokens, target = inputs_and_maybe_target(batch)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise DataError(
            "data: task=language_modeling reads tokens of shape (B, T); use data=text, or another task"
        )
    if target is not None:
        return tokens, target.long()
    marks = batch if isinstance(batch, Mapping) else {}
    return tokens, next_tokens(tokens, marks.get("segment_ids", marks.get("attention_mask")))


def next_tokens(tokens: Tensor, segments: Tensor | None) -> Tensor:
    """(B, T) int64. segments: (B, T), 0 at padding; None is one whole segment a row."""
    target = torch.full_like(tokens, IGNORED, dtype=torch.int64)
    target[:, :-1] = tokens[:, 1:]
    if segments is not None:
        ids = segments.long()
        inside = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        target[:, :-1].masked_fill_(~inside, IGNORED)
    return target


def num_right(logits: Tensor, target: Tensor) -> Tensor:
    return ((logits.argmax(-1) == target) & (target != IGNORED)).sum()


def check(logits: Tensor, target: Tensor) -> None:
    """Of the first batch only: it waits for the device."""
    if logits.ndim != 3 or logits.shape[:2] != target.shape:
        raise PluginError(
            f"model: the output has shape {tuple(logits.shape)}, but task=language_modeling needs "
            f"({target.shape[0]}, {target.shape[1]}, number of tokens)"
        )
    real = target[target != IGNORED]
    if real.numel() and not 0 <= int(real.min()) <= int(real.max()) < logits.shape[2]:
        raise DataError(
            f"data: the tokens lie between {int(real.min())} and {int(real.max())}, but the model knows "
            f"{logits.shape[2]}; give it the vocabulary of the data (model.vocab_size)"
        )
