"""What is said of a code, against the closed form of a linear VAE: probabilistic PCA (Tipping and Bishop, 1999)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from trainrun.task.vae import Vae
from trainrun.vae_health.latent_code import (
    compute_code_noise,
    compute_latent_facts,
    draw_fixed_noise,
    estimate_mutual_information,
    format_measurement,
    is_collapsed,
    shuffle_codes,
    suggest_remedy,
)

VARIANCES = torch.tensor([4.0, 2.0, 1.2, 0.3, 0.2], dtype=torch.float64)  # of the data
BETA = 0.5  # what a decoder of variance 1 and this beta takes for noise: two dimensions lie below it


class LinearVae(nn.Module):
    """The optimum for such data, by the eigenvalues of their covariance."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = (VARIANCES - BETA).clamp(min=0).sqrt()
        self.precision = torch.where(self.scale > 0, VARIANCES, BETA)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = x * self.scale / self.precision
        log_var = (BETA / self.precision).log().expand_as(mean)
        return (mean + (0.5 * log_var).exp() * noise) * self.scale, mean, log_var


def batch_of(count: int) -> dict[str, Tensor]:
    draw = torch.randn(
        2, count, len(VARIANCES), dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return {"input": draw[0] * VARIANCES.sqrt(), "noise": draw[1]}


def test_a_linear_vae_has_the_numbers_of_probabilistic_pca() -> None:
    batch, task, model = batch_of(4000), Vae(BETA), LinearVae()
    terms = task.terms(model, batch)
    facts = compute_latent_facts(terms.mean, terms.log_var)
    each = 0.5 * (VARIANCES / BETA).clamp(min=1).log()
    assert facts.active_units == 3
    torch.testing.assert_close(facts.kl, each, atol=0.05, rtol=0)
    torch.testing.assert_close(facts.activity, (1 - BETA / VARIANCES).clamp(min=0), atol=0.05, rtol=0)
    information = estimate_mutual_information(terms.mean, terms.log_var, draw_fixed_noise(terms.mean))
    assert information == pytest.approx(
        float(each.sum()), abs=0.08
    )  # its prior is met, so the marginal KL is 0
    (others,) = shuffle_codes([batch], terms.mean, terms.log_var)
    gain = (task.terms(model, others).reconstruction - terms.reconstruction).mean()
    assert float(gain) == pytest.approx(float((VARIANCES - BETA).clamp(min=0).sum()), rel=0.05)
    assert terms.num_values == len(VARIANCES)


def test_mutual_information_is_torchs_density_and_ends_at_its_ceiling() -> None:
    draw = torch.randn(3, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mean, log_var, noise = draw[0], draw[1] - 1, draw[2]
    kernel = torch.distributions.Normal(mean[None], (0.5 * log_var).exp()[None])
    table = kernel.log_prob((mean + (0.5 * log_var).exp() * noise)[:, None]).sum(2)
    wanted = (table.diagonal() - table.logsumexp(1) + math.log(50)).mean()
    assert estimate_mutual_information(mean, log_var, noise) == pytest.approx(float(wanted), abs=1e-9)
    assert estimate_mutual_information(mean, log_var * 0, noise) < math.log(50)
    assert estimate_mutual_information(1e3 * mean, log_var, noise) == pytest.approx(math.log(50))
    assert estimate_mutual_information(0 * mean, 0 * log_var, noise) == pytest.approx(0, abs=1e-12)


def test_each_sample_gets_the_code_of_another() -> None:
    batch, model = batch_of(7), LinearVae()
    _, mean, log_var = model(**{"x": batch["input"], "noise": batch["noise"]})
    deviation = (0.5 * log_var).exp()
    codes = mean + deviation * batch["noise"]
    (others,) = shuffle_codes([batch], mean, log_var)
    found = mean + deviation * others["noise"]
    distance = torch.cdist(found, codes)
    assert sorted(distance.argmin(1).tolist()) == list(range(7))
    assert all(place != i for i, place in enumerate(distance.argmin(1).tolist()))
    torch.testing.assert_close(compute_code_noise(mean, log_var, codes), batch["noise"])


FINE = {
    "beta": 1.0, "kl": 9.0, "active_units": 6, "activity": [1.0] * 16, "reconstruction": 50.0, "gain": 20.0,
    "free_bits": 0.0, "mutual_information": 6.1, "ceiling": 6.24, "marginal_kl": 2.9,
}  # fmt: skip
SILENT = FINE | {"kl": 0.1, "active_units": 1, "gain": 1.0}


@pytest.mark.parametrize(
    ("found", "last_beta", "wanted"),
    [
        (FINE, 1.0, False), (SILENT, 1.0, True), (SILENT, 4.0, False), (SILENT | {"beta": 0.0}, 0.0, False),
        (FINE | {"gain": 0.4}, 1.0, True), (SILENT | {"active_units": 2}, 1.0, False),
        (SILENT | {"kl": 0.6}, 1.0, False), (SILENT | {"active_units": 1, "activity": [1.0]}, 1.0, False),
    ],
)  # fmt: skip
def test_a_collapse_is_a_silent_or_ignored_code_once_beta_has_risen(
    found: dict[str, float], last_beta: float, wanted: bool
) -> None:
    assert is_collapsed(found, last_beta) is wanted


def test_the_remedy_is_that_of_the_likely_cause() -> None:
    annealed = Vae(beta_schedule="linear", beta_steps=9)
    for task, found, word in (
        (Vae(), SILENT, "task.beta_schedule=linear"),
        (Vae(9.0), SILENT | {"beta": 9.0}, "task.beta=1"),
        (Vae(), SILENT | {"residual_variance": 0.072}, "task.beta=0.07"),
        (annealed, SILENT, "task.free_bits=0.1"),
        (annealed, SILENT | {"free_bits": 0.1}, "smaller decoder"),
        (annealed, FINE | {"gain": 0.1}, "smaller decoder"),
    ):
        assert word in suggest_remedy(task, found)
    for dropped, word in (
        (0.0, "rate=0.3, or more"),
        (0.5, "rate=0.7, or more"),
        (0.9, "rate=1"),
        (1.0, "task.free_bits=0.1"),
    ):
        assert suggest_remedy(annealed, SILENT | {"tokens": 30.0}, dropped).endswith(word)
    assert format_measurement(FINE) == (
        "vae: beta 1  KL 9 nats  active 6/16  MI >= 6.1 (ceiling 6.24)  marginal KL <= 2.9  gain 20"
    )
