import random
from itertools import chain

import pytest
import torch
from approved import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.data.order.sampler import Plan, apply_limit, compute_epoch_order
from trainrun.errors import DataError

SMALL = settings(derandomize=True, deadline=None, max_examples=150)
counts = st.integers(1, 60)
batch_sizes = st.integers(1, 9)
worlds = st.integers(1, 5)


def plans(world_size: int, **fields) -> list[Plan]:
    return [Plan(rank=rank, world_size=world_size, **fields) for rank in range(world_size)]


def shares(plan: Plan, epoch: int = 0, start: int = 0) -> list[tuple[list[int], bool, bool]]:
    return [
        (share.indices.tolist(), share.real, share.last) for share in plan.iterate_rank_batches(epoch, start)
    ]


def joined(lists) -> list[int]:
    return list(chain.from_iterable(lists))


def global_batches(ranks: list[Plan], epoch: int) -> list[list[int]]:
    streams = [shares(plan, epoch) for plan in ranks]
    return [joined(indices for indices, real, _ in row if real) for row in zip(*streams, strict=True)]


@SMALL
@given(counts, batch_sizes, worlds, st.booleans(), st.booleans(), st.integers(0, 3))
def test_an_epoch_is_every_sample_once(n, batch_size, world_size, shuffle, drop_last, epoch):
    ranks = plans(world_size, num_samples=n, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    seen = joined(global_batches(ranks, epoch))
    order = compute_epoch_order(n, 0, epoch, shuffle).tolist()
    kept = n - n % (batch_size * world_size) if drop_last else n
    assert seen == order[:kept]
    assert sorted(order) == list(range(n))
    assert ranks[0].num_seen == kept


@SMALL
@given(counts, batch_sizes, worlds, st.booleans(), st.booleans())
def test_ranks_see_the_global_batches_of_one_rank(n, batch_size, world_size, shuffle, drop_last):
    fields = {"num_samples": n, "shuffle": shuffle, "drop_last": drop_last, "seed": 5}
    one = Plan(batch_size=batch_size * world_size, **fields)
    ranks = plans(world_size, batch_size=batch_size, **fields)
    assert global_batches(ranks, 1) == [indices for indices, _, _ in shares(one, 1)]
    assert {plan.num_batches for plan in ranks} == {one.num_batches}


@SMALL
@given(counts, batch_sizes, worlds)
def test_ranks_train_the_micro_batches_of_one_process(n, batch_size, world_size):
    fields = {"num_samples": n, "batch_size": batch_size, "shuffle": True}
    rows = list(zip(*[shares(plan) for plan in plans(world_size, **fields)], strict=True))
    one = Plan(**fields)
    assert [indices for row in rows for indices, real, _ in row if real] == [
        share[0] for share in shares(one)
    ]
    assert all(real or indices == row[0][0] for row in rows for indices, real, _ in row)


@SMALL
@given(counts, batch_sizes, worlds)
def test_ranks_share_an_evaluation_evenly(n, batch_size, world_size):
    fields = {"num_samples": n, "batch_size": batch_size, "shuffle": True}
    evaluation = [shares(plan) for plan in plans(world_size, training=False, **fields)]
    counts = [len(joined(indices for indices, _, _ in rank)) for rank in evaluation]
    assert max(counts) - min(counts) <= 1
    assert sorted(joined(indices for rank in evaluation for indices, _, _ in rank)) == list(range(n))
    assert all(real for rank in evaluation for _, real, _ in rank)


@SMALL
@given(counts, batch_sizes, worlds, st.booleans(), st.data())
def test_any_start_is_the_tail(n, batch_size, world_size, training, data):
    rank = data.draw(st.integers(0, world_size - 1))
    plan = Plan(n, batch_size, training=training, rank=rank, world_size=world_size)
    start = data.draw(st.integers(0, plan.num_batches - 1))
    assert shares(plan, 2, start) == shares(plan, 2)[start:]


@SMALL
@given(counts, batch_sizes, worlds, st.booleans(), st.sampled_from([1.0, 0.5, 0.1, 1, 3]))
def test_the_last_batch_and_no_other_is_marked(n, batch_size, world_size, training, limit):
    for plan in plans(world_size, num_samples=n, batch_size=batch_size, training=training, limit=limit):
        marks = [last for _, _, last in shares(plan)]
        assert marks == [False] * (len(marks) - 1) + [True] * bool(marks)
        if training:
            assert len(marks) == plan.num_batches


def test_more_batches_than_are_cut_at_once(monkeypatch):
    monkeypatch.setattr("trainrun.data.order.sampler.ROWS_AT_ONCE", 4)
    plan = Plan(23, 2)
    assert joined(indices for indices, _, _ in shares(plan)) == compute_epoch_order(23, 0, 0, True).tolist()


def test_order_depends_on_seed_and_epoch_and_leaves_the_global_generator():
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    orders = [compute_epoch_order(50, seed, epoch, True).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert compute_epoch_order(50, 1, 1, True).tolist() == orders[3]
    assert compute_epoch_order(5, 1, 1, False).tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize(
    ("full", "limit", "left"),
    [(100, 1.0, 100), (100, 0.29, 29), (10, 0.01, 1), (3, 0.5, 1), (10, 1, 1), (10, 4, 4), (10, 40, 10)],
)
def test_limit(full, limit, left):
    assert apply_limit(full, limit) == left


@pytest.mark.parametrize("start", [5, 9])
def test_a_start_behind_the_end_is_refused(start):
    with refused(DataError, str(start), "5 batches"):
        Plan(10, 2).iterate_rank_batches(0, start)
