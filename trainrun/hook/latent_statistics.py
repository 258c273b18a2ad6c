"""Statistics of a variational autoencoder's code, from means and log variances of many samples.

All inputs are (N, D) float64, for q(z | x) = N(mean, exp(log_var)) and the prior N(0, I). Results are in nats.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ACTIVE = 0.01  # variance of the mean over the data (Burda et al., 2016, arXiv:1509.00519)


class LatentFacts(NamedTuple):
    """KL divergence and activity of each dimension of the code, (D,).

    kl: the mean over samples of KL(q(z_j | x) || p). activity: the variance over samples of the mean of z_j.
    """

    kl: Tensor
    activity: Tensor

    @property
    def active_units(self) -> int:
        return int((self.activity > ACTIVE).sum())


def compute_latent_facts(mean: Tensor, log_var: Tensor) -> LatentFacts:
    divergence = 0.5 * (mean.square() + log_var.exp() - log_var - 1)
    return LatentFacts(divergence.mean(0), mean.var(0, unbiased=False))


def estimate_mutual_information(mean: Tensor, log_var: Tensor, noise: Tensor) -> float:
    """Estimate I(x; z) = E KL(q(z | x) || q(z)), where q(z) is the mixture over these N samples.

    The estimate cannot exceed log N (Hoffman and Johnson, 2016). noise: (N, D), standard normal. Memory: N x N
    numbers.
    """
    drawn = mean + (0.5 * log_var).exp() * noise
    precision = (-log_var).exp()
    # log q(z_i | x_k) up to a constant: the square written out, so that it is three products of matrices
    distance = drawn.square() @ precision.T - 2 * drawn @ (mean * precision).T
    distance += (mean.square() * precision + log_var).sum(1)
    log_density = -0.5 * (noise.square() + log_var).sum(1)
    mixture = torch.logsumexp(-0.5 * distance, dim=1) - math.log(len(mean))
    return float((log_density - mixture).mean())


def compute_noise_of_code(mean: Tensor, log_var: Tensor, code: Tensor) -> Tensor:
    """Return the noise with which N(mean, exp(log_var)) gives this code."""
    return (code - mean) * (-0.5 * log_var).exp()
