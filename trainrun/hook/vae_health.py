"""Watch whether the code of a variational autoencoder says anything: posterior collapse, found while it happens.

When: every training of one (`monitor=vae`); it costs two forwards of the held samples, each `update_every_n_steps`.
When not: a step of one graph, which takes no hooks.
How: the same samples of the validation data each time, with noise of its own, in evaluation mode and without gradients:
no random number and no bit of the training is another. Every rank computes its share, rank 0 writes the row.
Source: Burda et al. 2016 (active units), Hoffman and Johnson 2016 (mutual information), Kingma et al. 2016 (free bits).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainrun.errors import ConfigError, TrainingError
from trainrun.hook.latent_statistics import latent_facts, mutual_information, noise_of_code
from trainrun.interfaces import batch_by_name, batch_fields
from trainrun.limits import Count, Limits

if TYPE_CHECKING:
    from trainrun.train_state import TrainState
    from trainrun.training.components import Components

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
    """A task whose bound can be taken apart: `trainrun.task.vae.Vae`, or one's own with the same parts.

    beta: what the KL weighs in the end.
    """

    beta: float

    def terms(self, model: nn.Module, batch: Any) -> Any:
        """Return the fields of `trainrun.task.vae.BoundTerms`."""

    def beta_at(self, step: int) -> float:
        """Return the weight of the KL after `step` updates."""


class VaeHealth:
    """A hook. update_every_n_steps: how often it looks. num_samples: about how many samples of the validation data are
    held for that. window_size: how many looks in a row must find a collapse. verbose: a line with every validation.
    fast: active units and KL alone, from one forward. on_collapse: `raise` ends the run; `boost_free_bits` raises
    `task.free_bits`, again after each further window.

    ConfigError, at the start: no validation data, or a task without a bound.
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
        self._held: list[Any] = []
        self._kl: list[float] = []  # of the looks in a row that found a collapse
        self._told = False
        self._free_bits: float | None = None  # what it was raised to
        self._line = ""
        self._said_beta = False

    def on_start(self, run: Components, state: TrainState) -> None:
        task: Any = run.task
        if not isinstance(run.task, HasBound):
            raise ConfigError(
                f"monitor=vae: watches the code of a VAE, and {type(task).__name__} lacks beta, beta_at(step) or "
                "terms(model, batch); use model=vae task=vae, or leave it out"
            )
        if run.val is None:
            raise ConfigError(
                "monitor=vae: looks at samples of the validation data, and there are none; name data.val, or leave "
                "it out"
            )
        if self._action == "boost_free_bits" and not type(task).__module__.startswith("trainrun.task."):
            raise ConfigError(
                f"on_collapse=boost_free_bits: raises task.free_bits of task=vae, and {type(task).__name__} is a task "
                "of your own; use warn or raise"
            )
        if self._free_bits is not None:
            task.free_bits = max(self._free_bits, task.free_bits)

    def on_step_end(self, run: Components, state: TrainState) -> None:
        if state.step % self._every == 0 and (health := self._look(run, state)):
            self._judge(run, health)

    def on_validation_end(self, run: Components, state: TrainState, metrics: Mapping[str, float]) -> None:
        self._tell(run, state)

    def on_end(self, run: Components, state: TrainState) -> None:
        if not self._said_beta:  # no scheduled validation, no look
            self._tell(run, state)

    def _tell(self, run: Components, state: TrainState) -> None:
        if not self._verbose:
            return
        if not self._line:  # of a run, or an epoch, shorter than `update_every_n_steps`
            self._look(run, state)
        if self._line:
            run.monitors.note(self._line)
        self._line = ""

    def _look(self, run: Components, state: TrainState) -> dict[str, Any] | None:
        """Write the row of a look; None of numbers that are not finite."""
        started = perf_counter()
        with run.monitors.paused(), run.evaluating():
            if not self._held:
                self._held = held_samples(run, self._num_samples)
            health = look(run, self._held, state.step, self._fast)  # waits for the device
        numbers = [*health["kl_of_dimensions"], *health["activity"], health["kl"], health.get("gain", 0.0)]
        if not all(map(math.isfinite, numbers)):
            self._kl.clear()  # not a collapse: nan_policy and the validation say what is wrong
            return None
        run.monitors.write_row("vae", state.step, health | {"seconds": perf_counter() - started})
        if self._verbose and not self._said_beta and ("values" in health or "tokens" in health):
            self._said_beta = True
            run.monitors.note(effective_beta(run.task, health))
        self._line = format_health(health)
        return health

    def state_dict(self) -> dict[str, Any]:
        """Empty while nothing was found: such a run also goes on without the watch."""
        if not self._kl and self._free_bits is None:
            return {}
        return {"kl": list(self._kl), "told": self._told, "free_bits": self._free_bits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kl, self._told = list(state.get("kl", [])), bool(state.get("told", False))
        self._free_bits = state.get("free_bits")

    def _judge(self, run: Components, found: Mapping[str, Any]) -> None:
        """Tell of a collapse once, and of the next one after it has gone."""
        task: Any = run.task
        if not collapsed(found, task.beta):
            self._kl.clear()
            self._told = False
            return
        self._kl = [*self._kl, found["kl"]][-self._window :]
        waking = self._kl[-1] > WAKING * self._kl[0] + WAKING_NATS
        if len(self._kl) < self._window or waking or self._told:
            return
        text = f"posterior collapse: {describe_health(found)}. {remedy(task, found, word_dropout(run))}"
        if self._action == "raise":
            raise TrainingError(f"{text} (hook.vae.on_collapse=raise)")
        if self._action == "boost_free_bits" and task.free_bits < LAST_BOOST:
            self._free_bits = task.free_bits = min(max(FIRST_BOOST, 2 * task.free_bits), LAST_BOOST)
            self._kl.clear()  # it has a whole window to help
            text += f"; task.free_bits is {task.free_bits:g} from here on"
        else:
            self._told = True
        run.monitors.note(text)


def held_samples(run: Components, num_samples: int) -> list[Any]:
    """Return this rank's share of batches, spread evenly over the first validation set, which may be sorted by
    class.
    """
    stream = run.val
    assert stream is not None
    number, samples = stream.num_batches, stream.num_samples
    if number and samples:
        wanted = min(number, math.ceil(num_samples * number / samples))
        places = [place * number // wanted for place in range(wanted)]
        first_batches = (next(iter(stream.epoch(0, place)), None) for place in places)
        batches = [
            batch for batch in first_batches if batch is not None
        ]  # of a last one not every rank has a share
    else:
        size = run.config.data.batch_size * run.parallel.world_size
        batches = list(islice(stream.epoch(0), math.ceil(num_samples / size)))
    return [batch.data for batch in batches if batch.real]


def look(run: Components, held: list[Any], step: int, fast: bool) -> dict[str, Any]:
    """Measure the latent code on the held samples of all ranks. Return the row."""
    task: Any = run.task

    def terms_of(batches: list[Any]) -> list[Any]:
        with run.precision.autocast():
            return [task.terms(run.model, batch) for batch in batches]

    def joined(terms: list[Any], name: str) -> Tensor:
        return torch.cat([getattr(term, name) for term in terms]).double()

    totals: dict[str, Any] = {
        "mean": [],
        "log_var": [],
        "reconstruction": [],
        "gain": [],
        "values": 0,
        "tokens": 0,
    }
    if held:
        terms = terms_of(held)
        mean, log_var, rebuilt = (joined(terms, name) for name in ("mean", "log_var", "reconstruction"))
        totals |= {"mean": mean.tolist(), "log_var": log_var.tolist(), "reconstruction": rebuilt.tolist()}
        totals["values"] = getattr(terms[0], "num_values", 0)
        totals["tokens"] = sum(int(getattr(term, "num_tokens", None) or 0) for term in terms)
        if not fast and takes_noise(held, mean.shape[1]) and len(mean) > 1:
            others = joined(terms_of(shuffle_codes(held, mean, log_var)), "reconstruction")
            totals["gain"] = (others - rebuilt).tolist()
    ranks = run.parallel.gather(totals)
    means, log_vars, reconstructions, gains = (
        torch.tensor([row for rank in ranks for row in rank[name]], dtype=torch.float64)
        for name in ("mean", "log_var", "reconstruction", "gain")
    )
    facts = latent_facts(means, log_vars)
    row: dict[str, Any] = {
        "beta": float(task.beta_at(step)), "kl": float(facts.kl.sum()), "active_units": facts.active_units,
        "reconstruction": float(reconstructions.mean()), "free_bits": float(getattr(task, "free_bits", 0.0)),
        "kl_of_dimensions": facts.kl.tolist(), "activity": facts.activity.tolist(),
    }  # fmt: skip
    if not fast:
        information = mutual_information(means, log_vars, normal_like(means))
        row |= {"mutual_information": information, "ceiling": math.log(len(means))}
        row["marginal_kl"] = row["kl"] - information
    if len(gains):
        row["gain"] = float(gains.mean())
    if tokens := sum(rank["tokens"] for rank in ranks):
        row["tokens"] = tokens / len(means)
    if values := max(rank["values"] for rank in ranks):
        row["values"] = values
    if values and getattr(task, "likelihood", "") in ("auto", "gaussian"):
        row["residual_variance"] = 2 * row["reconstruction"] / values
    return row


def normal_like(tensor: Tensor) -> Tensor:
    """Return standard normal noise, the same in every measurement and without the run's generators."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)


def takes_noise(held: list[Any], dimensions: int) -> bool:
    """Return whether the batches hold noise of the latent code alone."""
    noises = [batch_fields(batch).get("noise") for batch in held]
    return all(isinstance(noise, Tensor) and noise.shape[1:] == (dimensions,) for noise in noises)


def shuffle_codes(held: list[Any], mean: Tensor, log_var: Tensor) -> list[Any]:
    """Return the batches with noise that gives each sample the code of another sample."""
    named = [batch_by_name(batch) for batch in held]
    code = mean + (0.5 * log_var).exp() * torch.cat([batch["noise"] for batch in named]).double()
    order = torch.randperm(len(code), generator=torch.Generator().manual_seed(0)).to(code.device)
    others = torch.empty_like(code)
    others[order] = code[order.roll(1)]
    noise = noise_of_code(mean, log_var, others)
    parts = torch.split(noise, [len(batch["noise"]) for batch in named])
    return [
        {**batch, "noise": part.to(batch["noise"].dtype)} for batch, part in zip(named, parts, strict=True)
    ]


def collapsed(found: Mapping[str, Any], last_beta: float) -> bool:
    """Return whether the code carries nothing, or the decoder ignores it, after beta has risen."""
    dimensions = len(found["activity"])
    least = min(dimensions, max(LEAST_ACTIVE, LEAST_ACTIVE_SHARE * dimensions))
    silent = found["active_units"] < least and found["kl"] < LEAST_KL
    ignored = found.get("gain", math.inf) < LEAST_GAIN * found["reconstruction"]
    return bool(found["beta"] >= RISEN * last_beta > 0 and (silent or ignored))


def describe_health(found: Mapping[str, Any]) -> str:
    """Return `KL 0.02 nats, 0 of 16 dimensions active, codes of other samples cost 0.1 % of the reconstruction,
    beta 50`.
    """
    parts = [
        f"KL {found['kl']:.3g} nats",
        f"{found['active_units']} of {len(found['activity'])} dimensions active",
    ]
    if "gain" in found:
        share = 100 * found["gain"] / max(found["reconstruction"], 1e-12)
        parts.append(f"codes of other samples cost {share:.2g} % of the reconstruction")
    return ", ".join([*parts, f"beta {found['beta']:.3g}"])


def remedy(task: Any, found: Mapping[str, Any], dropped: float = 0.0) -> str:
    """Return the likely cause, and the setting to try first. dropped: the share of tokens that the decoder does not
    see.
    """
    beta, spread = found["beta"], found.get("residual_variance", math.inf)
    if spread < LITTLE_SPREAD * beta:
        return (
            f"Likely cause: beta {beta:.3g} suits data of that variance around their reconstruction, and here it is "
            f"{spread:.2g}; try task.beta={spread:.1g}"
        )
    if beta > 1:
        return f"Likely cause: beta {beta:.3g} weighs the KL more than the bound does; try task.beta=1"
    if "tokens" in found and getattr(task, "schedule", "") != "constant" and dropped < 1:
        rate = 0.3 if dropped < 0.3 else 1.0 if dropped >= 0.8 else dropped + 0.2
        return (
            "Likely cause: the decoder predicts a token from those before it and does without the code; try "
            f"data.augment.word_dropout.rate={rate:.3g}{', or more' if rate < 1 else ''}"
        )
    if found["kl"] >= LEAST_KL:
        return "Likely cause: the decoder does without the code; try a smaller decoder"
    if getattr(task, "schedule", "") == "constant":
        return (
            "Likely cause: the KL has its whole weight before the decoder uses the code; try "
            "task.beta_schedule=linear task.beta_steps=2000"
        )
    if not found["free_bits"]:
        return "Likely cause: the KL of every dimension costs from its first nat on; try task.free_bits=0.1"
    return "Likely cause: the decoder learns faster than the encoder; try a smaller decoder"


def word_dropout(run: Components) -> float:
    """Return the configured rate of word dropout; 0 if it is not a number."""
    node = (run.config.data.augment or {}).get("word_dropout")
    rate = node.get("rate") if isinstance(node, Mapping) else None
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def effective_beta(task: Any, found: Mapping[str, Any]) -> str:
    """Describe the effective beta, whatever the losses are summed or averaged over."""
    number = found.get("values") or found["tokens"]
    terms = "values" if "values" in found else "tokens, on average,"
    return (
        f"vae: effective beta {task.beta:.3g}: a sum over {number:.4g} {terms} and one over {len(found['activity'])} "
        f"dimensions of a sample; beside a reconstruction averaged over them it is {task.beta / number:.2g}"
    )


def format_health(found: Mapping[str, Any]) -> str:
    """Return `vae: beta 1  KL 12.3 nats  active 9/16  MI >= 6.1 (ceiling 6.24)  marginal KL <= 6.2  gain 21.0`."""
    parts = [
        f"vae: beta {found['beta']:.3g}", f"KL {found['kl']:.4g} nats",
        f"active {found['active_units']}/{len(found['activity'])}",
    ]  # fmt: skip
    if "mutual_information" in found:
        near = found["ceiling"] - found["mutual_information"] < NEAR_CEILING
        least, most = (">= ", "<= ") if near else ("", "")
        parts.append(f"MI {least}{found['mutual_information']:.3g} (ceiling {found['ceiling']:.3g})")
        parts.append(f"marginal KL {most}{found['marginal_kl']:.3g}")
    if "gain" in found:
        parts.append(f"gain {found['gain']:.3g}")
    return "  ".join(parts)
