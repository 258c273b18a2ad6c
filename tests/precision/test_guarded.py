"""Clipping, gradients that are not finite, and the state of the guarded update."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from trainrun.errors import ConfigError, PluginError
from trainrun.optimizer.build_optimizer import start_momentum_at_zero
from trainrun.optimizer.plain_step import build_plain_step
from trainrun.parallel.single import Single
from trainrun.precision.autocast import (
    PrecisionOptions,
    build_precision,
    describe_mode,
    prepare_model,
    set_matmul,
)
from trainrun.precision.update import MAX_OVERFLOWS_IN_A_ROW, MAX_SKIPS_IN_A_ROW, Update
from trainrun.timing.phases import CHECK, RANKS, PhaseTimer

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, Callable[[Any, bool], Optimizer]] = {
    "adamw": lambda params, fused: AdamW(params, lr=0.1, fused=fused),
    "sgd": lambda params, fused: SGD(params, lr=0.1, momentum=0.9, fused=fused),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def feed(precision: Update, model: nn.Module, scale: float = 1.0, seed: int = 0) -> None:
    """Adds gradients; with a `scale` of inf or nan, bad ones."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    with precision.autocast():
        loss_sum = (model(x).float() * scale).square().sum()
    precision.backward(loss_sum, 0.25)


def frozen(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((list(model.state_dict().values()), optimizer.state_dict()["state"]))


def same(left: Any, right: Any) -> bool:
    """Bit by bit."""
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("lazy", [True, False])
def test_stop_leaves_everything_as_it_was_from_the_first_bad_step_on(
    name: str, fused: bool, clip: str | None, lazy: bool
) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters(), fused)
    limit = None if clip is None else 0.5
    precision = Update(model, CPU, clip_value=limit, clip_algorithm=clip or "norm", lazy=lazy)
    for _ in range(2):
        feed(precision, model)
        assert not precision.optimizer_step(optimizer, want_norm=False).skipped
    before = frozen(model, optimizer)
    for scale in (float("nan"), 1.0, 1.0):
        feed(precision, model, scale)
        precision.optimizer_step(optimizer, want_norm=False)
        assert all(param.grad is None for param in model.parameters())
        assert same(frozen(model, optimizer), before)
    assert "trainer.nan_policy=stop" in precision.failure(wait=True)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("lazy", [True, False])
def test_a_bad_first_step_leaves_no_state_behind(name: str, fused: bool, lazy: bool) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters(), fused)
    precision = Update(model, CPU, lazy=lazy)
    start_momentum_at_zero(optimizer)
    before = frozen(model, optimizer)
    feed(precision, model, float("nan"))
    assert precision.optimizer_step(optimizer, want_norm=False).skipped
    assert same(frozen(model, optimizer), before)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_flag_on_the_device_changes_no_good_step(name: str, fused: bool) -> None:
    ends = []
    for lazy in (True, False):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters(), fused)
        precision = Update(model, CPU, clip_value=0.5, lazy=lazy)
        for step in range(4):
            feed(precision, model, seed=step)
            precision.optimizer_step(optimizer, want_norm=step % 2 == 0)
        assert precision.failure(wait=True) == ""
        ends.append(frozen(model, optimizer))
    assert same(*ends)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_equals_a_run_without_the_bad_step(name: str, fused: bool) -> None:
    ends = []
    for scales in ([1.0, float("inf"), 1.0], [1.0, 1.0]):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters(), fused)
        precision = Update(model, CPU, nan_policy="skip", lazy=True)
        skipped = []
        for scale in scales:
            feed(precision, model, scale)
            skipped.append(precision.optimizer_step(optimizer, want_norm=False).skipped)
        assert skipped == [scale == float("inf") for scale in scales]
        assert precision.failure(wait=True) == ""
        ends.append(frozen(model, optimizer))
    assert same(*ends)


def test_skip_gives_up_after_too_many_in_a_row() -> None:
    model = network()
    precision, _ = build_precision(PrecisionOptions(nan_policy="skip"), model, CPU)
    optimizer = SGD(model.parameters(), lr=0.1)
    for scale in [*[float("nan")] * MAX_SKIPS_IN_A_ROW, 1.0, *[float("nan")] * MAX_SKIPS_IN_A_ROW]:
        feed(precision, model, scale)
        precision.optimizer_step(optimizer, want_norm=False)
    assert precision.failure(wait=False) == ""
    feed(precision, model, float("nan"))
    precision.optimizer_step(optimizer, want_norm=False)
    assert f"more than {MAX_SKIPS_IN_A_ROW} steps in a row" in precision.failure(wait=False)


def test_ignore_updates_all_the_same() -> None:
    model = network()
    precision, _ = build_precision(PrecisionOptions(nan_policy="ignore"), model, CPU)
    optimizer = SGD(model.parameters(), lr=0.1)
    feed(precision, model, float("nan"))
    assert not precision.optimizer_step(optimizer, want_norm=False).skipped
    assert all(param.isnan().any() for param in model.parameters())
    assert precision.failure(wait=True) == ""


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("limit", [0.0, 0.05, 1e3])
def test_clipping_is_that_of_torch_and_the_norm_is_from_before(algorithm: str, limit: float) -> None:
    model, reference = network(), network()
    precision, _ = build_precision(PrecisionOptions("32-true", limit, algorithm), model, CPU)
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(reference.parameters(), lr=0.1)
    plain = Update(reference, CPU)
    for step in range(3):
        feed(precision, model, seed=step)
        feed(plain, reference, seed=step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
        if limit and algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
        elif limit:
            torch.nn.utils.clip_grad_value_(reference.parameters(), limit)
        other.step()
        other.zero_grad()
        report = precision.optimizer_step(optimizer, want_norm=True)
        assert report.norm is not None
        assert torch.equal(report.norm, norm)
    assert same(list(model.state_dict().values()), list(reference.state_dict().values()))


def test_gradients_of_two_types_are_clipped_as_one_vector() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2), nn.Linear(2, 2)])
    reference = copy.deepcopy(model)
    for net in (model, reference):
        for at, param in enumerate(net.parameters()):
            param.grad = torch.full_like(param, 1.0 + at)
    precision, _ = build_precision(PrecisionOptions(clip_value=0.5), model, CPU)
    optimizer = SGD(model.parameters(), lr=1.0)
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    SGD(reference.parameters(), lr=1.0).step()
    report = precision.optimizer_step(optimizer, want_norm=True)
    torch.testing.assert_close(report.norm, norm, check_dtype=False)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.grad is None


def test_sparse_gradients_are_checked_clipped_and_measured() -> None:
    model = nn.Embedding(6, 3, sparse=True)
    reference = nn.Embedding(6, 3, _weight=model.weight.detach().clone())
    index = torch.tensor([1, 1, 4])
    precision, _ = build_precision(PrecisionOptions(clip_value=0.5), model, CPU)
    optimizer = SGD(model.parameters(), lr=1.0)
    precision.backward(model(index).sum(), 1.0)
    reference(index).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    SGD(reference.parameters(), lr=1.0).step()
    report = precision.optimizer_step(optimizer, want_norm=True)
    torch.testing.assert_close(report.norm, norm)
    torch.testing.assert_close(model.weight, reference.weight)
    precision.backward((model(index) * float("inf")).sum(), 1.0)
    assert precision.optimizer_step(optimizer, want_norm=False).skipped


def test_parameters_outside_the_optimizer_are_cleared_but_not_counted() -> None:
    model = network()
    precision, _ = build_precision(PrecisionOptions(), model, CPU)
    optimizer = SGD(model[2].parameters(), lr=0.1)
    feed(precision, model)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model[2].parameters()])
    report = precision.optimizer_step(optimizer, want_norm=True)
    assert torch.equal(report.norm, norm)
    assert all(param.grad is None for param in model.parameters())


def test_a_step_without_any_gradient_passes() -> None:
    for mode in ("32-true", "16-mixed"):
        model = network()
        precision, _ = build_precision(PrecisionOptions(mode, clip_value=1.0), model, CPU)
        report = precision.optimizer_step(SGD(model.parameters(), lr=0.1), want_norm=True)
        assert report.norm is not None
        assert report.norm.item() == 0
        assert not report.skipped


@pytest.mark.parametrize("make", [lambda model, x: model(x), lambda model, x: torch.zeros(())])
def test_a_loss_of_the_wrong_kind_is_named(make: Callable[..., Tensor]) -> None:
    model = network()
    precision, _ = build_precision(PrecisionOptions(), model, CPU)
    with refused(PluginError):
        precision.backward(make(model, torch.ones(4, 3)), 0.25)


def test_the_stop_survives_a_resume() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    precision = Update(model, CPU)
    feed(precision, model, float("nan"))
    precision.optimizer_step(optimizer, want_norm=False)
    later = Update(model, CPU)
    later.load_state_dict(precision.state_dict())
    assert later.failure(wait=False) == precision.failure(wait=False) != ""
    later.load_state_dict(Update(model, CPU).state_dict())
    assert later.failure(wait=True) == ""


def test_a_good_state_ends_a_stop_that_the_device_holds() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    precision = Update(model, CPU, lazy=True)
    for scale in (1.0, float("nan")):
        feed(precision, model, scale)
        precision.optimizer_step(optimizer, want_norm=False)
    precision.load_state_dict(Update(model, CPU).state_dict())
    before = copy.deepcopy(model.state_dict())
    feed(precision, model)
    precision.optimizer_step(optimizer, want_norm=False)
    assert precision.failure(wait=True) == ""
    assert not same(model.state_dict(), before)


def test_set_matmul_sets_both_switches_and_says_so() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for matmul in ("high", "medium", "highest"):
            note = set_matmul(matmul, CPU)
            assert torch.get_float32_matmul_precision() == matmul
            assert torch.backends.cudnn.allow_tf32 == (matmul != "highest")
            assert (f"precision.matmul={matmul}" in note) == (matmul != "highest")
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_notes_name_the_mode_and_impossible_types_are_refused() -> None:
    assert describe_mode("32-true", CPU) == []
    assert describe_mode("64-true", CPU) == []
    assert all(line.startswith("precision=16-mixed: this CPU") for line in describe_mode("16-mixed", CPU))
    assert any("bf16-mixed keeps it" in line for line in describe_mode("bf16-true", CPU))
    with refused(ConfigError):
        describe_mode("64-true", torch.device("mps"))


@pytest.mark.parametrize(
    ("mode", "real", "wide"),
    [("32-true", torch.float32, torch.complex64), ("64-true", torch.float64, torch.complex128),
     ("bf16-true", torch.bfloat16, torch.complex64)],
)  # fmt: skip
def test_complex_numbers_stay_complex_and_counts_whole(
    mode: str, real: torch.dtype, wide: torch.dtype
) -> None:
    model = nn.Linear(2, 2)
    model.turns = nn.Parameter(torch.tensor([1 + 2j]))
    model.register_buffer("angles", torch.tensor([3 - 4j]))
    model.register_buffer("seen", torch.tensor(300))
    prepare_model(model, mode)
    assert (model.weight.dtype, model.turns.dtype, model.angles.dtype) == (real, wide, wide)
    assert (model.turns.item(), model.angles.item(), model.seen.item()) == (1 + 2j, 3 - 4j, 300)
    assert model.seen.dtype == torch.int64


def test_float16_and_complex_parameters_are_refused() -> None:
    model = nn.ParameterList([torch.zeros(1, dtype=torch.complex64)])
    with refused(ConfigError):
        build_precision(PrecisionOptions("16-mixed"), model, CPU)
    part = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))
    with refused(ConfigError):
        build_precision(PrecisionOptions("16-mixed"), part, CPU)
    part[0].requires_grad_(False)
    build_precision(PrecisionOptions("16-mixed"), part, CPU)


def test_autocast_inside_autocast_ends_with_the_outer_one() -> None:
    precision, _ = build_precision(PrecisionOptions("bf16-mixed"), network(), CPU)
    with precision.autocast():
        with precision.autocast():
            assert torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_overflows_are_normal_until_there_are_too_many() -> None:
    model = network()
    precision, _ = build_precision(PrecisionOptions("16-mixed"), model, CPU)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(MAX_OVERFLOWS_IN_A_ROW):
        feed(precision, model, float("nan"))
        assert precision.optimizer_step(optimizer, want_norm=False).skipped
    assert precision.failure(wait=True) == ""
    feed(precision, model, float("nan"))
    precision.optimizer_step(optimizer, want_norm=False)
    assert "the loss scale" in precision.failure(wait=True)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_the_plain_step_of_torchs_optimizers_updates_as_the_wrapped_one(name: str) -> None:
    weights = []
    for wrapped in (False, True):
        parameter = nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
        step = optimizer.step if wrapped else build_plain_step(optimizer)
        assert (step == optimizer.step) == wrapped
        for scale in (1.0, -0.5, 2.0):
            parameter.grad = torch.cos(parameter.detach() * scale)
            step()
        weights.append(parameter.detach().clone())
    assert torch.equal(*weights)


def test_hooks_schedulers_and_foreign_optimizers_keep_their_own_step() -> None:
    class Own(torch.optim.SGD):
        """A user's subclass."""

    parameter = nn.Parameter(torch.ones(3))
    own, hooked, scheduled = Own([parameter]), torch.optim.SGD([parameter]), torch.optim.SGD([parameter])
    hooked.register_step_post_hook(lambda *_: None)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert all(build_plain_step(optimizer) == optimizer.step for optimizer in (own, hooked, scheduled))


class Halves(Single):
    """A backend whose two ranks hold half of the gradients each; the other rank's are as these, or not finite.

    seconds: what a clock shows, which an exchange moves by one second.
    """

    other_is_bad = False
    seconds: list[float]

    def grad_norm(self, norm: Tensor) -> Tensor:
        self.seconds[0] += 1
        return norm * (math.inf if self.other_is_bad else 2**0.5)

    def reduce_any(self, flag: Tensor) -> Tensor:
        self.seconds[0] += 1
        return flag.fill_(1) if self.other_is_bad else flag


@pytest.mark.parametrize("want_norm", [False, True])
@pytest.mark.parametrize("mode", ["32-true", "16-mixed"])
@pytest.mark.parametrize("bad", [False, True])
def test_the_backend_joins_norms_and_flags_of_ranks_that_hold_parts(
    mode: str, bad: bool, want_norm: bool
) -> None:
    seconds = [0.0]
    backend = type("Other", (Halves,), {"other_is_bad": bad, "seconds": seconds})
    model, phases = torch.nn.Linear(3, 1), PhaseTimer(0.0, lambda: seconds[0])
    precision, _ = build_precision(
        PrecisionOptions(mode, nan_policy="skip"), model, CPU, phases, backend(CPU, world_size=2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.backward(model(torch.ones(1, 3)).sum(), 1.0)
    before = model.weight.detach().clone()
    report = precision.optimizer_step(optimizer, want_norm)
    if want_norm:
        assert report.norm is not None
        assert report.norm.item() == pytest.approx(
            math.inf if bad else 2**0.5 * 2
        )  # four ones here, four there
    assert report.skipped == bad == torch.equal(model.weight, before)
    # The exchanges count as waiting for ranks. Gradients with a finite norm are finite: no flag is exchanged.
    norm_is_enough = want_norm and not bad and mode == "32-true"
    assert phases.read_seconds(RANKS) == want_norm + (not norm_is_enough)
    assert phases.read_seconds(CHECK) == 0


def test_a_parameter_that_joins_a_group_is_updated_and_cleared_after_another_look() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1, fused=True)
    update = Update(model, CPU)
    before = model[1].weight.detach().clone()
    for number in range(4):
        if number == 2:
            optimizer.param_groups[0]["params"] += list(model[1].parameters())
            update.reload_optimizer_state()
        update.backward(model(torch.ones(2, 3)).square().sum(), 1.0)
        update.optimizer_step(optimizer, want_norm=False)
        assert all(param.grad is None for param in model.parameters())
        assert torch.equal(model[1].weight, before) == (number < 2)


def test_sixteen_bit_weights_of_the_model_itself_are_told_under_full_precision() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    _, notes = build_precision(PrecisionOptions(mode="32-true"), model, CPU)
    assert notes[0].startswith(
        "precision=32-true: the model makes 2 bfloat16 parameters, trained as they are"
    )
    model[1].requires_grad_(False)
    assert build_precision(PrecisionOptions(mode="32-true"), model, CPU)[1] == []
