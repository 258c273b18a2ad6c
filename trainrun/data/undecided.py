"""A training stream whose engine is chosen by measuring: one plan, several engines that could read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from trainrun.interfaces import Batches, MicroBatch


class Candidate(Protocol):
    """One way to read the data.

    name: as it is shown (`resident`, `workers=2`). engine: candidates of one engine differ in number only.
    number: threads or workers that read while the model trains; 0 reads in between.
    """

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def open(self) -> Callable[[], Batches]: ...


class Way(NamedTuple):
    """Fills `Candidate`."""

    name: str
    engine: str
    number: int
    open: Callable[[], Batches]


class Undecided:
    """Fills `Batches` by handing on to one of its candidates: the rule's choice until `decide`.

    ways: the rule's choice first; `candidates` has the simplest first, and of equals the first is taken.
    prefetch_factor: batches that each thread or worker reads ahead. source: what the user gave. fills: all of
    it is in memory after the first epoch.
    """

    def __init__(self, ways: Sequence[Candidate], prefetch_factor: int = 2, source: Any = None,
                 fills: bool = False) -> None:  # fmt: skip
        self.default = self.chosen = ways[0]
        self.candidates = tuple(sorted(ways, key=simplicity))
        self.prefetch_factor = prefetch_factor
        self.source = source
        self.fills = fills
        self._by_name = {candidate.name: candidate for candidate in ways}
        self._opened: dict[str, Batches] = {}

    @property
    def num_batches(self) -> int | None:
        return self.stream(self.chosen.name).num_batches

    @property
    def num_samples(self) -> int | None:
        return self.stream(self.chosen.name).num_samples

    def stream(self, name: str) -> Batches:
        """A candidate's own stream, opened once."""
        if name not in self._opened:
            self._opened[name] = self._by_name[name].open()
        return self._opened[name]

    def decide(self, name: str) -> None:
        """From here on this candidate reads; the others are closed and forgotten."""
        self.chosen = self._by_name[name]
        self.close()
        self._opened = {key: stream for key, stream in self._opened.items() if key == name}

    def follow(self, name: str) -> None:
        """The same as another stream decided, where there is such a candidate."""
        if name in self._by_name:
            self.decide(name)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        return self.stream(self.chosen.name).epoch(epoch, start)

    def close(self) -> None:
        for stream in self._opened.values():
            stream.close()


def simplicity(candidate: Candidate) -> tuple[int, bool, int]:
    """Sorts: tensors in memory, the main process, threads, workers; few before many."""
    return min(candidate.number, 1), candidate.engine == "workers", candidate.number
