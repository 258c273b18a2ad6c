"""What is written with a cache and without, by models of ours and of one's own, and how tokens become text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn

from trainrun.data.readers.text.tokenizer import BYTES, open_tokenizer
from trainrun.data.readers.text.trained_tokenizer import open_trained_file
from trainrun.errors import PluginError, TrainingError
from trainrun.model.gpt import Gpt
from trainrun.model.lstm import Lstm
from trainrun.sampling.next_tokens import SamplingOptions, generate_tokens
from trainrun.sampling.run_tokens import decode_stream, encode_text

TEXT = "Grüße, 世界! 🙂 the end\nthe end"


class Own(nn.Module):
    """A model of the user's, without a cache; or with a keyword of that name that means something else."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).cumsum(1)


class Odd(Own):
    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:
        return super().forward(tokens)


MODELS = {
    "rotary": (lambda: Gpt(11, context=16, layers=2, width=16, heads=2), 16),
    "learned": (lambda: Gpt(11, context=16, layers=2, width=16, heads=2, positions="learned"), 16),
    "lstm": (lambda: Lstm(11, width=16, layers=2), None),
    "own": (Own, 7),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "draw", [SamplingOptions(0), SamplingOptions(0.7, seed=3), SamplingOptions(2.0, top_k=4, seed=1)], ids=str
)
def test_the_cache_changes_no_token_also_beyond_the_context(name: str, draw: SamplingOptions) -> None:
    torch.manual_seed(0)
    build, context = MODELS[name]
    model = build().double().eval()
    draw = SamplingOptions(draw.temperature, draw.top_k, 50, draw.seed)
    found = [list(generate_tokens(model, [1, 2, 3], draw, 11, context, cached)) for cached in (True, False)]
    assert found[0] == found[1]
    assert len(found[0]) == 50
    if draw.temperature:
        assert len(set(found[0])) > 3


def test_a_long_prompt_is_cut_and_temperature_zero_is_the_likeliest() -> None:
    torch.manual_seed(0)
    model = Gpt(11, context=8, layers=1, width=16, heads=2).eval()
    prompt = [int(i) for i in torch.randint(11, (20,))]
    (token,) = generate_tokens(model, prompt, SamplingOptions(0, max_tokens=1), 11, 8)
    assert token == int(model(torch.tensor([prompt[-4:]]))[0, -1].argmax())


def test_top_k_draws_among_so_many() -> None:
    model = Own()
    model.table.weight.data = torch.arange(11.0).expand(11, 11).contiguous()
    found = set(generate_tokens(model, [0], SamplingOptions(1e6, 2, 60), 11, 1))
    assert found == {9, 10}


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (Odd(), PluginError),
        (nn.Sequential(nn.Embedding(11, 11), nn.Flatten()), PluginError),
        (nn.Embedding(5, 5), PluginError),
        (nn.Sequential(nn.Embedding(11, 11), nn.Linear(11, 11).half().apply(lambda m: m.weight.data.fill_(float("nan")))
                       .float()), TrainingError),
    ],
    ids=["odd cache", "shape", "vocabulary", "nan"],
)  # fmt: skip
def test_what_is_no_language_model_is_refused(model: nn.Module, error: type[Exception]) -> None:
    with refused(error):
        list(generate_tokens(model, [1, 2], SamplingOptions(max_tokens=3), 11))


def test_pieces_are_whole_characters_and_give_the_text_again(tmp_path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    trained = open_trained_file("bpe:270", (tmp_path / "a.txt",), "blocks", None, 0.0, tmp_path)
    for tokens in (BYTES, open_tokenizer(trained)[0]):
        ids = encode_text(tokens, TEXT)
        found = list(decode_stream(tokens, ids))
        assert "".join(found) == TEXT
        assert "\ufffd" not in "".join(found)
        assert len(found) >= len(ids)  # streamed, not held to the end
    assert "".join(decode_stream(BYTES, [0xC3, 65])) == "\ufffdA"
