"""The evidence lower bound of a variational autoencoder (Kingma and Welling, 2013, arXiv:1312.6114)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import StepOutput
from trainrun.limits import NotNegative
from trainrun.task.batches import HALF_TYPES, form_of, inputs_and_maybe_target, run_model

LIKELIHOODS = ("gaussian", "bernoulli")


class Vae:
    """Reconstruction + beta x divergence, in nats per sample; targets are not looked at.

    The model is called with the inputs, and with `noise` where the batch has it, and gives
    (reconstruction, mean, log_var), see `trainrun.model.vae.VaeOutput`. With `noise` from
    `trainrun.data.augment.noise` a code depends on seed, epoch and sample alone, so accumulation, ranks
    and resume change nothing.

    beta: what the divergence weighs (Higgins et al., 2017); 1 is the bound itself.
    likelihood: `gaussian` of variance 1, up to its constant: half the squared error; `bernoulli` for data in
        [0, 1], where the reconstruction holds logits.
    ConfigError: beta below 0, or an unknown likelihood.
    """

    def __init__(self, beta: NotNegative = 1.0, likelihood: str = "gaussian") -> None:
        if not beta >= 0:
            raise ConfigError(f"task.beta={beta}: must be 0 or more")
        if likelihood not in LIKELIHOODS:
            raise ConfigError(f"task.likelihood={likelihood}: must be one of {', '.join(LIKELIHOODS)}")
        self.beta, self.bernoulli = beta, likelihood == "bernoulli"
        self.checked = False

    def count(self, batch: Any) -> int:
        return len(inputs_and_maybe_target(batch)[0])

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """PluginError, DataError: outputs or inputs do not fit, at the first batch."""
        distance, divergence, _ = self._terms(model, batch)
        rebuilt, code = distance.sum(), divergence.sum()
        loss = rebuilt + self.beta * code
        return StepOutput(loss, {"reconstruction": rebuilt.detach(), "kl": code.detach()})

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """`prediction`: the mean of the code (B, latent_dim); `loss` (B,): how badly the sample fits."""
        distance, divergence, mean = self._terms(model, batch)
        return {"prediction": mean, "loss": distance + self.beta * divergence}

    def _terms(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Per sample: reconstruction and divergence (B,), and the mean of the code."""
        inputs = inputs_and_maybe_target(batch)[0]
        output = run_model(model, inputs, batch)
        if not self.checked:
            check(output, inputs, self.bernoulli)
            self.checked = True
        rebuilt, mean, log_var = (item.float() if item.dtype in HALF_TYPES else item for item in output)
        inputs = inputs.to(rebuilt.dtype)
        if self.bernoulli:
            each = binary_cross_entropy_with_logits(rebuilt, inputs, reduction="none")
        else:
            each = 0.5 * (rebuilt - inputs).square()
        divergence = 0.5 * (mean.square() + log_var.exp() - log_var - 1)
        return each.flatten(1).sum(1), divergence.sum(1), mean


def check(output: Any, inputs: Any, bernoulli: bool) -> None:
    """Check the form and range of the first batch only, as it waits for the device."""
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        raise DataError(f"data: the inputs are {form_of(inputs)}; task=vae needs a tensor (B, ...)")
    fits = isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, Tensor) for x in output)
    if not fits:
        raise PluginError(
            f"model: the output is {form_of(output)}; task=vae needs (reconstruction, mean, log_var), as "
            "model=vae gives"
        )
    rebuilt, mean, log_var = output
    if rebuilt.shape != inputs.shape or mean.shape != log_var.shape or mean.ndim != 2:
        raise PluginError(
            f"model: gives a reconstruction {tuple(rebuilt.shape)}, mean {tuple(mean.shape)} and log_var "
            f"{tuple(log_var.shape)} for inputs {tuple(inputs.shape)}; task=vae needs the shape of the inputs, and "
            "(B, latent_dim) twice"
        )
    if bernoulli and not bool(((inputs >= 0) & (inputs <= 1)).all()):
        raise DataError(
            f"data: the inputs lie between {float(torch.min(inputs)):.3g} and {float(torch.max(inputs)):.3g}, and "
            "task.likelihood=bernoulli needs 0 to 1; leave out their normalisation, or use task.likelihood=gaussian"
        )
