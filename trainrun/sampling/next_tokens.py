"""Generate text token by token from a model.

If the model's `forward` has an argument `cache`, it gets a dictionary that is empty at first, and then only the new
tokens. The model stores in it what it needs of earlier tokens. Any other model computes all tokens again for each
new one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainrun.errors import PluginError, TrainingError
from trainrun.task.batches import extract_output_tensor
from trainrun.task.dict_batches import inspect_forward
from trainrun.user_code import is_built_in

NEAR = 1e-2  # of the largest logit: a cache that is another model's is further off


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. temperature: 0 chooses the most likely token. top_k: consider only the k most
    likely.
    """

    temperature: float = 1.0
    top_k: int | None = None
    max_tokens: int = 256
    seed: int = 0


def generate_tokens(
    model: nn.Module, prompt: Sequence[int], options: SamplingOptions, vocabulary: int, context: int | None = None,
    cached: bool = True, around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[int]:  # fmt: skip
    """Yield up to `max_tokens` tokens below `vocabulary`. With and without the cache the tokens are the same.

    context: the maximum number of tokens that the model reads; of a longer text the newer half is used. around: a
        context manager for each forward pass. Raise PluginError if the output is not logits of tokens, TrainingError
        if the logits are not finite.
    """
    generator = torch.Generator().manual_seed(options.seed)
    tokens, start, seen = list(prompt), 0, 0
    cached = cached and "cache" in inspect_forward(type(model).forward)[0]
    is_own = not is_built_in(model)
    cache: dict[Any, Any] = {}
    for _ in range(options.max_tokens):
        if context and len(tokens) - start > context:
            start = seen = len(tokens) - max(1, context // 2)
            cache = {}
        logits = compute_last_logits(
            model, tokens[seen:] if cached else tokens[start:], cache if cached else None, around
        )
        if cached and is_own and seen > start:  # once: a keyword of this name may mean something else
            check_cached_logits(logits, compute_last_logits(model, tokens[start:], None, around), model)
            is_own = False
        seen = len(tokens)
        if len(logits) < vocabulary:
            raise PluginError(
                f"model: gives {len(logits)} logits, but the text has {vocabulary} different tokens"
            )
        tokens.append(sample_token(logits[:vocabulary], options, generator))
        yield tokens[-1]


@torch.no_grad()
def compute_last_logits(
    model: nn.Module, tokens: Sequence[int], cache: dict[Any, Any] | None,
    around: Callable[[], AbstractContextManager[Any]],
) -> Tensor:  # fmt: skip
    """Return the logits of the last position, (V,) float64 on the host, computed without torch.compile.

    Compiled code would be compiled again for each length.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.tensor([list(tokens)], device=device)
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with around(), eager:
        logits = extract_output_tensor(model(ids) if cache is None else model(ids, cache=cache))
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise PluginError(
            f"model: {tuple(logits.shape)} is the output for tokens of shape {tuple(ids.shape)}; a model that "
            "generates text must return logits for every position, (B, T, number of tokens)"
        )
    return logits[0, -1].to("cpu", torch.float64)


def check_cached_logits(cached: Tensor, whole: Tensor, model: nn.Module) -> None:
    if not torch.allclose(cached, whole, rtol=0, atol=NEAR * max(1.0, float(whole.abs().max()))):
        raise PluginError(
            f"model: {type(model).__name__}.forward(tokens, cache=...) returns other logits than without a cache; with "
            "a cache it gets only the new tokens, and what earlier calls stored in the dict (see trainrun/model/gpt.py)"
        )


def sample_token(logits: Tensor, options: SamplingOptions, generator: torch.Generator) -> int:
    if not logits.isfinite().all():
        raise TrainingError("model: the logits of the next token are not finite")
    if options.temperature == 0:
        return int(logits.argmax())
    if options.top_k is None:
        chosen = torch.arange(len(logits))
    else:
        logits, chosen = logits.topk(min(options.top_k, len(logits)))
    shares = ((logits - logits.max()) / options.temperature).softmax(0)
    return int(chosen[torch.multinomial(shares, 1, generator=generator)])
