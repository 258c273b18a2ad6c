"""The bound, against torch's own distributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Normal, kl_divergence

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.task.vae import Vae


class Fixed(nn.Module):
    def __init__(self, *output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        self.noise = noise
        return self.output


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


def test_what_does_not_fit_is_said() -> None:
    x = some(2, 3)
    for output, text in [
        ((some(2, 3), some(2, 4)), "needs \\(reconstruction, mean, log_var\\)"),
        ((some(2, 4), some(2, 4), some(2, 4)), "the shape of the inputs"),
        ((some(2, 3), some(2, 4), some(2, 5)), "latent_dim"),
    ]:
        with pytest.raises(PluginError, match=text):
            Vae().step(Fixed(*output), x)
    with pytest.raises(DataError, match="likelihood=bernoulli needs 0 to 1"):
        Vae(likelihood="bernoulli").step(Fixed(some(2, 3), some(2, 4), some(2, 4)), x)
    with pytest.raises(ConfigError, match=r"task\.beta=-1"):
        Vae(beta=-1)
    with pytest.raises(ConfigError, match=r"task\.likelihood=poisson: must be one of gaussian, bernoulli"):
        Vae(likelihood="poisson")
