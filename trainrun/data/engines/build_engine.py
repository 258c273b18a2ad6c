"""From a prepared source to a stream: the engines behind one door, and what they need before they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainrun.data.bad_samples import Skips
from trainrun.data.batch import map_leaves
from trainrun.data.engines.batch_reader import BatchReader, Key, Recipe
from trainrun.data.engines.choice import Choice, EngineFacts, describe_workers
from trainrun.data.engines.device_feed import fed
from trainrun.data.engines.in_memory import ResidentBatches
from trainrun.data.engines.loader import LoaderBatches
from trainrun.data.engines.threads import ThreadBatches, ThreadOptions
from trainrun.data.engines.workers import WorkerOptions
from trainrun.data.order.sampler import StreamPlan
from trainrun.data.scale import Scale
from trainrun.errors import DataError
from trainrun.interfaces import Batches
from trainrun.runtime.free_memory import MemoryLoad, check_fits, roomy, too_much
from trainrun.seeding import kept_random_state

if TYPE_CHECKING:
    from trainrun.data.stream_options import StreamOptions


@dataclass(frozen=True)
class PreparedStream:
    """A map-style or in-memory source on its way to an engine.

    dataset: read sample by sample, or `Columns`. plan: which samples form which batch; of
    `trainrun.data.order.sampler.Plan`, or of another with its methods. facts: what the choice of an engine
    depends on. notes: lines for the start. scale: of the batches. positions: as in `SequencePlan`.
    """

    dataset: Any
    plan: StreamPlan
    recipe: Recipe
    facts: EngineFacts
    notes: tuple[str, ...] = ()
    scale: Scale | None = None
    positions: Mapping[str, float] = field(default_factory=dict)

    @property
    def reader(self) -> BatchReader:
        return BatchReader(self.dataset, self.recipe)


def build_engine(prepared: PreparedStream, options: StreamOptions, engine: str, number: int) -> Batches:
    """A stream of one engine, its batches on the device."""
    plan, facts = prepared.plan, prepared.facts
    if engine == "resident":
        assert facts.columns is not None
        return ResidentBatches(facts.columns, plan, facts.preparation, options.device, options.sizes)
    dataset = prepared.dataset if facts.columns is None else facts.columns.on_host()
    reader = BatchReader(dataset, prepared.recipe)
    skips = Skips(options.key, options.max_skipped_fraction, options.report, plan.num_seen / plan.world_size)
    batches: Batches
    if engine == "threads":
        pin_for = options.device if _pins(options) else None
        threads = ThreadOptions(number, options.prefetch_factor, options.timeout_seconds, pin_for)
        batches = ThreadBatches(reader, plan, threads, skips, options.key)
    else:
        workers = worker_options(number, options)
        batches = LoaderBatches(reader, plan, workers, skips, options.seed, options.key, options.report)
    return fed(batches, options.device, options.copying, options.sizes)


def fitting_choice(choice: Choice, prepared: PreparedStream, options: StreamOptions) -> Choice:
    """Fewer workers where they were not asked for and so many cannot run here; else DataError."""
    load = load_of(prepared, options)
    if load is None:
        return choice
    if options.num_workers != "auto":
        check_fits(load._replace(workers=choice.number))
        return choice
    number = choice.number
    while too_much(load._replace(workers=number)):
        number -= 1
    if number == choice.number:
        return choice
    return Choice(
        "workers", number, f"{describe_workers(number)} (more do not fit: see /dev/shm and ulimit -n)"
    )


def load_of(prepared: PreparedStream, options: StreamOptions) -> MemoryLoad | None:
    """What a worker's batch needs, told from one sample; None if there is room for any, or it is not read."""
    if roomy():
        return None
    reader = BatchReader(prepared.dataset, replace(prepared.recipe, skips=False)).copy()
    try:
        with kept_random_state():
            data = reader.read(Key(0, [0], True, False)).data
    except DataError:  # it is raised, or the sample left out, when its turn comes
        return None
    sizes: list[int] = []
    map_leaves(data, lambda leaf: sizes.append(leaf.nbytes) if isinstance(leaf, Tensor) else None)
    return MemoryLoad(0, options.prefetch_factor, sum(sizes) * options.batch_size, len(sizes))


def trial(prepared: PreparedStream) -> list[int]:
    """Samples that are read before the run, to see whether that draws from the global generators."""
    number = len(prepared.dataset)
    return sorted({0, number // 2, number - 1})


def _pins(options: StreamOptions) -> bool:
    return options.pin_memory and options.device.type == "cuda"


def worker_options(number: int, options: StreamOptions) -> WorkerOptions:
    return WorkerOptions(number, _pins(options), options.persistent_workers, options.prefetch_factor,
                         options.timeout_seconds)  # fmt: skip
