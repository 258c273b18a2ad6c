"""Text samples during the training of a language model, in `metrics.jsonl` and `report.html`
(`monitor.samples_every`).

When: people want to see what the model has learned. When not: models that take a second per token. How: the model
    continues the first tokens of the same validation samples each time. It has a random generator of its own, so the
    training stays the same bit for bit. Rank 0 writes the samples. The other ranks wait at the next step, or run the
    same forward passes if these are collective. For a VAE whose model has `write(code, length)`, such as
    `trainrun.model.sequence_vae`: samples and their reconstructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from trainrun.data.readers.text.tokenizer import Tokens
from trainrun.errors import PluginError, TrainingError
from trainrun.instantiate import import_target
from trainrun.interfaces import runs_rank_zero_forwards
from trainrun.limits import EPOCH, parse_steps_or_epochs
from trainrun.sampling.next_tokens import SamplingOptions, generate_tokens
from trainrun.sampling.run_tokens import (
    decode_stream,
    encode_text,
    is_trained_on_lines,
    load_data_tokenizer,
    load_model_tokenizer,
    max_context_length,
    stop_at_newline,
)
from trainrun.task.dict_batches import inspect_forward, unwrap_model
from trainrun.task.language_modeling import split_tokens_and_target
from trainrun.task.vae import Vae, has_next_tokens, split_tokens_and_mask

if TYPE_CHECKING:
    from trainrun.config.schema import RunConfig
    from trainrun.folder.run_folder import RunDir
    from trainrun.train_state import TrainState
    from trainrun.training.components import Components

NUM_SAMPLES, NUM_REBUILT, PROMPT, LENGTH = 2, 4, 32, 160  # the last two in tokens
TEMPERATURE = 0.8


class EpochSamples:
    """A hook that writes text samples. Raises ConfigError if the model does not generate text."""

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        self._every = parse_steps_or_epochs(config.monitor.samples_every)
        self._rebuilds = is_text_vae(config)
        read = load_data_tokenizer if self._rebuilds else load_model_tokenizer
        self._tokens: Tokens = read(config, run_dir, "monitor.samples_every")
        self._prompts: list[list[int]] = []

    def on_step_end(self, run: Components, state: TrainState) -> None:
        if self._every is None or not runs_rank_zero_forwards(run.parallel):
            return
        number, by_epoch = int(self._every.amount), self._every.unit == EPOCH
        if (state.epoch if by_epoch else state.step) % number or (by_epoch and state.batches):
            return
        with run.monitors.exclude_time():
            try:
                with run.evaluating() as model:
                    for row in (
                        self._reconstruct_samples(run, model)
                        if self._rebuilds
                        else self._write_samples(run, model)
                    ):
                        run.monitors.write_row("sample", state.step, row)
            except (PluginError, TrainingError) as error:  # no reason to lose the run
                run.monitors.note(f"monitor.samples_every: no sample at step {state.step}: {error}")

    def _decode(self, tokens: Iterable[int]) -> str:
        return "".join(decode_stream(self._tokens, tokens))

    def _write_samples(self, run: Components, model: Any) -> Iterator[dict[str, str]]:
        if not self._prompts:
            prompts = self._read_prompts(run)
            self._prompts = run.parallel.gather(prompts)[0] if run.parallel.forward_is_collective else prompts
        for number, prompt in enumerate(self._prompts):
            written = decode_stream(self._tokens, self._continue_prompt(run, model, prompt, number))
            text = "".join(stop_at_newline(written) if is_trained_on_lines(run.config) else written)
            yield {"prompt": self._decode(prompt), "text": text}

    @torch.no_grad()
    def _reconstruct_samples(self, run: Components, model: Any) -> Iterator[dict[str, str]]:
        """Yield the first validation samples, each with its reconstruction from the code."""
        batch = next(iter(run.val.epoch(0)), None) if run.val is not None else None
        if batch is None:
            return
        task: Any = run.task
        tokens, mask = split_tokens_and_mask(batch.data, with_last=has_next_tokens(batch.data))
        with run.precision.autocast():
            mean = task.terms(model, batch.data).mean[:NUM_REBUILT]
            writer: Any = unwrap_model(model)
            written = writer.write(mean, min(LENGTH, tokens.shape[1]))
        for row, real, new in zip(tokens, mask, written, strict=False):
            size = min(int(real.sum()), LENGTH)
            yield {
                "original": self._decode(row[:size].tolist()),
                "rebuilt": self._decode(new[:size].tolist()),
            }

    def _continue_prompt(self, run: Components, model: Any, prompt: list[int], number: int) -> Any:
        cached = "cache" in inspect_forward(type(model).forward)[0]
        options = SamplingOptions(TEMPERATURE, max_tokens=LENGTH, seed=number)
        context = max_context_length(model, run.config, cached)
        return generate_tokens(
            model, prompt, options, self._tokens.vocabulary, context, around=run.precision.autocast
        )

    def _read_prompts(self, run: Components) -> list[list[int]]:
        """Return the first tokens of the first validation samples; a newline without validation data."""
        batch = next(iter(run.val.epoch(0)), None) if run.val is not None else None
        if batch is None:
            return [encode_text(self._tokens, "\n") or [0]]  # some tokenizers leave it out
        rows, target = split_tokens_and_target(batch.data)
        return [
            row[target[i] >= 0][:PROMPT].tolist() or row[:1].tolist()
            for i, row in enumerate(rows[:NUM_SAMPLES])
        ]


def is_text_vae(config: RunConfig) -> bool:
    """Return whether the run trains a VAE whose network generates tokens from a code."""
    task, model = ((node or {}).get("_target_") for node in (config.task, config.model))
    if not task or not model or import_target(task, "task") is not Vae:
        return False
    return callable(getattr(import_target(model, "model"), "write", None))
