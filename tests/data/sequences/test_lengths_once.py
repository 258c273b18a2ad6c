"""Lengths that have to be read are read by rank 0 alone, with a line where it takes long; a fault reaches all."""

import threading

import numpy as np
import torch

from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

LENGTHS = [3, 9, 4, 7, 2, 8, 5, 6, 10, 3, 4, 12]
READ_BY_A_LOOK = 8


class Text:
    """Writes down which samples are read, in any process; `breaks` cannot be read."""

    def __init__(self, breaks=-1, log=None):
        self.breaks, self.log = breaks, log

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        if self.log is not None:
            (self.log / str(index)).touch()
        if index == self.breaks:
            raise OSError("damaged")
        return torch.arange(LENGTHS[index])


class Knowing(Text):
    lengths = np.array(LENGTHS)


class Ranks:
    """`gather` among threads that stand for ranks."""

    def __init__(self, number):
        self.values = [None] * number
        self.gathered = 0
        self.barrier = threading.Barrier(number, timeout=30)

    def of(self, rank):
        def gather(value):
            self.values[rank] = value
            self.gathered += rank == 0
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return gather


def opened_by_all(sources, **changes):
    """What each rank got: its stream, or its fault."""
    ranks, found = Ranks(len(sources)), [None] * len(sources)

    def work(rank):
        options = StreamOptions(
            "data.train", training=True, batch_size=2, seed=1, padding="bucket", num_workers=0, engine="workers",
            rank=rank, world_size=len(sources), gather=ranks.of(rank), **changes,
        )  # fmt: skip
        try:
            found[rank] = open_batches(sources[rank], options)
        except DataError as error:
            found[rank] = error

    # torch's and NumPy's generators belong to the process, so the ranks must not seed them at the same time
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, ranks


def test_rank_0_reads_and_the_others_are_told(tmp_path):
    sources = [Text(log=tmp_path / str(rank)) for rank in range(3)]
    for source in sources:
        source.log.mkdir()
    found, ranks = opened_by_all(sources)
    numbers = [len(list(source.log.iterdir())) for source in sources]
    assert numbers == [len(LENGTHS), READ_BY_A_LOOK, READ_BY_A_LOOK]
    assert ranks.gathered == 1
    alone = StreamOptions("data.train", training=True, batch_size=2, seed=1, padding="bucket", num_workers=0,
                          engine="workers", rank=2, world_size=3)  # fmt: skip
    expected, line = open_batches(Text(), alone)
    assert found[2][1].split("padding")[1].split(";")[0] == line.split("padding")[1].split(";")[0]
    for one, other in zip(found[2][0].epoch(1), expected.epoch(1), strict=True):
        assert torch.equal(one.indices, other.indices)
        assert str(one.data) == str(other.data)


def test_a_source_that_knows_is_asked_by_each():
    _, ranks = opened_by_all([Knowing(), Knowing()])
    assert ranks.gathered == 0


def test_a_fault_reaches_all_ranks():
    found, _ = opened_by_all([Text(breaks=7), Text(breaks=7)])
    assert [type(one) for one in found] == [DataError, DataError]
    assert str(found[0]) == str(found[1])
    assert "sample 7 of Text cannot be read" in str(found[1])
