"""The ranks of one machine share a cache in memory; whoever cannot has one of his own, and no batch changes."""

import multiprocessing

import pytest
import torch
from cache_sources import Made, reads_in

from trainrun.data.cache import shared
from trainrun.data.cache.cached import open_cache
from trainrun.data.engines.in_memory import ResidentBatches
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions

pytestmark = pytest.mark.process

FORK = multiprocessing.get_context("fork")
NUMBER = 40


def run_ranks(work, number=2):
    """What `work(rank, gather)` gave in each of so many processes."""
    pipes = [FORK.Pipe() for _ in range(number)]

    def child(rank):
        end = pipes[rank][1]

        def gather(value):
            end.send(("all", value))
            return end.recv()

        end.send(("done", work(rank, gather)))

    processes = [FORK.Process(target=child, args=(rank,)) for rank in range(number)]
    for process in processes:
        process.start()
    try:
        while True:
            assert all(pipe[0].poll(20) for pipe in pipes), "a rank has died or does not take part"
            told = [pipe[0].recv() for pipe in pipes]
            if told[0][0] == "done":
                return [value for _, value in told]
            for pipe in pipes:
                pipe[0].send([value for _, value in told])
    finally:
        for process in processes:
            process.join(2)
            process.kill()


def options(rank=0, gather=None, **changes):
    words = {"num_workers": 0, "rank": rank, "world_size": 2, "gather": gather} | changes
    return StreamOptions("data.train", training=True, batch_size=4, seed=3, **words)


def two_epochs(source, words, gather):
    """The batches, whether it ended as a resident set, the lines of the start, and the most reads of a sample."""
    stream, lines = open_batches(source, words)
    if gather is not None:
        gather(None)
    before, found = reads_in(source.log) if source.log else {}, []
    for epoch in (0, 1):
        found.append(
            [[b.indices.tolist(), [part.tolist() for part in b.data], b.real] for b in stream.epoch(epoch)]
        )
        if gather is not None:
            gather(None)  # as the steps of training do
    after = reads_in(source.log) if source.log else {}
    most = max((number - before.get(index, 0) for index, number in after.items()), default=0)
    return found, type(getattr(stream, "_batches", stream)) is ResidentBatches, lines, most


def plain(rank):
    return two_epochs(Made(num_samples=NUMBER), options(rank), None)[0]


@pytest.mark.parametrize("cache", ["memory", "pool:1MB"])
def test_both_fill_one_cache_and_read_nothing_twice(cache, tmp_path):
    def work(rank, gather):
        return two_epochs(Made(num_samples=NUMBER, log=tmp_path), options(rank, gather, cache=cache), gather)

    for rank, (batches, resident, lines, most) in enumerate(run_ranks(work)):
        assert batches == plain(rank)
        assert resident
        assert "one for 2 ranks" in lines
        assert most == 0


REFUSALS = {
    "another user": ("open_address", lambda rank: lambda address: None),
    "another machine": ("identify_file", lambda rank: lambda fd: (f"machine {rank}", rank, fd)),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_who_cannot_share_has_a_cache_of_his_own(why, monkeypatch):
    name, made = REFUSALS[why]

    def work(rank, gather):
        monkeypatch.setattr(shared, name, made(rank))
        return two_epochs(Made(num_samples=NUMBER), options(rank, gather, cache="memory"), gather)

    for rank, (batches, resident, lines, _) in enumerate(run_ranks(work)):
        assert batches == plain(rank)
        assert resident
        assert "cache in memory" in lines
        assert "ranks" not in lines


def test_other_samples_stay_apart():
    def work(rank, gather):
        source = Made("tensor" if rank == 4 else "pair", num_samples=NUMBER, shift=rank // 2)
        kept = open_cache(source, "memory", "data.train", gather=gather)
        kept[rank]
        gather(None)
        same = [
            torch.equal(kept[i][0], source[i][0]) for i in range(NUMBER) if kept.is_cached(i) and rank < 4
        ]
        return kept.count_cached_samples(), all(same), kept.note

    found = run_ranks(work, 5)
    assert [number for number, _, _ in found] == [NUMBER] * 5
    assert all(same for _, same, _ in found)
    assert ["ranks" in note for _, _, note in found] == [True] * 4 + [False]
