"""The bound, against torch's own distributions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from approved import refused
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal, kl_divergence

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import StepInfo
from trainrun.task.vae import Vae


class Fixed(nn.Module):
    def __init__(self, *output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        self.noise = noise
        return self.output


class Needy(nn.Module):
    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        return x, noise, noise


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_the_loss_is_the_bound_of_torchs_distributions(likelihood: str, beta: float) -> None:
    rebuilt, mean, log_var, x = some(4, 1, 3, 2), some(4, 5), some(4, 6)[:, :5], some(4, 1, 3, 2).sigmoid()
    out = Vae(beta, likelihood).step(Fixed(rebuilt, mean, log_var), (x, torch.zeros(4)))
    kl = kl_divergence(Normal(mean, (0.5 * log_var).exp()), Normal(0.0, 1.0)).sum()
    if likelihood == "gaussian":
        constant = Normal(0.0, 1.0).log_prob(torch.zeros((), dtype=torch.float64)) * x.numel()
        fit = constant - Normal(rebuilt, 1.0).log_prob(x).sum()
    else:
        fit = -(Bernoulli(logits=rebuilt).logits * x - torch.nn.functional.softplus(rebuilt)).sum()
    torch.testing.assert_close(out.loss_sum, fit + beta * kl)
    torch.testing.assert_close(out.sums["kl"], kl)
    torch.testing.assert_close(out.sums["reconstruction"], fit)


def test_a_batch_is_its_samples() -> None:
    rebuilt, mean, log_var, x = some(4, 3), some(4, 5), some(4, 6)[:, :5], some(4, 3).sin()
    task = Vae()
    whole = task.step(Fixed(rebuilt, mean, log_var), x)
    parts = [
        task.step(Fixed(*(t[i : i + 1] for t in (rebuilt, mean, log_var))), x[i : i + 1]) for i in range(4)
    ]
    torch.testing.assert_close(whole.loss_sum, sum(part.loss_sum for part in parts))
    assert task.count(x) == task.count((x, torch.zeros(4))) == task.count({"image": x}) == 4
    columns = task.predict(Fixed(rebuilt, mean, log_var), x)
    assert columns["prediction"] is mean
    torch.testing.assert_close(columns["loss"].sum(), whole.loss_sum)


def test_the_model_gets_the_noise_of_the_batch() -> None:
    model, noise = Fixed(some(2, 3), some(2, 4), some(2, 4)), some(2, 4)
    Vae().step(model, {"input": some(2, 3), "noise": noise})
    assert model.noise is noise
    with refused(ConfigError, "data.augment.noise.size"):
        Vae().step(model, {"input": some(2, 3), "noise": some(2, 1)})
    with refused(ConfigError):
        Vae().step(Needy(), (some(2, 3), torch.zeros(2)))


def test_what_does_not_fit_is_said() -> None:
    x = some(2, 3)
    for output in [
        (some(2, 3), some(2, 4)),
        (some(2, 4), some(2, 4), some(2, 4)),
        (some(2, 3), some(2, 4), some(2, 5)),
    ]:
        with refused(PluginError):
            Vae().step(Fixed(*output), x)
    with refused(DataError):
        Vae(likelihood="bernoulli").step(Fixed(some(2, 3), some(2, 4), some(2, 4)), x)


def test_beta_follows_its_schedule() -> None:
    linear = Vae(2.0, beta_schedule="linear", beta_steps=4)
    assert [linear.beta_at(step) for step in range(6)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    cyclical = Vae(1.0, beta_schedule="cyclical", beta_steps=16, beta_cycles=2)
    rise = [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert [cyclical.beta_at(step) for step in range(18)] == [*rise, *rise, 1.0, 1.0]
    odd = Vae(1.0, beta_schedule="cyclical", beta_steps=10, beta_cycles=3, beta_ratio=1.0)
    values = [odd.beta_at(step) for step in range(10)]
    assert [step for step in range(1, 10) if values[step] < values[step - 1]] == [4, 7]
    assert Vae(3.0).beta_at(0) == 3.0


def test_training_weighs_with_the_schedule_and_validation_with_beta() -> None:
    task = Vae(4.0, beta_schedule="linear", beta_steps=8)
    rebuilt, mean, log_var, x = some(4, 3), some(4, 5), some(4, 6)[:, :5], some(4, 3).sin()
    model, step = Fixed(rebuilt, mean, log_var), task.step
    whole, without = (Vae(beta).step(model, x).loss_sum for beta in (4.0, 0.0))

    def info(step: int, training: bool) -> StepInfo:
        return StepInfo(step, 0, False, training, torch.Generator())

    torch.testing.assert_close(step(model, x, info(0, True)).loss_sum, without)
    torch.testing.assert_close(step(model, x, info(4, True)).loss_sum, (whole + without) / 2)
    torch.testing.assert_close(step(model, x, info(0, False)).loss_sum, whole)
    assert step(model, x, info(4, True)).sums["beta"] == 2.0 * 4
    torch.testing.assert_close(task.predict(model, x)["loss"].sum(), whole)


def test_free_bits_are_those_of_each_sample_and_dimension_in_training_alone() -> None:
    rebuilt, mean, x = some(4, 3), some(4, 5).requires_grad_(), some(4, 3)
    log_var = torch.zeros_like(mean)
    model, task = Fixed(rebuilt, mean, log_var), Vae(2.0, free_bits=0.3)
    kl = 0.5 * mean.square()
    out = task.step(model, x)
    wanted = 0.5 * (rebuilt - x).square().sum() + 2.0 * torch.where(kl < 0.3, 0.3, kl).sum()
    torch.testing.assert_close(out.loss_sum, wanted)
    torch.testing.assert_close(out.sums["kl"], kl.sum().detach())
    (gradient,) = torch.autograd.grad(out.loss_sum, mean)
    torch.testing.assert_close(gradient, torch.where(kl < 0.3, 0.0, 2.0 * mean).detach())
    with torch.no_grad():
        torch.testing.assert_close(task.step(model, x).loss_sum, Vae(2.0).step(model, x).loss_sum)


def test_pictures_show_each_sample_beside_its_reconstruction() -> None:
    x, rebuilt = some(2, 1, 3, 4).sigmoid(), some(2, 1, 3, 4)
    code = some(2, 5)
    found = Vae(likelihood="bernoulli").pictures(Fixed(rebuilt, code, code), x)["original | reconstruction"]
    torch.testing.assert_close(found.double(), torch.cat([x, rebuilt.sigmoid()], 3), atol=1e-6, rtol=0)
    assert Vae().pictures(Fixed(some(2, 3), code, code), some(2, 3)) == {}
    scaled = Vae().pictures(Fixed(rebuilt, code, code), x)["original | reconstruction"]
    assert (scaled[..., :4].min(), scaled[..., :4].max()) == (0, 1)


@pytest.mark.parametrize(
    "arguments",
    [{"beta_schedule": "linear"}, {"beta_steps": 4}, {"beta_schedule": "cyclical", "beta_steps": 3}],
)
def test_a_schedule_that_is_none_is_refused(arguments: dict[str, Any]) -> None:
    with refused(ConfigError):
        Vae(**arguments)
