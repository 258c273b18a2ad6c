"""The evidence lower bound of a variational autoencoder (Kingma and Welling, 2013, arXiv:1312.6114)."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from trainrun.errors import ConfigError, DataError, PluginError
from trainrun.interfaces import IGNORED, StepInfo, StepOutput, batch_fields, convert_batch_to_dict
from trainrun.limits import Count, NotNegative, PositiveFraction
from trainrun.task.batches import describe_form, run_model, split_inputs_and_optional_target
from trainrun.task.dict_batches import unwrap_model
from trainrun.tensors import HALF_TYPES


class BoundTerms(NamedTuple):
    """The parts of the bound, in nats, per sample: reconstruction (B,); kl, mean and log_var (B, latent_dim).

    num_values: the numbers of one sample, 0 for sequences. num_tokens: the tokens of all samples, 0-d.
    """

    reconstruction: Tensor
    kl: Tensor
    mean: Tensor
    log_var: Tensor
    num_values: int
    num_tokens: Tensor | None = None


class Vae:
    """Reconstruction + beta x KL divergence, in nats per sample. Targets are not used.

    The model is called with the inputs, and with `noise` if the batch has it. It returns (reconstruction, mean,
    log_var), see `trainrun.model.vae.VaeOutput`. With `noise` from `trainrun.data.augment.noise` a code depends on
    seed, epoch and sample alone, so accumulation, ranks and resume change nothing.

    beta: the weight of the divergence (Higgins et al., 2017); 1 is the bound itself.
    likelihood: `gaussian` of variance 1, up to its constant: half the squared error. `bernoulli` for data in [0, 1],
        with logits as reconstruction. `categorical` for tokens (B, T), with logits (B, T, vocabulary), as
        `trainrun.model.sequence_vae` returns. `auto` is categorical for integers (B, T), else gaussian. The
        reconstruction is a sum over the values or tokens of a sample, like the divergence over the dimensions: a
        mean over values would multiply beta by their number.
    beta_schedule: how `beta` is reached, as a function of the number of updates. `linear`: from 0 in beta_steps
        (Bowman et al., 2016). `cyclical`: beta_steps are beta_cycles parts, and in the first beta_ratio of each part
        it rises from 0 (Fu et al., 2019). Validation and predictions always use `beta`, so that their values at all
        steps are comparable.
    free_bits: nats per dimension of the code that are not penalised: in training, a smaller KL counts as this value
        and has no gradient. Kingma et al. (2016) compare the mean of a minibatch; here it is per sample, so that
        micro-batches and ranks do not change the result.

    Raises ConfigError for a schedule without its steps.
    """

    def __init__(
        self,
        beta: NotNegative = 1.0,
        likelihood: Literal["auto", "gaussian", "bernoulli", "categorical"] = "auto",
        beta_schedule: Literal["constant", "linear", "cyclical"] = "constant",
        beta_steps: Count | None = None,
        beta_cycles: Count = 4,
        beta_ratio: PositiveFraction = 0.5,
        free_bits: NotNegative = 0.0,
    ) -> None:
        if (beta_schedule == "constant") != (beta_steps is None):
            raise ConfigError(
                f"task.beta_schedule={beta_schedule}: needs task.beta_steps=..., the number of updates of the annealing"
                if beta_steps is None
                else f"task.beta_steps={beta_steps}: has no effect with task.beta_schedule=constant; use linear"
            )
        if beta_schedule == "cyclical" and beta_cycles > (beta_steps or 0):
            raise ConfigError(f"task.beta_cycles={beta_cycles}: must be at most task.beta_steps={beta_steps}")
        self.beta, self.likelihood, self.free_bits = beta, likelihood, free_bits
        self.schedule, self._steps, self._cycles, self._ratio = (
            beta_schedule, beta_steps or 0, beta_cycles, beta_ratio,
        )  # fmt: skip
        self.checked = self._with_last = False
        if beta_schedule != "constant":  # else no step is asked for, and a training step may be one graph
            self.step = self._compute_step  # type: ignore[method-assign]

    def count(self, batch: Any) -> int:
        return len(split_inputs_and_optional_target(batch)[0])

    def step(self, model: nn.Module, batch: Any) -> StepOutput:
        """Return loss and sums. At the first batch, raise PluginError or DataError if outputs or inputs do not
        match.
        """
        return self._build_output(model, batch, self.beta, {})

    def _compute_step(self, model: nn.Module, batch: Any, info: StepInfo | None = None) -> StepOutput:
        """Return loss and sums with the scheduled beta, and record beta among the training metrics."""
        if info is None or not info.training:
            return self._build_output(model, batch, self.beta, {})
        beta = self.beta_at(info.step)
        return self._build_output(model, batch, beta, {"beta": beta * self.count(batch)})

    def beta_at(self, step: int) -> float:
        """Return the weight of the divergence for the update that follows `step` updates."""
        if self.schedule == "constant" or step >= self._steps:
            return self.beta
        if self.schedule == "linear":
            return self.beta * step / self._steps
        place = step * self._cycles / self._steps
        return self.beta * min(1.0, (place - math.floor(place)) / self._ratio)

    def _build_output(self, model: nn.Module, batch: Any, beta: float, more: dict[str, Any]) -> StepOutput:
        terms = self.terms(model, batch)
        rebuilt, code = terms.reconstruction.sum(), terms.kl.sum(1).sum()
        weighed = code
        if self.free_bits and torch.is_grad_enabled():
            weighed = terms.kl.clamp(min=self.free_bits).sum()
        loss = rebuilt + beta * weighed
        if terms.num_tokens is not None:
            more = {**more, "nats_per_token": (rebuilt.detach(), terms.num_tokens)}
        return StepOutput(loss, {"reconstruction": rebuilt.detach(), "kl": code.detach(), **more})

    def predict(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return `prediction` (B, latent_dim), the mean of the code, and `loss` (B,)."""
        terms = self.terms(model, batch)
        return {"prediction": terms.mean, "loss": terms.reconstruction + self.beta * terms.kl.sum(1)}

    def pictures(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return images beside their reconstructions from the mean of the code, (B, C, H, 2 W) in [0, 1]."""
        inputs = split_inputs_and_optional_target(batch)[0]
        if not isinstance(inputs, Tensor) or inputs.ndim != 4 or inputs.shape[1] not in (1, 3):
            return {}
        if isinstance(noise := batch_fields(batch).get("noise"), Tensor):
            batch = {**convert_batch_to_dict(batch), "noise": torch.zeros_like(noise)}
        rebuilt = run_model(model, inputs, batch)[0].float()
        inputs = inputs.float()
        if self.likelihood == "bernoulli":
            rebuilt = rebuilt.sigmoid()
        else:
            low, high = inputs.min(), inputs.max()
            inputs, rebuilt = ((item - low) / (high - low).clamp(min=1e-12) for item in (inputs, rebuilt))
        return {"original | reconstruction": torch.cat([inputs, rebuilt], dim=3)}

    def terms(self, model: nn.Module, batch: Any) -> BoundTerms:
        inputs = split_inputs_and_optional_target(batch)[0]
        if not self.checked:
            check_noise_field(model, batch)
        if self.has_token_inputs(inputs):
            return self._compute_token_terms(model, batch)
        output, bernoulli = run_model(model, inputs, batch), self.likelihood == "bernoulli"
        if not self.checked:
            check_first_output(output, inputs, bernoulli)
            check_noise(batch, output[1])
            self.checked = True
        rebuilt, mean, log_var = (item.float() if item.dtype in HALF_TYPES else item for item in output)
        inputs = inputs.to(rebuilt.dtype)
        if bernoulli:
            each = binary_cross_entropy_with_logits(rebuilt, inputs, reduction="none")
        else:
            each = 0.5 * (rebuilt - inputs).square()
        return BoundTerms(
            each.flatten(1).sum(1), compute_kl_divergence(mean, log_var), mean, log_var, each[0].numel()
        )

    def has_token_inputs(self, inputs: Any) -> bool:
        if self.likelihood != "auto":
            return self.likelihood == "categorical"
        return isinstance(inputs, Tensor) and inputs.ndim == 2 and not inputs.is_floating_point()

    def _compute_token_terms(self, model: nn.Module, batch: Any) -> BoundTerms:
        if not self.checked:
            self._with_last = has_next_tokens(batch)
        tokens, mask = split_tokens_and_mask(batch, self._with_last)
        named = {**convert_batch_to_dict(batch), "attention_mask": mask}
        output = run_model(model, tokens, named)
        if not self.checked:
            check_token_output(output, tokens)
            check_noise(batch, output[1])
            self.checked = True
        logits, mean, log_var = (item.float() if item.dtype in HALF_TYPES else item for item in output)
        each = cross_entropy(
            logits.transpose(1, 2), tokens.long().masked_fill(~mask, IGNORED), reduction="none"
        )
        return BoundTerms(each.sum(1), compute_kl_divergence(mean, log_var), mean, log_var, 0, mask.sum())


def compute_kl_divergence(mean: Tensor, log_var: Tensor) -> Tensor:
    """Return KL(N(mean, exp(log_var)) || N(0, 1)) of each dimension."""
    return 0.5 * (mean.square() + log_var.exp() - log_var - 1)


def split_tokens_and_mask(batch: Any, with_last: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens (B, T) and a mask of positions that are not padding.

    with_last: the targets are the next tokens, so the last target is appended to the sequence.
    """
    tokens, target = split_inputs_and_optional_target(batch)
    attention_mask = batch_fields(batch).get("attention_mask")
    mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if not with_last or target is None:
        return tokens, mask
    follows = (target != IGNORED) & mask
    sequences = torch.cat([tokens[:, :1], target.masked_fill(~follows, 0).to(tokens.dtype)], dim=1)
    return sequences, torch.cat([mask[:, :1], follows], dim=1)


def has_next_tokens(batch: Any) -> bool:
    """Return whether the targets of a batch are its next tokens, as for data=text. Raise DataError if it has no
    tokens.
    """
    tokens, target = split_inputs_and_optional_target(batch)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
        raise DataError(
            f"data: the inputs are {describe_form(tokens)}; task.likelihood=categorical needs tokens (B, T); use "
            "task.likelihood=gaussian"
        )
    if not isinstance(target, Tensor) or target.shape != tokens.shape:
        return False
    mask = batch_fields(batch).get("attention_mask")
    real = target[:, :-1] != IGNORED if mask is None else mask[:, 1:].bool()
    return bool((target[:, :-1] == tokens[:, 1:])[real].all())


def check_noise_field(model: nn.Module, batch: Any) -> None:
    """Raise ConfigError if the model's forward requires `noise` and the batch has none."""
    if "noise" in batch_fields(batch):
        return
    forward = type(unwrap_model(model)).forward
    noise = inspect.signature(forward).parameters.get("noise")
    if noise is not None and noise.default is noise.empty:
        raise ConfigError(
            f"data.augment.noise.size=null: {forward.__qualname__} needs noise; set the number of noise values per "
            "sample, as data.augment.noise.size=16"
        )


def check_noise(batch: Any, mean: Tensor) -> None:
    """Raise ConfigError if the noise has one dimension and the code several: torch would broadcast it without an
    error.
    """
    noise = batch_fields(batch).get("noise")
    if noise is not None and noise.shape[1] == 1 != mean.shape[1]:
        raise ConfigError(
            f"data.augment.noise.size=1: the code of the model has {mean.shape[1]} dimensions; use this number"
        )


def check_token_output(output: Any, tokens: Tensor) -> None:
    """Raise PluginError if the output for tokens is not (logits, mean, log_var); DataError for a token outside the
    vocabulary.
    """
    fits = isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, Tensor) for x in output)
    if not fits or output[0].ndim != 3 or output[0].shape[:2] != tokens.shape or output[1].ndim != 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in output) if fits else describe_form(output)
        raise PluginError(
            f"model: gives {shapes} for tokens {tuple(tokens.shape)}; task=vae needs (logits (B, T, vocabulary), mean, "
            "log_var), as model=sequence_vae gives; or use task.likelihood=gaussian for whole numbers that are not "
            "tokens"
        )
    most = int(tokens.max())
    if most >= output[0].shape[2]:
        raise DataError(
            f"data: has token {most}, but the model has {output[0].shape[2]}; see model.vocab_size"
        )


def check_first_output(output: Any, inputs: Any, bernoulli: bool) -> None:
    """Check form and range of the output of the first batch. Later batches are not checked, because the check waits
    for the device.
    """
    if not isinstance(inputs, Tensor) or inputs.ndim < 2:
        raise DataError(f"data: the inputs are {describe_form(inputs)}; task=vae needs a tensor (B, ...)")
    fits = isinstance(output, tuple) and len(output) == 3 and all(isinstance(x, Tensor) for x in output)
    if not fits:
        raise PluginError(
            f"model: the output is {describe_form(output)}; task=vae needs (reconstruction, mean, log_var), as "
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
