import pytest
import torch
from approved import refused
from torch.utils.data import Dataset

from trainrun.data.bad_samples import SkipCounter
from trainrun.data.facts import describe_source
from trainrun.data.pipeline import open_batches
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

pytestmark = pytest.mark.usefixtures("read_here")

N = 40
EVERY = [{"num_workers": 0}, {"num_workers": 1}, {"engine": "threads", "num_threads": 2}]


class Samples(Dataset):
    thread_safe = True

    def __init__(self, *broken):
        self.broken = broken

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("damaged")
        return torch.tensor(index)

    def describe(self, index):
        return f"{index}.png"


def opened(source, notes=None, **changes):
    fields = {"key": "data.train", "training": True, "batch_size": 4, "seed": 1, "shuffle": False}
    fields |= {"num_workers": 0, "on_error": "skip", "max_skipped_fraction": 0.1}
    report = (lambda text: None) if notes is None else notes.append
    return open_batches(source, StreamOptions(**fields | {"report": report} | changes))[0]


def test_facts_are_those_of_the_first_sample_that_can_be_read():
    skips, raises = (StreamOptions("data.train", True, 1, 0, on_error=how) for how in ("skip", "raise"))
    assert describe_source(Samples(0, 1), options=skips).shape == ()
    for source, options in ((Samples(0), raises), (Samples(*range(N)), skips)):
        with refused(DataError):
            describe_source(source, options=options)


@pytest.mark.process
@pytest.mark.parametrize("engine", EVERY, ids=str)
def test_a_sample_that_cannot_be_read_is_left_out_and_reported_once_an_epoch(engine):
    notes = []
    stream = opened(Samples(5, 21), notes, max_skipped_fraction=0.5, **engine)
    for epoch in (0, 1):
        batches = list(stream.epoch(epoch))
        assert [len(batch.data) for batch in batches] == [4, 3, 4, 4, 4, 3, 4, 4, 4, 4]
        assert sorted(i for b in batches for i in b.data.tolist()) == sorted({*range(N)} - {5, 21})
        assert all(batch.indices.tolist() == batch.data.tolist() for batch in batches)
        assert len(notes) == epoch + 1
    stream.close()
    assert len(notes) == 2
    assert notes[1].startswith(
        "data.on_error=skip: 2 samples were left out of data.train in epoch 1. data.train: sample 5 (5.png) of "
        "Samples cannot be read: OSError: damaged ("
    )
    assert "sample 21 (21.png)" in notes[1]


@pytest.mark.process
@pytest.mark.parametrize("engine", EVERY, ids=str)
def test_more_than_the_share_is_a_fault(engine):
    assert len(list(opened(Samples(0), **engine).epoch(0))) == 10  # one is always allowed
    few = opened(Samples(0, 1, 2, 3), **engine)  # 4 of 40 are a tenth, wherever they are
    assert len(list(few.epoch(0))) == 10
    few.close()
    stream = opened(Samples(0, 1, 2, 3, 5), **engine)
    with refused(DataError, "data.max_skipped_fraction=0.1"):
        list(stream.epoch(0))


def test_in_a_long_epoch_it_is_held_against_the_samples_so_far():
    def failing(number, seen):
        skips = SkipCounter("data.train", 0.01, lambda text: None, samples=1e6, batches=10**6)
        skips.begin(0, seen)
        skips.add(0, ["damaged"] * number)

    failing(10, 0)
    with refused(DataError):
        failing(11, 0)
    failing(21, 2200)
    with refused(DataError):
        failing(23, 2200)


def test_a_resume_is_never_stricter_than_the_run_without_a_stop():
    whole = opened(Samples(29, 30), max_skipped_fraction=0.07)
    assert len(list(whole.epoch(0))) == 10
    assert len(list(whole.epoch(0, 7))) == 3


@pytest.mark.process
@pytest.mark.parametrize("engine", EVERY, ids=str)
def test_a_batch_that_lost_all_samples_is_filled_in_training_and_left_out_in_evaluation(engine):
    broken = Samples(4, 5, 6, 7, 8, 39, *range(36, 40))
    stream = opened(broken, max_skipped_fraction=1.0, **engine)
    batches = list(stream.epoch(0))
    assert [batch.real for batch in batches] == [True, False, *[True] * 7, False]
    assert batches[1].data.tolist() == batches[1].indices.tolist() == [9]  # 8 is broken too
    assert batches[-1].data.tolist() == [0]
    assert [batch.last for batch in batches] == [*[False] * 9, True]
    stream.close()
    evaluation = opened(broken, max_skipped_fraction=1.0, training=False, **engine)
    batches = list(evaluation.epoch(0))
    assert len(batches) == 8
    assert all(batch.real for batch in batches)
    evaluation.close()


def test_faults_of_a_transform_are_skipped_and_those_of_collating_are_not():
    def refuse(sample):
        if sample == 6:
            raise ValueError("too dark")
        return sample

    notes = []
    stream = opened(Samples(), notes, transform=refuse)
    assert sum(len(batch.data) for batch in stream.epoch(0)) == N - 1
    assert "data.transform: sample 6 (6.png) of data.train cannot be transformed: ValueError: too" in notes[0]
    with refused(DataError, "data.transform"):
        list(opened(Samples(), transform=refuse, on_error="raise").epoch(0))


def test_a_transform_of_a_part_is_told_that_it_gets_all():
    pairs = [(torch.ones(3), number) for number in range(4)]
    with refused(DataError):
        list(opened(pairs, transform=lambda picture: torch.roll(picture, 1), on_error="raise").epoch(0))

    def fail(samples):
        raise ValueError("no batch")

    with refused(DataError):
        list(opened(Samples(), collate_fn=fail).epoch(0))


def test_without_a_single_readable_sample():
    with refused(DataError):
        list(opened(Samples(*range(N)), max_skipped_fraction=1.0).epoch(0))
