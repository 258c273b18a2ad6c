"""Batches of torch's IterableDataset, whose samples can only be read one after the other.

A source with `shard(num_shards, index)` and without a length, such as `datasets.IterableDataset`, is read in parts:
each rank, and each of its workers, forms batches of its own part. Any other source is read completely by every rank,
which takes its share of each batch. If a source has `state_dict` and `load_state_dict`, its state is read after each
batch, and a resume continues from there. For any other source, a resume reads the earlier samples again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainrun.data.engines.batch_reader import (
    LoadedBatch,
    SampleSteps,
    Transform,
    WorkerFailure,
    collate_samples,
    raise_or_return_failure,
)
from trainrun.data.engines.generators import SeedGlobals, build_generator, has_parameter, seed_globals
from trainrun.data.engines.stream import BatchesWrapper
from trainrun.data.map_style import find_class_name
from trainrun.data.order.sampler import Plan, build_batch_size_error, build_end_error
from trainrun.data.same_samples import check_same_digests, hash_samples, refuse_shared_memory
from trainrun.errors import ANY_FAULT, DataError
from trainrun.interfaces import Batches, KeepsState, MicroBatch
from trainrun.runtime.child_process import ChildTimeout, can_fork_safely, end_pipes_and_sockets, run_in_child
from trainrun.user_code import format_error_with_line

PASS_SAMPLES = 32  # of each of two passes that are compared
PASS_SECONDS = 10.0  # for the first samples of two passes in a child process
SHUFFLE = 3  # of the numbers that the order inside a block is drawn from
Keep = Callable[[int, Any], None]


@dataclass
class SourcePlace:
    """A position in an iterable source, from which a resume continues.

    taken: the number of earlier samples. state: the `state_dict()` of the source at this position. source: the
        iterable that is being read; None at its end.
    """

    taken: int = 0
    state: Any = None
    source: Any = None

    def record(self, taken: int) -> None:
        """Record this position, if the source can report its own state."""
        if can_report_position(self.source):
            self.taken, self.state = taken, copy.deepcopy(self.source.state_dict())


@dataclass(frozen=True, eq=False)
class StreamReader(IterableDataset[Any]):  # the base class is how torch tells it from a map-style one
    """The batches of one epoch for one rank, from position `start` on. Runs in a worker or in the main process.

    If each rank reads the complete source, the reader forms global micro-batches and collates only the samples of this
    rank. So W ranks use the batches of one rank. The global generators are seeded before every sample by (seed, epoch,
    number of the sample).

    num_samples: the length of an epoch; None if the data set has no length.
    most: the largest number of micro-batches (in evaluation: of samples); None for all.
    buffer: how many samples are shuffled together; 0 for none.
    readers: processes of this rank that each read a part; 0 if this rank reads the complete source.
    turn: the reader of the first batch.
    begun: for each reader, the number of its earlier batches and a position before the next batch. A reader without an
        entry starts at the beginning.
    fresh: for each part, the state of a source with `state_dict` before its first sample.
    """

    dataset: Any
    plan: Plan
    num_samples: int | None
    most: int | None
    recipe: SampleSteps
    buffer: int = 0
    readers: int = 0
    epoch: int = 0
    start: int = 0
    turn: int = 0
    begun: dict[int, tuple[int, SourcePlace]] = field(default_factory=dict)
    fresh: dict[int, Any] = field(default_factory=dict)

    def build_reader_at(self, epoch: int, start: int, known: Any) -> StreamReader:
        """Return the reader of another epoch and position.

        known: the entry that `take_turns` stored for that position. Without it the earlier samples are read and
            dropped, which takes O(start).
        """
        turn, found = known or (0, ())
        begun = {role: (batches, SourcePlace(taken, state)) for role, batches, taken, state in found}
        return replace(self, epoch=self.plan.effective_epoch(epoch), start=start, turn=turn, begun=begun)

    @property
    def parts(self) -> int:
        return self.plan.world_size * self.readers if self.readers else 1

    @property
    def repeats_batches(self) -> bool:
        """Return whether several readers repeat their batches before `start`."""
        return self.readers > 1 and not self.begun

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        role = ((info.id if info is not None else 0) + self.turn) % max(1, self.readers)
        try:
            if self.readers > 1:
                hide_worker()
            batches = self._iterate_batches(role)
            yield from batches if self.readers else mark_last(batches)
        except DataError as error:
            if info is None:
                raise
            yield (
                WorkerFailure(str(error), "") if get_worker_info() is None else raise_or_return_failure(error)
            )
        while self.readers > 1:  # the others go on, and each has its turn
            yield LoadedBatch(None, [role], False, False)

    def _iterate_batches(self, role: int) -> Iterator[LoadedBatch]:
        """Yield the batches of one reader, from its start on."""
        part, plan = self.plan.rank * self.readers + role, self._part_plan
        start, place = self.begun.get(role, (0 if self.readers > 1 else self.start, SourcePlace()))
        place, position, number = replace(place), place.taken, start
        most = self.most if plan.training and not self.readers else None
        samples = islice(self._iterate_samples(place, part), None if plan.training else self.most)
        skipped = islice(samples, start * plan.global_size - position)  # they are read, but not collated
        position += sum(1 for _ in skipped)
        while (most is None or number < most) and (chunk := self._take_chunk(samples, number)):
            digest = hash_samples(chunk) if plan.world_size > 1 and number == start else ""
            first, position, number = position, position + len(chunk), number + 1
            if not self.buffer:
                place.record(position)
            state = (role, number, place.taken, place.state) if can_report_position(self.dataset) else None
            reading = self._build_rank_batch(chunk, first, part)
            if reading is not None:
                yield reading._replace(state=state, whole=digest)
        if number == start:
            yield from self._yield_filler(part, start, position)

    @property
    def _part_plan(self) -> Plan:
        """Return the plan of the batches. A rank with its own part forms them alone."""
        return replace(self.plan, rank=0, world_size=1) if self.readers else self.plan

    def _take_chunk(self, samples: Iterator[Any], number: int) -> list[Any]:
        """Return the samples of global micro-batch `number`; none at the end of the source.

        Raise DataError if the source of a training has fewer samples than a batch.
        """
        plan = self._part_plan
        chunk = list(islice(samples, plan.global_size))
        if not chunk or len(chunk) == plan.global_size:
            return chunk
        if number == 0 and plan.training and not self.readers:
            raise build_batch_size_error(self.recipe.key, len(chunk), plan)
        return [] if plan.drop_last else chunk

    def _build_rank_batch(self, chunk: list[Any], first: int, part: int) -> LoadedBatch | None:
        """Return this rank's share of a global micro-batch. In training, return a filler if the share is empty.

        first: the position of the first sample of the chunk in its part.
        """
        begin, end, real = self._part_plan.compute_bounds(len(chunk))
        numbers = [position * self.parts + part for position in range(first + begin, first + end)]
        return self._build_reading(chunk[begin:end], numbers, real) if begin < end else None

    def _yield_filler(self, part: int, start: int, position: int) -> Iterator[LoadedBatch]:
        """Yield a filler if other readers may have batches. Raise DataError if no reader has one from `start` on.

        position: the number of samples that were read.
        """
        if self.readers:
            for sample in islice(self._iterate_samples(SourcePlace(), part), 1):
                yield self._build_reading([sample], [part], False)
            return
        if not position:
            raise DataError(
                f"{self.recipe.key}: {self._name(part)} gave no batch in epoch {self.epoch}{self._describe_end}"
            )
        size = self.plan.global_size
        num_batches = position // size if self.plan.drop_last else -(-position // size)
        if self.plan.training and self.most is not None:
            num_batches = min(num_batches, self.most)
        raise build_end_error(start, num_batches)

    def _iterate_samples(self, place: SourcePlace, part: int) -> Iterator[Any]:
        """Yield the samples beginning at `place`. With a shuffle buffer, `place` is the start of the current block."""
        raw, num_taken = self._iterate_source(place, part), place.taken
        if self.buffer or self._part_plan.global_size > 1:
            raw = refuse_shared_memory(raw, self.recipe.key)
        if not self.buffer:
            yield from raw
            return
        while block := list(islice(raw, self.buffer)):
            key = (self.plan.seed, self.epoch, num_taken // self.buffer * self.parts + part, SHUFFLE)
            for index in torch.randperm(len(block), generator=build_generator(*key)).tolist():
                yield block[index]
            num_taken += len(block)
            place.record(num_taken)

    def _iterate_source(self, place: SourcePlace, part: int) -> Iterator[Any]:
        """Yield every sample in the order of the source."""
        seed, epoch, position, parts = self.plan.seed, self.epoch, place.taken, self.parts
        source, end = self.dataset, object()
        try:
            seed_globals(seed, epoch)
            if parts > 1:
                source = source.shard(num_shards=parts, index=part)
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            if can_report_position(source):
                # one that was left amid an epoch begins the next at the beginning
                if part not in self.fresh:
                    self.fresh[part] = copy.deepcopy(source.state_dict())
                state = self.fresh[part] if place.state is None else place.state
                source.load_state_dict(copy.deepcopy(state))
            place.source, samples = source, iter(source)
            while True:
                seed_globals(seed, epoch, position * parts + part)
                sample = next(samples, end)
                if sample is end:
                    break
                position += 1
                yield sample
            place.source = None
        except ANY_FAULT as error:
            raise DataError(
                f"{self.recipe.key}: sample {position} of {self._name(part)} cannot be read: "
                f"{format_error_with_line(error)}"
            ) from error
        if self.num_samples not in (None, position):
            raise DataError(
                f"{self.recipe.key}: len() of {self._name(part)} says {self.num_samples} samples, but its iterator "
                f"gave {position}; correct __len__ or leave it out"
            )

    def _build_reading(self, samples: list[Any], indices: list[int], real: bool) -> LoadedBatch:
        """Transform and collate samples into a reading. indices: the sample numbers in the epoch."""
        transform, calls = Transform(self.recipe, self.dataset), SeedGlobals()
        changed = [
            transform(sample, self.epoch, i, calls) for i, sample in zip(indices, samples, strict=True)
        ]
        return LoadedBatch(collate_samples(changed, self.recipe), indices, real, False)

    def _name(self, part: int) -> str:
        which = f" (part {part} of {self.parts})" if self.parts > 1 else ""
        return f"{find_class_name(self.dataset)}{which}"

    @property
    def _describe_end(self) -> str:
        return "; each call of its __iter__ must begin anew" if self.epoch else ""

    def take_turns(self, items: Iterator[LoadedBatch], keep: Keep) -> Iterator[LoadedBatch]:
        """Yield one batch of each reader in turn, from `start` on, until no reader has another batch.

        keep: called with the number of batches so far, and with the entry that `build_reader_at` needs to continue from
            this position.
        """
        stands = {role: (role, batches, at.taken, at.state) for role, (batches, at) in self.begun.items()}
        num_given, spare, over = 0 if self.repeats_batches else self.start, None, set()
        before, readers = self.start, max(1, self.readers)
        for number, item in enumerate(items, 1):
            if item.data is None:
                over.add(item.indices[0])
                if len(over) == readers:
                    break
                continue
            if self.readers and not item.real:
                spare = item
                continue
            num_given += 1
            if item.state is not None:
                stands[item.state[0]] = item.state
                keep(num_given, ((self.turn + number) % readers, tuple(stands.values())))
            if num_given > before:
                yield item
            if num_given == self.most and self.readers:
                break
        if num_given <= before and spare is not None:
            yield spare
        elif num_given <= before and self.plan.world_size == 1 and self.readers:
            raise DataError(f"{self.recipe.key}: {self._name(0)} gave no batch in epoch {self.epoch}")


def continues_previous_pass(source: Any) -> bool | None:
    """Return whether a pass over the source begins where the previous pass stopped. None: it cannot be measured.

    It cannot be measured without child processes, or if the first samples take too long. A child process reads the
    first samples of one pass, half as many of a second pass, and the first samples of a third pass. It compares several
    samples, because a single one may be equal by chance. It reads half of the second pass, because some sources restart
    only at their end. All passes begin with the same random states. Pipes and sockets are empty in the child, because
    their content can be read only once. A source that cannot be read in the child, or that has `state_dict`, counts as
    one that starts again.
    """
    if can_report_position(source):
        return False
    if not can_fork_safely():
        return False if hasattr(source, "set_epoch") else None

    def compare_passes() -> bool:
        end_pipes_and_sockets()
        first = hash_first_samples(source, PASS_SAMPLES, PASS_SECONDS / 4)
        half = max(1, len(first) // 2)
        others = [hash_first_samples(source, number, PASS_SECONDS) for number in (half, len(first))]
        return any(first[: len(other)] != other for other in others)

    try:
        return run_in_child(compare_passes, PASS_SECONDS, computes=False)
    except ChildTimeout:
        return None
    except ANY_FAULT:  # the run reads it too, and reports what is wrong
        return False


def hash_first_samples(source: Any, number: int, seconds: float) -> list[str]:
    """Return digests of the first `number` samples of a pass over epoch 0, or of fewer after a time limit."""
    seed_globals(0)
    if hasattr(source, "set_epoch"):
        source.set_epoch(0)
    digests: list[str] = []
    until = time.monotonic() + seconds
    for sample in islice(source, number):
        digests.append(hash_samples([sample]))
        if time.monotonic() > until:
            break
    return digests


class CheckSameSamples(BatchesWrapper):
    """Training batches that the ranks divide. The samples of the first batch are compared once between the ranks.

    If a rank cannot read its first batch, it still joins the comparison before it raises the error. Otherwise the other
    ranks would wait for it.
    """

    def __init__(self, batches: Batches, gather: Callable[[Any], list[Any]], key: str) -> None:
        super().__init__(batches)
        self._gather, self._key, self._digests = gather, key, [""]
        self._asked = False

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        batches, first = self._batches.epoch(epoch, start), None
        if not self._asked:
            self._asked = True
            try:
                first = next(batches, None)
            finally:
                self._digests = self._gather("" if first is None else first.whole)
        check_same_digests(self._digests, self._key)  # a trial before the training may have caught it
        if first is not None:
            yield first
        yield from batches


class EvenBatches(BatchesWrapper):
    """The batches of a rank, with fillers at the end if another rank has more batches.

    gather: returns the values of all ranks on every rank; called once for each batch.
    """

    def __init__(self, batches: Batches, gather: Callable[[Any], list[Any]], key: str) -> None:
        super().__init__(batches)
        self._gather, self._key = gather, key

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        batches = self._batches.epoch(epoch, start)
        mine = next(batches, None)
        filler, goes_on = mine, any(self._gather(mine is not None and mine.real))
        if not goes_on:
            raise DataError(f"{self._key}: no rank has a batch from batch {start} of epoch {epoch} on")
        if not all(self._gather(mine is not None)):  # a part is empty: another rank's batch stands in
            filler = next(batch for batch in (mine, *self._gather(mine)) if batch is not None)
        while goes_on:
            following = next(batches, None) if mine is not None and not mine.last else None
            goes_on = any(self._gather(following is not None and following.real))
            filler = mine or filler
            assert filler is not None
            yield filler._replace(real=mine is not None and mine.real, last=not goes_on)
            mine = following


def can_report_position(source: Any) -> bool:
    """Return whether a source can report its position and continue from there.

    A shuffling stream of `datasets` cannot: its state does not hold the samples in its buffer.
    """
    part = getattr(source, "_ex_iterable", None)
    while part is not None and type(part).__name__ != "BufferShuffledExamplesIterable":
        part = getattr(part, "ex_iterable", None)
    return part is None and isinstance(source, KeepsState)


def has_parts(source: Any, number: int) -> bool:
    """Return whether `number` readers can each read a part. A source with fewer shards, or with a length, is read
    whole.
    """
    shard, shards = getattr(source, "shard", None), getattr(source, "num_shards", number)
    return (
        has_parameter(shard, "num_shards")
        and has_parameter(shard, "index")
        and not hasattr(source, "__len__")
        and shards >= number
    )


def count_most_readers(source: Any, world_size: int) -> int | None:
    """Return how many workers of each rank can read a source; None if its samples are read by number."""
    if not isinstance(source, IterableDataset):
        return None
    most = getattr(source, "num_shards", 4 * world_size) // world_size
    return most if most and has_parts(source, most * world_size) else 1


def hide_worker() -> None:
    """Hide the loader worker from the source, which could otherwise divide its part again."""
    module: Any = getattr(torch.utils.data._utils, "worker", None)
    if not hasattr(module, "_worker_info"):
        raise DataError(
            "data.num_workers: this version of torch cannot read parts in several workers; use 0 or 1"
        )
    module._worker_info = None


def mark_last(batches: Iterator[LoadedBatch]) -> Iterator[LoadedBatch]:
    """Yield the batches and mark the last one. Each batch is held back until the next batch exists."""
    waiting = next(batches, None)
    for batch in batches:
        assert waiting is not None
        yield waiting
        waiting = batch
    if waiting is not None:
        yield waiting._replace(last=True)
