"""A variational autoencoder for token sequences. One LSTM encodes a sequence into a code, another decodes the code.

Source: Bowman et al., 2016 (arXiv:1511.06349). The code is computed from the maximum over all LSTM states instead of
    the last state, so that the decoder uses the code sooner (Long et al., 2019, arXiv:1911.03976). An LSTM decoder
    also predicts well without the code, so the code easily collapses. Against this, anneal beta, drop words
    (`data.augment.word_dropout.rate`), and use `monitor=vae`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainrun.limits import Count
from trainrun.model.vae import FIRST_CODE, VaeOutput, draw_code


class SequenceVae(nn.Module):
    """A network from tokens (B, T) through a random code (B, latent_dim) to logits of the same tokens (B, T,
    vocab_size).

    Position t is predicted from the code and the tokens before t. Padding must come after the tokens, so that the
    tokens do not depend on it.
    """

    def __init__(self, vocab_size: Count, latent_dim: Count = 32, width: Count = 128) -> None:
        super().__init__()
        self.nothing = vocab_size  # stands ahead of the first token, and for those that were dropped
        self.tokens = nn.Embedding(vocab_size + 1, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.code = nn.Linear(width, 2 * latent_dim)
        self.begin = nn.Linear(latent_dim, 2 * width)
        self.decoder = nn.LSTM(width + latent_dim, width, batch_first=True)
        self.head = nn.Linear(width, vocab_size)
        with torch.no_grad():
            self.code.weight.mul_(FIRST_CODE)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        noise: Tensor | None = None,
        word_dropout: Tensor | None = None,
    ) -> VaeOutput:
        """Return reconstruction (logits), mean and log_var.

        attention_mask: (B, T) bool, False at padding. word_dropout: (B, T or more) bool, True for tokens that are
            hidden from the decoder.
        noise: (B, latent_dim), standard normal. If it is None, training draws it from torch's generator, and
            evaluation decodes the mean.
        """
        states, _ = self.encoder(self.tokens(tokens))
        if attention_mask is not None:
            states = states.masked_fill(~attention_mask[..., None], -1.0)  # an LSTM gives more
        mean, log_var, drawn = draw_code(self.code(states.amax(1)), noise, self.training)
        return VaeOutput(self._decode(tokens, drawn.to(self.head.weight.dtype), word_dropout), mean, log_var)

    def _decode(self, tokens: Tensor, code: Tensor, dropped: Tensor | None) -> Tensor:
        if dropped is not None:
            tokens = tokens.masked_fill(dropped[:, : tokens.shape[1]], self.nothing)
        before = torch.cat([torch.full_like(tokens[:, :1], self.nothing), tokens[:, :-1]], dim=1)
        shown = self.tokens(before)
        beside = code[:, None].expand(-1, shown.shape[1], -1)
        states, _ = self.decoder(torch.cat([shown, beside.to(shown.dtype)], dim=2), self._first_state(code))
        return self.head(states)  # type: ignore[no-any-return]

    def _first_state(self, code: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = self.begin(code).chunk(2, dim=1)
        return hidden.tanh()[None].contiguous(), cell[None].contiguous()

    def write(self, code: Tensor, length: int) -> Tensor:
        """Generate tokens (B, length) from a code (B, latent_dim). Each token is the most likely token after the
        earlier tokens.
        """
        code = code.to(self.head.weight.dtype)
        state, written = (
            self._first_state(code),
            [torch.full_like(code[:, :1], self.nothing, dtype=torch.long)],
        )
        for _ in range(length):
            shown = self.tokens(written[-1])
            states, state = self.decoder(torch.cat([shown, code[:, None].to(shown.dtype)], dim=2), state)
            written.append(self.head(states).argmax(2))
        return torch.cat(written[1:], dim=1)
