"""A recurrent network over tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainrun.limits import BelowOne, Count
from trainrun.model.choices import Outputs
from trainrun.model.layers import dropout_layers


class Lstm(nn.Module):
    """A recurrent network from tokens (B, T) to logits.

    outputs: `each` returns the logits of every position, (B, T, num_classes). `last` returns those of the last
        position, (B, num_classes); with an attention_mask, of the last position that is not padding. Padding must
        come after the tokens, so that the tokens do not depend on it.
    vocab_size: number of different input tokens; None for num_classes, as in language modelling.
    """

    def __init__(
        self,
        num_classes: Count,
        vocab_size: Count | None = None,
        width: Count = 256,
        layers: Count = 1,
        dropout: BelowOne = 0.0,
        outputs: Outputs = "each",
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.tokens = nn.Embedding(vocab_size or num_classes, width)
        self.drop = nn.Sequential(*dropout_layers(dropout))
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.head = nn.Linear(width, num_classes)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        return_states: bool = False,
        cache: dict[Any, Any] | None = None,
    ) -> Tensor:
        """Return the logits.

        attention_mask: (B, T) bool, False at padding. return_states: return the inputs of `head` instead.
        cache: a dictionary, empty at the first call. In later calls `tokens` continues the tokens of the earlier
            calls.
        """
        states, after = self.lstm(self.drop(self.tokens(tokens)), cache.get("state") if cache else None)
        if cache is not None:
            cache["state"] = after
        if self.outputs == "last":
            if attention_mask is None:
                states = states[:, -1]
            else:
                ends = attention_mask.sum(1).clamp(min=1) - 1
                states = states[torch.arange(len(states), device=states.device), ends]
        states = self.drop(states)
        return states if return_states else self.head(states)  # type: ignore[no-any-return]
