"""A training stream whose engine is chosen by measuring: one plan, several engines that could read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainrun.interfaces import Batches, MicroBatch


class Candidate(Protocol):
    """One way to read the data.

    name: as it is shown (`resident`, `workers=2`). engine: candidates of one engine differ in number only.
    number: threads or workers that read while the model trains; 0 reads in between.
    ahead: how many batches may lie ready because nobody took them yet; 0 where number is.
    """

    @property
    def name(self) -> str: ...

    @property
    def engine(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def ahead(self) -> int: ...

    def open(self) -> Batches: ...


@dataclass(frozen=True)
class Way:
    """Fills `Candidate`."""

    name: str
    engine: str
    number: int
    ahead: int
    opener: Callable[[], Batches]

    def open(self) -> Batches:
        return self.opener()


class Undecided:
    """Fills `Batches` by handing on to one of its candidates: the rule's choice until `decide`.

    candidates: the simplest first; of equals the first is taken. default: the name of the rule's choice.
    num_batches, num_samples: of the plan, which all candidates share. source: what the user gave.
    """

    def __init__(self, candidates: Sequence[Candidate], default: str, num_batches: int | None,
                 num_samples: int | None, source: Any = None) -> None:  # fmt: skip
        self.candidates = tuple(candidates)
        self.source = source
        self._by_name = {candidate.name: candidate for candidate in candidates}
        self.default = self.chosen = self._by_name[default]
        self._num_batches, self._num_samples = num_batches, num_samples
        self._opened: dict[str, Batches] = {}

    @property
    def num_batches(self) -> int | None:
        return self._num_batches

    @property
    def num_samples(self) -> int | None:
        return self._num_samples

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
