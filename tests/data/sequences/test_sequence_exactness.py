"""Loss and gradients of every mode equal the unpadded reference, sequence by sequence, in float64."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from trainrun.data.order.sampler import Plan
from trainrun.data.sequences.choose import plan_sequences
from trainrun.data.sequences.collate import PackCollate, PadCollate
from trainrun.data.stream_options import StreamOptions
from trainrun.task.classification import Classification
from trainrun.task.regression import Regression
from trainrun.tensors import segment_mask

pytestmark = pytest.mark.usefixtures("read_here")

NUM_TOKENS, WIDTH, CLASSES, LONGEST = 11, 8, 11, 9
POISON = NUM_TOKENS  # a token of its own, whose embedding is huge
MODES = [
    {"padding": "longest"},
    {"padding": "longest", "pad_multiple": 4},
    {"padding": "max", "max_sequence_length": 12},
    {"padding": "bucket"},
    {"padding": "token_budget", "max_tokens": 30},
]  # fmt: skip
PACKS = [{"padding": "pack"}, {"padding": "pack", "max_sequence_length": 20, "pad_multiple": 8}]


class Attention(nn.Module):
    """One causal layer; a row's segments see nothing of each other, and nobody sees padding."""

    def __init__(self, causal=True, pools=False):
        super().__init__()
        self.causal, self.pools = causal, pools
        self.tokens = nn.Embedding(NUM_TOKENS + 1, WIDTH)
        self.positions = nn.Embedding(32, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs, attention_mask=None, segment_ids=None, position_ids=None):
        packed = segment_ids is not None
        if not packed:
            segment_ids = torch.ones_like(inputs) if attention_mask is None else attention_mask.long()
        if position_ids is None:
            position_ids = torch.arange(inputs.shape[1]).expand_as(inputs)
        x = self.tokens(inputs) + self.positions(position_ids)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + scaled_dot_product_attention(q, k, v, attn_mask=segment_mask(segment_ids, self.causal))[:, 0]
        if not self.pools:
            return self.out(x).movedim(-1, 1)
        slots = int(segment_ids.max())
        member = nn.functional.one_hot(segment_ids, slots + 1)[..., 1:].to(x.dtype)  # (B, T, S)
        mean = torch.einsum("bts,btd->bsd", member, x) / member.sum(1).clamp(min=1)[..., None]
        logits = self.out(mean).movedim(-1, 1)  # (B, C, S)
        return logits if packed else logits[..., 0]


class Recurrent(nn.Module):
    """Bidirectional, so that padding on the right would be seen."""

    def __init__(self, pools=False):
        super().__init__()
        self.pools = pools
        self.tokens = nn.Embedding(NUM_TOKENS + 1, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, inputs, attention_mask=None):
        mask = torch.ones_like(inputs, dtype=torch.bool) if attention_mask is None else attention_mask
        packed = pack_padded_sequence(self.tokens(inputs), mask.sum(1).cpu(), True, enforce_sorted=False)
        states, (last, _) = self.lstm(packed)
        if self.pools:
            return self.out(torch.cat([last[0], last[1]], 1))
        x, _ = pad_packed_sequence(states, True, total_length=inputs.shape[1])
        return self.out(x).movedim(-1, 1)


class Pairs:
    """Next-token pairs, or sequences with a label."""

    def __init__(self, labelled=False, num=23):
        random = np.random.default_rng(0)
        texts = [
            torch.from_numpy(random.integers(0, NUM_TOKENS, size))
            for size in random.integers(2, LONGEST + 2, num)
        ]
        self.samples = [(t[:-1], t[1:]) if not labelled else (t[:-1], t[-1]) for t in texts]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def poisoned(model):
    torch.manual_seed(0)
    model = model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        model.tokens.weight[POISON] = 1e6
    return model


def gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def reference(model, source, indices=None):
    """Loss, items and gradients of one sequence after the other, none of them padded."""
    model = copy.deepcopy(model)
    total, items = 0.0, 0
    for index in range(len(source)) if indices is None else indices:
        inputs, target = source[index]
        loss = cross_entropy(model(inputs[None]), target[None], reduction="sum")
        loss.backward()
        total, items = total + loss.item(), items + target.numel()
    return total, items, gradients(model)


def stream(source, batch_size=5, **options):
    found = plan_sequences(
        source, Plan(len(source), batch_size, seed=1), StreamOptions("data.train", True, 1, 1, **options)
    )
    for share in found.plan.iterate_rank_batches(1, 0):
        yield share.indices, found.collate, [found.source[index] for index in share.indices.tolist()]


def with_poison(collate, value=POISON):
    fields = {name: getattr(collate, name) for name in collate.__dataclass_fields__}
    return type(collate)(**fields | {"padding_value": value})


def trained(model, source, poison, **options):
    model, task = copy.deepcopy(model), Classification()
    total, items = 0.0, 0
    for _, collate, samples in stream(source, **options):
        batch = (with_poison(collate) if poison else collate)(samples)
        loss = task.step(model, batch).loss_sum
        loss.backward()
        total, items = total + loss.item(), items + task.count(batch)
    return total, items, gradients(model)


def assert_equal(found, wanted):
    assert found[1] == wanted[1]
    assert abs(found[0] - wanted[0]) < 1e-10 * max(1, abs(wanted[0]))
    for mine, theirs in zip(found[2], wanted[2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("poison", [False, True], ids=["", "poison"])
@pytest.mark.parametrize("labelled", [False, True], ids=["tokens", "labels"])
@pytest.mark.parametrize("make", [Attention, Recurrent])
@pytest.mark.parametrize("options", MODES, ids=str)
def test_padded_batches_equal_the_reference(options, make, labelled, poison):
    source, model = Pairs(labelled), poisoned(make(pools=labelled))
    assert_equal(trained(model, source, poison, **options), reference(model, source))


@pytest.mark.parametrize("poison", [False, True], ids=["", "poison"])
@pytest.mark.parametrize("labelled", [False, True], ids=["tokens", "labels"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", PACKS, ids=str)
def test_packs_equal_the_reference(options, causal, labelled, poison):
    source, model = Pairs(labelled), poisoned(Attention(causal, labelled))
    assert_equal(trained(model, source, poison, batch_size=2, **options), reference(model, source))


def test_split_next_token_pairs_keep_every_target():
    source, model = Pairs(), poisoned(Attention())
    pieces = [(a[i : i + 4], b[i : i + 4]) for a, b in source.samples for i in range(0, len(a), 4)]
    found = trained(model, source, True, padding="bucket", max_sequence_length=4, truncate="split")
    assert_equal(found, reference(model, pieces))
    assert found[1] == sum(len(target) for _, target in source.samples)


@pytest.mark.parametrize("left", [False, True])
def test_cut_sequences_equal_the_reference_of_cut_ones(left):
    source, model = Pairs(), poisoned(Attention())
    part = slice(-3, None) if left else slice(3)
    cut = [(inputs[part], target[part]) for inputs, target in source.samples]
    options = {"max_sequence_length": 3, "truncate": "left" if left else "right"}
    for padding in ("longest", "pack"):
        assert_equal(
            trained(model, source, True, padding=padding, batch_size=2, **options), reference(model, cut)
        )


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("loss", ["mse", "mae", nn.SmoothL1Loss()], ids=["mse", "mae", "own"])
def test_sequences_of_targets_count_their_own_positions(loss, whole):
    """Also where a real whole number is -100, which padding is filled with."""
    torch.manual_seed(0)
    samples = [(torch.randn(size, 3).double(), -100 * torch.randn(size, 2).double()) for size in (4, 1, 3)]
    samples = [(x, y.long().clamp(min=-100) if whole else y) for x, y in samples]
    model, task = nn.Linear(3, 2).double(), Regression(loss)
    batch = PadCollate(("inputs", "target"), padding_value=1e9)(samples)
    assert task.count(batch) == 3
    out = task.step(model, batch)
    single = [Regression(loss).step(model, tuple(part[None] for part in sample)) for sample in samples]
    assert abs(out.loss_sum - sum(item.loss_sum for item in single)) < 1e-10
    assert abs(out.sums["mae"]() - sum(item.sums["mae"]() for item in single)) < 1e-10


def test_poison_reaches_what_does_not_mask():
    """The guard of the tests above: without its mask the model does notice the padding."""
    source, model = Pairs(), poisoned(Attention(causal=False))
    batch = with_poison(PadCollate(("inputs", "target")))([source[0], source[1], source[2]])
    blind = Classification().step(model, tuple(part.clone() for part in batch)).loss_sum
    assert abs(blind.item() - reference(model, source, [0, 1, 2])[0]) > 1
    assert isinstance(with_poison(PackCollate(("inputs",), 4)), PackCollate)
