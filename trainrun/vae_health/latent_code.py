"""Detect posterior collapse of a variational autoencoder during the training.

When: every training of one (`monitor=vae`). Cost: two forwards of the held samples, every `update_every_n_steps`.
    When
not: a step as one graph, which supports no hooks. How: the same validation samples each time, with their own noise,
    in evaluation mode and without gradients, so that no bit of the training changes. Every rank computes its share;
    rank 0 writes the row. Source: Burda et al. 2016 (active units), Hoffman and Johnson 2016 (mutual information),
    Kingma et al. 2016 (free bits).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainrun.errors import ConfigError, TrainingError
from trainrun.interfaces import batch_fields, convert_batch_to_dict
from trainrun.limits import Count, Limits

if TYPE_CHECKING:
    from trainrun.train_state import TrainState
    from trainrun.training.components import Components

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


def compute_code_noise(mean: Tensor, log_var: Tensor, code: Tensor) -> Tensor:
    """Return the noise with which N(mean, exp(log_var)) gives this code."""
    return (code - mean) * (-0.5 * log_var).exp()


LEAST_ACTIVE, LEAST_ACTIVE_SHARE = 2, 0.05  # dimensions
LEAST_KL = 0.5  # nats
LEAST_GAIN = 0.01  # of the reconstruction: below, the decoder does without the code
RISEN = 0.5  # of its last value: beta from which a code that says nothing is a collapse
WAKING, WAKING_NATS = 1.1, 0.01  # a KL that rises so much over the window is on its way
LITTLE_SPREAD = 0.5  # of the variance that a Gaussian likelihood is worth at this beta
NEAR_CEILING = 0.5  # nats: an estimate so near to log N says `this or more`
FIRST_BOOST, LAST_BOOST = 0.1, 1.6  # nats of a dimension: it begins with one, doubles, ends with the other


@runtime_checkable
class HasBound(Protocol):
    """A task with the parts of the bound: `trainrun.task.vae.Vae`, or a custom one with the same parts.

    beta: the final weight of the KL divergence.
    """

    beta: float

    def terms(self, model: nn.Module, batch: Any) -> Any:
        """Return the fields of `trainrun.task.vae.BoundTerms`."""

    def beta_at(self, step: int) -> float:
        """Return the weight of the KL after `step` updates."""


class VaeHealth:
    """A hook that measures the latent code of a VAE.

    Raises ConfigError at the start without validation data, or if the task has no bound.

    Args:
        update_every_n_steps: steps between two measurements.
        num_samples: the approximate number of validation samples that are measured.
        window_size: the number of measurements in a row that count as a collapse.
        verbose: print a line with every validation.
        fast: measure only KL and active units, from one forward.
        on_collapse: `raise` ends the run; `boost_free_bits` raises `task.free_bits`, again after each further window.
    """

    def __init__(
        self,
        update_every_n_steps: Count = 50,
        num_samples: Annotated[int, Limits(at_least=2)] = 512,
        window_size: Count = 3,
        verbose: bool = True,
        fast: bool = False,
        on_collapse: Literal["warn", "raise", "boost_free_bits"] = "warn",
    ) -> None:
        self._every, self._num_samples, self._window = update_every_n_steps, num_samples, window_size
        self._verbose, self._fast, self._action = verbose, fast, on_collapse
        self._batches: list[Any] = []
        self._collapsed_kl: list[float] = []  # of the measurements in a row that are a collapse
        self._is_reported = False  # the present collapse
        self._free_bits: float | None = None  # what it was raised to
        self._line = ""  # of the last measurement, until a validation prints it
        self._has_beta_note = False

    def on_start(self, run: Components, state: TrainState) -> None:
        task: Any = run.task
        if not isinstance(run.task, HasBound):
            raise ConfigError(
                f"monitor=vae: measures the code of a VAE, but {type(task).__name__} lacks beta, beta_at(step) or "
                "terms(model, batch); use model=vae task=vae, or leave it out"
            )
        if run.val is None:
            raise ConfigError("monitor=vae: needs validation data; set data.val, or leave it out")
        if self._action == "boost_free_bits" and not type(task).__module__.startswith("trainrun.task."):
            raise ConfigError(
                f"on_collapse=boost_free_bits: raises task.free_bits of task=vae, and {type(task).__name__} is a task "
                "of your own; use warn or raise"
            )
        if self._free_bits is not None:
            task.free_bits = max(self._free_bits, task.free_bits)

    def on_step_end(self, run: Components, state: TrainState) -> None:
        if state.step % self._every == 0 and (row := self._measure(run, state)):
            self._check_collapse(run, row)

    def on_validation_end(self, run: Components, state: TrainState, metrics: Mapping[str, float]) -> None:
        self._print_line(run, state)

    def on_end(self, run: Components, state: TrainState) -> None:
        if not self._has_beta_note:  # nothing was measured so far
            self._print_line(run, state)

    def _print_line(self, run: Components, state: TrainState) -> None:
        if not self._verbose:
            return
        if not self._line:  # a run, or an epoch, shorter than `update_every_n_steps`
            self._measure(run, state)
        if self._line:
            run.monitors.note(self._line)
        self._line = ""

    def _measure(self, run: Components, state: TrainState) -> dict[str, Any] | None:
        """Write the row of a measurement and return it; None if its numbers are not finite."""
        started = perf_counter()
        task: Any = run.task
        with run.monitors.exclude_time(), run.evaluating():
            if not self._batches:
                self._batches = read_held_out_batches(run, self._num_samples)
            row = measure_code(run, self._batches, state.step, self._fast)  # waits for the device
        numbers = [*row["kl_of_dimensions"], *row["activity"], row["kl"], row.get("gain", 0.0)]
        if not all(map(math.isfinite, numbers)):
            self._collapsed_kl.clear()  # not a collapse: nan_policy and the validation say what is wrong
            return None
        run.monitors.write_row("vae", state.step, row | {"seconds": perf_counter() - started})
        if self._verbose and not self._has_beta_note and ("values" in row or "tokens" in row):
            self._has_beta_note = True
            run.monitors.note(describe_beta(task.beta, row))
        self._line = format_measurement(row)
        return row

    def state_dict(self) -> dict[str, Any]:
        """Return the state; {} without a collapse, so that such a run can be resumed without this hook."""
        if not self._collapsed_kl and self._free_bits is None:
            return {}
        return {"kl": list(self._collapsed_kl), "told": self._is_reported, "free_bits": self._free_bits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._collapsed_kl, self._is_reported = list(state.get("kl", [])), bool(state.get("told", False))
        self._free_bits = state.get("free_bits")

    def _check_collapse(self, run: Components, row: Mapping[str, Any]) -> None:
        """Report a collapse once, and again only after the code has recovered."""
        task: Any = run.task
        if not is_collapsed(row, task.beta):
            self._collapsed_kl.clear()
            self._is_reported = False
            return
        self._collapsed_kl = [*self._collapsed_kl, row["kl"]][-self._window :]
        is_recovering = self._collapsed_kl[-1] > WAKING * self._collapsed_kl[0] + WAKING_NATS
        if len(self._collapsed_kl) < self._window or is_recovering or self._is_reported:
            return
        text = f"posterior collapse: {describe_collapse(row)}. {suggest_remedy(task, row, read_word_dropout_rate(run))}"
        if self._action == "raise":
            raise TrainingError(f"{text} (hook.vae.on_collapse=raise)")
        if self._action == "boost_free_bits" and task.free_bits < LAST_BOOST:
            self._free_bits = task.free_bits = min(max(FIRST_BOOST, 2 * task.free_bits), LAST_BOOST)
            self._collapsed_kl.clear()  # it has a whole window to help
            text += f"; task.free_bits is {task.free_bits:g} from here on"
        else:
            self._is_reported = True
        run.monitors.note(text)


def read_held_out_batches(run: Components, num_samples: int) -> list[Any]:
    """Return this rank's share of batches, evenly spaced over the first validation set, which may be sorted by
    class.
    """
    stream = run.val
    assert stream is not None
    num_batches, available = stream.num_batches, stream.num_samples
    if num_batches and available:
        wanted = min(num_batches, math.ceil(num_samples * num_batches / available))
        starts = [number * num_batches // wanted for number in range(wanted)]
        firsts = [next(iter(stream.epoch(0, start)), None) for start in starts]
        batches = [
            batch for batch in firsts if batch is not None
        ]  # not every rank has a share of the last one
    else:
        size = run.config.data.batch_size * run.parallel.world_size
        batches = list(islice(stream.epoch(0), math.ceil(num_samples / size)))
    return [batch.data for batch in batches if batch.real]


def measure_code(run: Components, batches: list[Any], step: int, fast: bool) -> dict[str, Any]:
    """Measure the latent code on the held batches of all ranks. Return the row."""
    task: Any = run.task
    ranks = run.parallel.gather(compute_rank_terms(run, batches, fast))

    def concatenate_terms(name: str) -> Tensor:
        return torch.tensor([sample for rank in ranks for sample in rank[name]], dtype=torch.float64)

    mean, log_var, reconstruction, gain = map(
        concatenate_terms, ("mean", "log_var", "reconstruction", "gain")
    )
    facts = compute_latent_facts(mean, log_var)
    row: dict[str, Any] = {
        "beta": float(task.beta_at(step)), "kl": float(facts.kl.sum()), "active_units": facts.active_units,
        "reconstruction": float(reconstruction.mean()), "free_bits": float(getattr(task, "free_bits", 0.0)),
        "kl_of_dimensions": facts.kl.tolist(), "activity": facts.activity.tolist(),
    }  # fmt: skip
    if not fast:
        information = estimate_mutual_information(mean, log_var, draw_fixed_noise(mean))
        row |= {"mutual_information": information, "ceiling": math.log(len(mean))}
        row["marginal_kl"] = row["kl"] - information
    if len(gain):
        row["gain"] = float(gain.mean())
    if num_tokens := sum(rank["tokens"] for rank in ranks):
        row["tokens"] = num_tokens / len(mean)
    if num_values := max(rank["values"] for rank in ranks):
        row["values"] = num_values
        if getattr(task, "likelihood", "") in ("auto", "gaussian"):
            row["residual_variance"] = 2 * row["reconstruction"] / num_values
    return row


def compute_rank_terms(run: Components, batches: list[Any], fast: bool) -> dict[str, Any]:
    """Return the terms of the bound for this rank's samples as lists, and their numbers of values and tokens."""
    task: Any = run.task
    if not batches:
        return {"mean": [], "log_var": [], "reconstruction": [], "gain": [], "values": 0, "tokens": 0}

    def compute(inputs: list[Any]) -> list[Any]:
        with run.precision.autocast():
            return [task.terms(run.model, batch) for batch in inputs]

    def concatenate_terms(terms: list[Any], name: str) -> Tensor:
        return torch.cat([getattr(term, name) for term in terms]).double()

    terms = compute(batches)
    mean, log_var, reconstruction = (
        concatenate_terms(terms, name) for name in ("mean", "log_var", "reconstruction")
    )
    gain: list[float] = []
    if not fast and have_code_noise(batches, mean.shape[1]) and len(mean) > 1:
        of_others = concatenate_terms(compute(shuffle_codes(batches, mean, log_var)), "reconstruction")
        gain = (of_others - reconstruction).tolist()
    return {
        "mean": mean.tolist(), "log_var": log_var.tolist(), "reconstruction": reconstruction.tolist(), "gain": gain,
        "values": getattr(terms[0], "num_values", 0),
        "tokens": sum(int(getattr(term, "num_tokens", None) or 0) for term in terms),
    }  # fmt: skip


def draw_fixed_noise(tensor: Tensor) -> Tensor:
    """Return standard normal noise, the same in every measurement, without use of the run's generators."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)


def have_code_noise(batches: list[Any], dimensions: int) -> bool:
    """Return whether all batches have noise of the shape of the latent code."""
    noises = [batch_fields(batch).get("noise") for batch in batches]
    return all(isinstance(noise, Tensor) and noise.shape[1:] == (dimensions,) for noise in noises)


def shuffle_codes(batches: list[Any], mean: Tensor, log_var: Tensor) -> list[Any]:
    """Return the batches with noise that gives each sample the code of another sample."""
    named = [convert_batch_to_dict(batch) for batch in batches]
    code = mean + (0.5 * log_var).exp() * torch.cat([batch["noise"] for batch in named]).double()
    order = torch.randperm(len(code), generator=torch.Generator().manual_seed(0)).to(code.device)
    others = torch.empty_like(code)
    others[order] = code[order.roll(1)]
    noise = compute_code_noise(mean, log_var, others)
    parts = torch.split(noise, [len(batch["noise"]) for batch in named])
    return [
        {**batch, "noise": part.to(batch["noise"].dtype)} for batch, part in zip(named, parts, strict=True)
    ]


def is_collapsed(row: Mapping[str, Any], last_beta: float) -> bool:
    """Return whether the code carries no information, or the decoder ignores it, after beta has risen."""
    num_dimensions = len(row["activity"])
    least = min(num_dimensions, max(LEAST_ACTIVE, LEAST_ACTIVE_SHARE * num_dimensions))
    is_empty = row["active_units"] < least and row["kl"] < LEAST_KL
    is_ignored = row.get("gain", math.inf) < LEAST_GAIN * row["reconstruction"]
    has_risen = row["beta"] >= RISEN * last_beta > 0
    return bool(has_risen and (is_empty or is_ignored))


def describe_collapse(row: Mapping[str, Any]) -> str:
    """Return `KL 0.02 nats, 0 of 16 dimensions active, codes of other samples add 0.1 % of the reconstruction, beta
    50`.
    """
    parts = [f"KL {row['kl']:.3g} nats", f"{row['active_units']} of {len(row['activity'])} dimensions active"]
    if "gain" in row:
        percent = 100 * row["gain"] / max(row["reconstruction"], 1e-12)
        parts.append(f"codes of other samples add {percent:.2g} % of the reconstruction")
    return ", ".join([*parts, f"beta {row['beta']:.3g}"])


def suggest_remedy(task: Any, row: Mapping[str, Any], dropped: float = 0.0) -> str:
    """Return the likely cause and the setting to try first. dropped: the share of tokens hidden from the decoder."""
    beta, spread = row["beta"], row.get("residual_variance", math.inf)
    if spread < LITTLE_SPREAD * beta:
        return (
            f"Likely cause: beta {beta:.3g} suits data of that variance around their reconstruction, and here it is "
            f"{spread:.2g}; try task.beta={spread:.1g}"
        )
    if beta > 1:
        return (
            f"Likely cause: beta {beta:.3g} is above 1, the weight of the variational bound; try task.beta=1"
        )
    if "tokens" in row and getattr(task, "schedule", "") != "constant" and dropped < 1:
        rate = 0.3 if dropped < 0.3 else 1.0 if dropped >= 0.8 else dropped + 0.2
        return (
            "Likely cause: the decoder predicts a token from those before it and does without the code; try "
            f"data.augment.word_dropout.rate={rate:.3g}{', or more' if rate < 1 else ''}"
        )
    if row["kl"] >= LEAST_KL:
        return "Likely cause: the decoder does without the code; try a smaller decoder"
    if getattr(task, "schedule", "") == "constant":
        return (
            "Likely cause: the KL has its whole weight before the decoder uses the code; try "
            "task.beta_schedule=linear task.beta_steps=2000"
        )
    if not row["free_bits"]:
        return "Likely cause: the KL of every dimension costs from its first nat on; try task.free_bits=0.1"
    return "Likely cause: the decoder learns faster than the encoder; try a smaller decoder"


def read_word_dropout_rate(run: Components) -> float:
    """Return the configured rate of word dropout; 0 if it is not a number."""
    node = (run.config.data.augment or {}).get("word_dropout")
    rate = node.get("rate") if isinstance(node, Mapping) else None
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def describe_beta(beta: float, row: Mapping[str, Any]) -> str:
    """Return beta of the loss that is summed over the values of a sample as beta of the averaged loss."""
    number = row.get("values") or row["tokens"]
    unit = "values" if "values" in row else "tokens (on average)"
    averaged = f"a loss averaged over the {number:.4g} {unit} of a sample"
    return f"vae: beta {beta:.3g} (equals {beta / number:.2g} for {averaged})"


def format_measurement(row: Mapping[str, Any]) -> str:
    """Return `vae: beta 1  KL 12.3 nats  active 9/16  MI >= 6.1 (ceiling 6.24)  marginal KL <= 6.2  gain 21.0`."""
    parts = [
        f"vae: beta {row['beta']:.3g}", f"KL {row['kl']:.4g} nats",
        f"active {row['active_units']}/{len(row['activity'])}",
    ]  # fmt: skip
    if "mutual_information" in row:
        is_near_ceiling = row["ceiling"] - row["mutual_information"] < NEAR_CEILING
        least, most = (">= ", "<= ") if is_near_ceiling else ("", "")
        parts.append(f"MI {least}{row['mutual_information']:.3g} (ceiling {row['ceiling']:.3g})")
        parts.append(f"marginal KL {most}{row['marginal_kl']:.3g}")
    if "gain" in row:
        parts.append(f"gain {row['gain']:.3g}")
    return "  ".join(parts)
