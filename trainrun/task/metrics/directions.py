"""Determine from the name of a metric whether larger or smaller is better."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainrun.errors import ConfigError

if TYPE_CHECKING:
    from trainrun.config.schema import RunConfig

# Parts of a name, and whole words of it without their digits. `score` says nothing: a brier_score is better when small.
SMALL = (
    "loss", "error", "mae", "mse", "mape", "perplexity", "bits", "nats", "distance", "divergence", "entropy",
    "reconstruction", "seconds", "deviation", "brier",
)  # fmt: skip
SMALL_WORDS = {
    "kl", "kld", "nll", "ppl", "bpb", "bpc", "bpd", "wer", "cer", "ece", "fid", "kid", "lpips",
    "cost", "crps", "dissimilarity", "eer", "err", "fnr", "fpr", "imprecision", "inaccuracy", "mismatch", "mismatches",
    "regret", "std", "unmatched",
}  # fmt: skip
PARTS_OF_LOSS = ("soft", "hard", "hidden")  # whole names, of task=distillation
LARGE = ("acc", "precision", "recall", "auc", "auroc", "dice", "correlation", "similarity", "match")
LARGE_WORDS = {
    "f", "r", "top", "iou", "miou", "jaccard", "map", "ap", "mcc", "kappa", "psnr", "ssim", "bleu", "rouge",
    "ndcg", "mrr", "reward",
}  # fmt: skip


def guess_direction(metric: str) -> str | None:
    """Return `min` or `max`, or None if the metric's name implies no direction.

    `val/mse/0` is the first of several numbers named `mse`.
    """
    name = re.sub(r"(/\d+)+$", "", metric).rpartition("/")[2].lower()
    words = re.findall("[a-z]+", re.split("(?<=[a-z0-9])(?:[^a-z]at[^a-z]|@)", name)[0])  # `fpr_at_95_recall`
    small = [word in SMALL_WORDS or any(part in word for part in SMALL) for word in words]
    large = [word in LARGE_WORDS or any(part in word for part in LARGE) for word in words]
    large = [
        is_large and word not in SMALL_WORDS for word, is_large in zip(words, large, strict=True)
    ]  # `mismatch`
    if any(small) and any(large):  # the last word is what it is: `hard_acc`, `acc_loss`
        small, large = small[-1:], large[-1:]
    is_small = any(small) or name in PARTS_OF_LOSS
    return None if is_small == any(large) else "min" if is_small else "max"


def resolve_direction(key: str, metric: str, mode: str, is_named: bool) -> str | None:
    """Return the mode of a setting; for `auto`, the direction that the metric's name implies, or None.

    Raise ConfigError if the name clearly implies the opposite. is_named: whether the user chose the metric too; then
    only names of losses and accuracies are clear.
    """
    usual, sure = guess_direction(metric), not is_named or metric.endswith(("/loss", "/acc"))
    if mode != "auto" and usual not in (None, mode) and sure:
        better = "smaller" if usual == "min" else "larger"
        raise ConfigError(
            f"{key}.mode={mode}: {metric} is better when {better}; use {key}.mode={usual}, or name the metric that "
            f"is meant, as {key}.{'metric' if key == 'scheduler' else 'monitor'}=val/mine"
        )
    return usual if mode == "auto" else mode


def describe_assumed_direction(config: RunConfig, default: str | None) -> str:
    """Return a note if `mode=auto` assumes that a metric of unknown direction is better when larger; else "".

    default: the metric if none is set.
    """
    stops, keep = config.trainer.early_stopping, config.checkpoint
    modes = {"checkpoint": (keep.monitor or default, keep.mode)} if keep.enabled and keep.save_top_k else {}
    modes |= {"trainer.early_stopping": (stops.monitor or default, stops.mode)} if stops.enabled else {}
    for key, (metric, mode) in modes.items():
        if metric and mode == "auto" and guess_direction(metric) is None:
            return (
                f"{key}.mode=auto: {metric} is taken as better when larger; if it is not, set {key}.mode=min"
            )
    return ""
