"""The evidence lower bound of a variational autoencoder (Kingma and Welling, 2013, arXiv:1312.6114)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import StepInfo, StepOutput
from trainrun.limits import Count, Fraction, NotNegative
from trainrun.task.batches import HALF_TYPES, form_of, inputs_and_maybe_target, run_model

LIKELIHOODS = ("gaussian", "bernoulli")
BetaSchedule = Literal["constant", "linear", "cyclical"]


class BoundTerms(NamedTuple):
    """The parts of the bound, in nats, before anything is summed: reconstruction (B,); kl, mean and log_var of the code
    (B, latent_dim). num_values: the numbers of one sample."""

    reconstruction: Tensor
    kl: Tensor
    mean: Tensor
    log_var: Tensor
    num_values: int


class Vae:
    """Reconstruction + beta x divergence, in nats per sample; targets are not looked at.

    The model is called with the inputs, and with `noise` where the batch has it, and gives
    (reconstruction, mean, log_var), see `trainrun.model.vae.VaeOutput`. With `noise` from
    `trainrun.data.augment.noise` a code depends on seed, epoch and sample alone, so accumulation, ranks
    and resume change nothing.

    beta: what the divergence weighs (Higgins et al., 2017); 1 is the bound itself.
    likelihood: `gaussian` of variance 1, up to its constant: half the squared error; `bernoulli` for data in
        [0, 1], where the reconstruction holds logits.
    beta_schedule: how training comes to `beta`, as a function of the updates made so far: `linear` from 0 in
        beta_steps (Bowman et al., 2016); `cyclical`: beta_steps are beta_cycles parts, and in the first beta_ratio of
        each it rises from 0 (Fu et al., 2019). Validation and predictions always weigh with `beta`: what they say at
        one step is comparable with any other.
    free_bits: nats that each dimension of the code may hold for nothing: in training, a KL below it counts as this and
        gives no gradient. Kingma et al. (2016) compare the mean of a minibatch; here it is each sample's own, so
        that micro-batches and ranks do not change the result.
    ConfigError: beta below 0, an unknown name, or a schedule without its steps.
    """

    def __init__(
        self,
        beta: NotNegative = 1.0,
        likelihood: str = "gaussian",
        beta_schedule: BetaSchedule = "constant",
        beta_steps: Count | None = None,
        beta_cycles: Count = 4,
        beta_ratio: Fraction = 0.5,
        free_bits: NotNegative = 0.0,
    ) -> None:
        if not beta >= 0:
            raise ConfigError(f"task.beta={beta}: must be 0 or more")
        if likelihood not in LIKELIHOODS:
            raise ConfigError(f"task.likelihood={likelihood}: must be one of {', '.join(LIKELIHOODS)}")
        check_schedule(beta_schedule, beta_steps, beta_cycles, beta_ratio)
        if not free_bits >= 0:
            raise ConfigError(f"task.free_bits={free_bits}: must be 0 or more")
        self.beta, self.bernoulli, self.free_bits = beta, likelihood == "bernoulli", free_bits
        self.schedule, self._steps, self._cycles, self._ratio = (
            beta_schedule, beta_steps or 0, beta_cycles, beta_ratio,
        )  # fmt: skip
        self.checked = False
        if beta_schedule != "constant":  # else no step is asked for, and a training step may be one graph
            self.step = self._step_at  # type: ignore[method-assign]

    def count(self, batch: Any) -> int:
        return len(inputs_and_maybe_target(batch)[0])

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """PluginError, DataError: outputs or inputs do not fit, at the first batch."""
        return self._output(model, batch, self.beta, {})

    def _step_at(self, model: nn.Module, batch: Any, info: StepInfo | None = None) -> StepOutput:
        """The same where beta follows a schedule; it is a column of the training's rows."""
        if info is None or not info.training:
            return self._output(model, batch, self.beta, {})
        beta = self.beta_at(info.step)
        return self._output(model, batch, beta, {"beta": beta * self.count(batch)})

    def beta_at(self, step: int) -> float:
        """What the divergence weighs in the update after `step` updates."""
        if self.schedule == "constant" or step >= self._steps:
            return self.beta
        if self.schedule == "linear":
            return self.beta * step / self._steps
        place = step * self._cycles / self._steps
        return self.beta * min(1.0, (place - math.floor(place)) / self._ratio)

    def _output(self, model: nn.Module, batch: Any, beta: float, more: dict[str, float]) -> StepOutput:
        terms = self.terms(model, batch)
        rebuilt, code = terms.reconstruction.sum(), terms.kl.sum(1).sum()
        weighed = code
        if self.free_bits and torch.is_grad_enabled():
            weighed = terms.kl.clamp(min=self.free_bits).sum()
        loss = rebuilt + beta * weighed
        return StepOutput(loss, {"reconstruction": rebuilt.detach(), "kl": code.detach(), **more})

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """`prediction`: the mean of the code (B, latent_dim); `loss` (B,): how badly the sample fits."""
        terms = self.terms(model, batch)
        return {"prediction": terms.mean, "loss": terms.reconstruction + self.beta * terms.kl.sum(1)}

    def pictures(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Samples that are pictures, each beside what the mean of its code becomes: (B, C, H, 2 W) in [0, 1]."""
        inputs = inputs_and_maybe_target(batch)[0]
        if not isinstance(inputs, Tensor) or inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
            return {}
        if isinstance(batch, Mapping) and "noise" in batch:
            batch = {**batch, "noise": torch.zeros_like(batch["noise"])}
        rebuilt = run_model(model, inputs, batch)[0].float()
        inputs = inputs.float()
        if self.bernoulli:
            rebuilt = rebuilt.sigmoid()
        else:
            low, high = inputs.min(), inputs.max()
            inputs, rebuilt = ((item - low) / (high - low).clamp(min=1e-12) for item in (inputs, rebuilt))
        return {"original-reconstruction": torch.cat([inputs, rebuilt], dim=3)}

    def terms(self, model: nn.Module, batch: Any) -> BoundTerms:
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
        return BoundTerms(each.flatten(1).sum(1), divergence, mean, log_var, each[0].numel())


def check_schedule(schedule: str, steps: int | None, cycles: int, ratio: float) -> None:
    if schedule not in get_args(BetaSchedule):
        raise ConfigError(
            f"task.beta_schedule={schedule}: must be one of {', '.join(get_args(BetaSchedule))}"
        )
    if (schedule == "constant") != (steps is None):
        raise ConfigError(
            f"task.beta_schedule={schedule}: needs task.beta_steps=..., the updates that the annealing takes"
            if steps is None
            else f"task.beta_steps={steps}: task.beta_schedule=constant has none; add task.beta_schedule=linear"
        )
    if steps is not None and steps < 1:
        raise ConfigError(f"task.beta_steps={steps}: must be 1 or more")
    if cycles < 1 or (schedule == "cyclical" and cycles > (steps or 0)):
        raise ConfigError(
            f"task.beta_cycles={cycles}: must be 1 or more, and at most task.beta_steps={steps}"
        )
    if not 0 < ratio <= 1:
        raise ConfigError(f"task.beta_ratio={ratio}: must be more than 0 and at most 1")


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
