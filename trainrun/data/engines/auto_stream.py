"""A training stream whose engine is still open: one plan, several engines that could read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from trainrun.interfaces import Batches, MicroBatch

# Batches that threads read ahead, unless one alone is asked for: 3 ms during a step of 3 ms took 3.73 with two,
# 3.44 with four.
LEAST_AHEAD = 4


class Option(NamedTuple):
    """One way to read the data.

    name: as it is shown (`resident`, `workers=2`). engine: options of one engine differ in number only.
    number: threads or workers that read while the model trains; 0 reads in between. open: gives the stream.
    """

    name: str
    engine: str
    number: int
    open: Callable[[], Batches]


class AutoStream:
    """Fills `Batches` by handing on to one of its options: the rule's choice until `decide`.

    options: given with the rule's choice first; the attribute has the simplest first. prefetch_factor: batches that
    each thread or worker reads ahead. source: what the user gave.
    """

    def __init__(self, options: Sequence[Option], prefetch_factor: int = 2, source: Any = None) -> None:
        self.default = self.chosen = options[0]
        self.options = tuple(sorted(options, key=simplicity))
        self.prefetch_factor = prefetch_factor
        self.source = source
        self._by_name = {option.name: option for option in options}
        self._opened: dict[str, Batches] = {}

    @property
    def num_batches(self) -> int | None:
        return self.stream(self.chosen.name).num_batches

    @property
    def num_samples(self) -> int | None:
        return self.stream(self.chosen.name).num_samples

    def stream(self, name: str) -> Batches:
        """An option's own stream, opened once."""
        if name not in self._opened:
            self._opened[name] = self._by_name[name].open()
        return self._opened[name]

    def decide(self, name: str) -> None:
        """From here on this option reads; the others are closed and forgotten."""
        self.chosen = self._by_name[name]
        self.close()
        self._opened = {key: stream for key, stream in self._opened.items() if key == name}

    def follow(self, name: str) -> None:
        """Decide as another stream did, if there is such an option."""
        if name in self._by_name:
            self.decide(name)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        return self.stream(self.chosen.name).epoch(epoch, start)

    def close(self) -> None:
        for stream in self._opened.values():
            stream.close()


def simplicity(option: Option) -> tuple[int, bool, int]:
    """Sorts: tensors in memory, the main process, threads, workers; few before many."""
    return min(option.number, 1), option.engine == "workers", option.number


def num_ahead(number: int, prefetch_factor: int) -> int:
    """Batches that so many threads read ahead. Where reading takes as long as a step, each waits for the other whenever
    one of them takes a little longer; what lies ready makes up for it."""
    return max(number * prefetch_factor, LEAST_AHEAD if prefetch_factor > 1 else 1)
