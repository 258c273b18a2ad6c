"""The operations of a run, counted: exact where they can be counted by hand, and without moving the run."""

from __future__ import annotations

import exact_parts
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from trainrun.monitor.run_lines import compute_line
from trainrun.summary import at_end
from trainrun.summary.flops import Work, data_sheet_flops, flop_counter, flops_per_item, measure_work


def test_an_mlp_counts_as_by_hand():
    run = exact_parts.parts_of((), batch_size=4)
    first, second = 2 * exact_parts.FEATURES * 9, 2 * 9 * exact_parts.CLASSES
    # Forward; gradients of both weights; the gradient of the hidden units, not of the inputs.
    assert flops_per_item(run) == 2 * first + 3 * second


def test_attention_on_a_cpu_counts_as_its_two_products():
    query = torch.randn(2, 3, 16, 8, requires_grad=True)
    with flop_counter() as counted:
        out = scaled_dot_product_attention(query, query, query, is_causal=True)
        forward = counted.get_total_flops()
        out.sum().backward()
    assert forward == 2 * (2 * 3) * 16 * 16 * (8 + 8)
    assert counted.get_total_flops() == 3.5 * forward  # one of five products of the backward is made anew


@pytest.mark.parametrize("layers", [1, 2])
def test_an_lstm_counts_as_its_weights_at_every_position(layers):
    lstm = nn.LSTM(5, 7, layers, batch_first=True)
    with flop_counter() as counted:
        out, _ = lstm(torch.randn(3, 11, 5, requires_grad=True))
        forward = counted.get_total_flops()
        out.sum().backward()
    weights = sum(weight.numel() for name, weight in lstm.named_parameters() if name.startswith("weight"))
    assert forward == 2 * 3 * 11 * weights
    assert counted.get_total_flops() == 3 * forward


def test_counting_moves_nothing():
    run = exact_parts.parts_of((), batch_size=4)
    run.model.layers.extend([nn.BatchNorm1d(exact_parts.CLASSES), nn.Dropout()])
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    random = torch.get_rng_state()
    work = measure_work(run)
    assert work is not None
    assert work.flops > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_a_model_that_cannot_be_repeated_gives_no_figure():
    run = exact_parts.parts_of((), batch_size=4)
    run.model.layers[0].register_forward_hook(lambda *args: 1 / 0)
    assert measure_work(run) is None


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, 0),
        ("Tesla T4", torch.bfloat16, 0),
        ("Tesla T4", torch.float16, 65e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40", torch.bfloat16, 0),
        ("", torch.bfloat16, 0),
    ],
)
def test_mfu_is_by_the_data_sheet_of_a_known_gpu(name, dtype, peak):
    assert data_sheet_flops(name, dtype) == peak
    facts = at_end.flop_facts(Work(4e9, peak), 1e4)
    assert facts.get("mfu", 0) == (4e13 / peak if peak else 0)
    if peak:
        share = f"{4e15 / peak:.1f} % (of {peak / 1e12:.0f} TFLOP/s, by the data sheet)"
        assert compute_line(facts) == f"40 TFLOP/s, MFU {share}"
