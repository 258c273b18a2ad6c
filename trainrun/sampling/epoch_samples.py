"""Samples of text while a language model learns, in `metrics.jsonl` and `report.html` (`monitor.samples_every`).

When: a training whose loss says little to people. When not: models that take a second for a token.
How: beginnings of the same validation samples each time, continued by the model that is validated, with numbers drawn
aside: no bit of the training is another. Rank 0 alone writes them; the others wait at the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainrun.config.units import EPOCH, parse_rounds
from trainrun.data.readers.text.tokenizer import Tokens
from trainrun.sampling.next_tokens import Draw, next_tokens
from trainrun.sampling.run_tokens import context_of, encoded, pieces, tokens_of
from trainrun.seeding import kept_random_state
from trainrun.task.batches import keywords_of
from trainrun.task.language_modeling import tokens_and_target

if TYPE_CHECKING:
    from trainrun.config.schema import RunConfig
    from trainrun.runs.run_folder import RunDir
    from trainrun.training.components import Components
    from trainrun.training.state import TrainState

NUM_SAMPLES, PROMPT, LENGTH = 2, 32, 160  # tokens
TEMPERATURE = 0.8


class EpochSamples:
    """A hook. ConfigError: the run learns to write no text."""

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        self._every = parse_rounds(config.monitor.samples_every)
        self._tokens: Tokens = tokens_of(config, run_dir, "monitor.samples_every")
        self._prompts: list[list[int]] = []

    def on_step_end(self, run: Components, state: TrainState) -> None:
        if self._every is None or run.parallel.rank:
            return
        number, by_epoch = int(self._every.amount), self._every.unit == EPOCH
        if (state.epoch if by_epoch else state.step) % number or (by_epoch and state.batches):
            return
        model, training = run.averaged, run.averaged.training
        with run.monitors.paused(), kept_random_state():
            self._prompts = self._prompts or self._beginnings(run)
            model.eval()
            try:
                for number, prompt in enumerate(self._prompts):
                    text = "".join(pieces(self._tokens, self._continued(run, model, prompt, number)))
                    begun = "".join(pieces(self._tokens, prompt))
                    run.monitors.write_row("sample", state.step, {"prompt": begun, "text": text})
            finally:
                model.train(training)

    def _continued(self, run: Components, model: Any, prompt: list[int], number: int) -> Any:
        cached = "cache" in keywords_of(type(model).forward)[0]
        draw = Draw(TEMPERATURE, max_tokens=LENGTH, seed=number)
        context = context_of(model, run.config, cached)
        return next_tokens(
            model, prompt, draw, self._tokens.vocabulary, context, around=run.precision.autocast
        )

    def _beginnings(self, run: Components) -> list[list[int]]:
        """The first tokens of the first validation samples; without any, a new line."""
        batch = next(iter(run.val.epoch(0)), None) if run.val is not None else None
        if batch is None:
            return [encoded(self._tokens, "\n")]
        rows, target = tokens_and_target(batch.data)
        return [
            row[target[i] >= 0][:PROMPT].tolist() or row[:1].tolist()
            for i, row in enumerate(rows[:NUM_SAMPLES])
        ]
