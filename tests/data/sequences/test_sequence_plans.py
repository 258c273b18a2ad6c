"""Every sample once, the same global batches on any number of ranks, any start is the tail."""

import numpy as np
import pytest
import torch
from approved import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import global_batches, joined, shares

from trainrun.data.order.sampler import Plan
from trainrun.data.sequences.choose import plan_sequences
from trainrun.data.sequences.collate import place_in_rows
from trainrun.data.stream_options import StreamOptions
from trainrun.errors import DataError

pytestmark = pytest.mark.usefixtures("read_here")

SMALL = settings(derandomize=True, deadline=None, max_examples=40)
MODES = ("longest", "max", "bucket", "pack", "token_budget")
LONGEST = 12
BUDGET = 24
many_lengths = st.lists(st.integers(1, LONGEST), min_size=2, max_size=70)
modes = st.sampled_from(MODES)


class Tokens:
    """Sample i is `lengths[i]` times the token i."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((int(self.lengths[index]),), index)


def options_of(mode, **changes):
    budget = BUDGET if mode == "token_budget" else None
    return StreamOptions(
        **{
            "key": "data.train",
            "training": True,
            "batch_size": 1,
            "seed": 1,
            "padding": mode,
            "max_tokens": budget,
        }
        | changes
    )


def planned(lengths, mode, batch_size=3, training=True, **changes):
    names = ("truncate", "max_sequence_length", "pad_multiple", "max_tokens")
    own = {name: changes.pop(name) for name in names if name in changes}
    base = Plan(len(lengths), batch_size, shuffle=training, training=training, **changes)
    return plan_sequences(Tokens(lengths), base, options_of(mode, training=training, **own))


def plan_or_skip(lengths, mode, **changes):
    """None where the data does not fill one batch, or has one length."""
    try:
        found = planned(lengths, mode, **changes)
    except DataError as error:
        if "larger than the data" not in str(error):
            raise
        return None
    return found and found.plan


@SMALL
@given(many_lengths, modes, st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 2))
def test_an_epoch_is_every_sample_once_on_any_ranks(lengths, mode, batch_size, world_size, drop_last, epoch):
    fields = {"batch_size": batch_size, "drop_last": drop_last, "world_size": world_size, "seed": 3}
    plans = [plan_or_skip(lengths, mode, rank=rank, **fields) for rank in range(world_size)]
    if plans[0] is None:
        return
    seen = joined(global_batches(plans, epoch))
    assert len(set(seen)) == len(seen)
    if not drop_last or mode == "token_budget":
        assert sorted(seen) == list(range(len(lengths)))
        assert plans[0].num_seen == len(seen)
    elif mode != "pack":
        assert len(seen) == plans[0].num_seen == len(lengths) - len(lengths) % (batch_size * world_size)
    assert {len(shares(plan, epoch)) for plan in plans} == {plans[0].num_batches}


@SMALL
@given(many_lengths, modes, st.integers(1, 3), st.integers(2, 3), st.booleans())
def test_ranks_see_the_global_batches_of_one_rank(lengths, mode, batch_size, world_size, drop_last):
    fields = {"drop_last": drop_last, "seed": 5}
    one = plan_or_skip(
        lengths, mode, batch_size=batch_size * world_size,
        max_tokens=BUDGET * world_size if mode == "token_budget" else None, **fields,
    )  # fmt: skip
    if one is None:
        return
    plans = [
        plan_or_skip(lengths, mode, batch_size=batch_size, rank=rank, world_size=world_size, **fields)
        for rank in range(world_size)
    ]
    for epoch in (0, 1):
        together = [sorted(batch) for batch in global_batches(plans, epoch)]
        assert together == [sorted(indices) for indices, _, _ in shares(one, epoch)]
    assert one.num_seen == plans[0].num_seen


@SMALL
@given(many_lengths, modes, st.integers(1, 4), st.integers(1, 3), st.booleans(), st.data())
def test_any_start_is_the_tail_and_the_last_is_marked(lengths, mode, batch_size, world_size, training, data):
    rank = data.draw(st.integers(0, world_size - 1))
    limit = data.draw(st.sampled_from([1.0, 0.5, 2]))
    plan = plan_or_skip(
        lengths, mode, batch_size=batch_size, rank=rank, world_size=world_size, training=training, limit=limit
    )
    if plan is None:
        return
    whole = shares(plan, 2)
    assert [last for _, _, last in whole] == [False] * (len(whole) - 1) + [True] * bool(whole)
    if training:
        assert len(whole) == plan.num_batches
        start = data.draw(st.integers(0, plan.num_batches - 1))
        assert shares(plan, 2, start) == whole[start:]
        with pytest.raises(DataError, match=f"batch {plan.num_batches} of an epoch"):
            list(plan.iterate_rank_batches(0, plan.num_batches))


@SMALL
@given(many_lengths, modes, st.integers(1, 4), st.integers(1, 3))
def test_evaluation_reads_every_sample_once_in_the_same_order(lengths, mode, batch_size, world_size):
    plans = [
        plan_or_skip(lengths, mode, batch_size=batch_size, training=False, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    if plans[0] is None:
        return
    indices = joined(joined(part for part, _, _ in shares(plan)) for plan in plans)
    assert sorted(indices) == list(range(len(lengths)))
    assert all(real for plan in plans for _, real, _ in shares(plan))
    assert shares(plans[0], 4) == shares(plans[0], 0)


@pytest.mark.parametrize("mode", ["bucket", "pack", "token_budget"])
def test_a_rank_without_a_share_fills(mode):
    lengths = [12, 11, 10, 9, 8, 7, 12]  # rows of one; of the last batch there is one for two ranks
    budget = {"max_tokens": 12} if mode == "token_budget" else {}
    one, other = (shares(planned(lengths, mode, rank=rank, world_size=2, **budget).plan) for rank in range(2))
    fillers = [(here[0], there[0]) for here, there in zip(one, other, strict=True) if not there[1]]
    assert fillers
    assert all(here == there for here, there in fillers)


@pytest.mark.parametrize("mode", ["bucket", "pack", "token_budget"])
def test_epochs_differ_and_a_seed_repeats(mode):
    lengths = np.random.default_rng(0).integers(1, 13, 60).tolist()
    plan = planned(lengths, mode, seed=1).plan
    assert shares(plan, 0) != shares(plan, 1)
    assert shares(plan, 1) == shares(planned(lengths, mode, seed=1).plan, 1)
    assert shares(plan, 1) != shares(planned(lengths, mode, seed=2).plan, 1)
    assert plan.num_batches == len(shares(plan, 0)) == len(shares(plan, 5))


def test_buckets_hold_like_lengths_in_random_order(monkeypatch):
    monkeypatch.setattr("trainrun.data.sequences.plans.MEGA_BATCHES", 5)
    lengths = np.random.default_rng(0).integers(1, 13, 203)
    plan = planned(lengths, "bucket", batch_size=4).plan
    batches = [lengths[indices] for indices, _, _ in shares(plan)]
    assert [len(batch) for batch in batches] == [4] * 50 + [3]
    assert np.mean([np.ptp(batch) for batch in batches]) < 4


def test_the_short_bucket_and_what_drop_last_leaves_out_have_any_length():
    lengths = np.arange(1, 14)
    short = {max(lengths[shares(planned(lengths, "bucket", seed=seed).plan)[-1][0]]) for seed in range(30)}
    assert len(short) > 2
    dropped = set()
    for seed in range(30):
        plan = planned(lengths, "bucket", seed=seed, drop_last=True).plan
        dropped |= set(range(13)) - set(joined(indices for indices, _, _ in shares(plan)))
    assert len(dropped) > 6


@SMALL
@given(many_lengths, st.integers(1, 3), st.integers(1, 4), st.sampled_from([None, 4]))
def test_a_token_budget_holds_with_padding(lengths, world_size, batch_size, multiple):
    plan = plan_or_skip(lengths, "token_budget", batch_size=batch_size, pad_multiple=multiple)
    if plan is None:
        return
    step = multiple or 1
    costs = []
    for indices, _, _ in shares(plan):
        longest = max(lengths[index] for index in indices)
        costs.append(len(indices) * -(-longest // step) * step)
    assert max(costs) <= BUDGET


@SMALL
@given(many_lengths, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_next_fit_finds_the_rows_again(lengths, batch_size, world_size, epoch):
    plans = [
        plan_or_skip(lengths, "pack", batch_size=batch_size, rank=rank, world_size=world_size,
                     max_sequence_length=LONGEST) for rank in range(world_size)
    ]  # fmt: skip
    if plans[0] is None:
        return
    rows = plans[0].rows
    known = {frozenset(rows.group(number).tolist()) for number in range(len(rows))}
    for plan in plans:
        for indices, real, _ in shares(plan, epoch):
            places = place_in_rows([lengths[index] for index in indices], LONGEST)
            found = [
                frozenset(i for i, (row, _) in zip(indices, places, strict=True) if row == number)
                for number in range(places[-1][0] + 1)
            ]
            assert set(found) <= known
            assert len(found) <= batch_size
            assert not real or sum(map(len, found)) == len(indices)


@SMALL
@given(many_lengths, modes, st.integers(3, 9))
def test_dropped_samples_and_no_others_are_left_out(lengths, mode, size):
    options = {"batch_size": 1, "truncate": "drop", "max_sequence_length": size}
    if min(lengths) > size:
        with refused(DataError, "data.train"):
            planned(lengths, mode, **options)
        return
    found = planned(lengths, mode, **options)
    if found is None:
        return
    indices = sorted(joined(part for part, _, _ in shares(found.plan)))
    assert indices == [index for index, length in enumerate(lengths) if length <= size]
    assert found.plan.num_seen == len(indices)


@SMALL
@given(many_lengths, modes, st.integers(3, 9))
def test_split_samples_are_whole_again_together(lengths, mode, size):
    found = planned(lengths, mode, batch_size=1, truncate="split", max_sequence_length=size)
    if found is None:
        return
    indices = joined(part for part, _, _ in shares(found.plan))
    assert sorted(indices) == list(range(len(found.source)))
    pieces = [found.source[index] for index in range(len(found.source))]
    assert max(len(piece) for piece in pieces) <= size
    everything = torch.cat([Tokens(lengths)[index] for index in range(len(lengths))])
    assert torch.equal(torch.cat(pieces), everything)
