"""How much each setting of a sweep matters for its metric, by Optuna's PED-ANOVA."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainrun.sweep.jobs import Sweep
from trainrun.sweep.points import SweepPoint
from trainrun.sweep.search.study import check_packages

BEST_PART = 0.25  # of the points; Optuna's tenth of a usual sweep are two or three

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def setting_importances(sweep: Sweep, points: Sequence[SweepPoint]) -> dict[str, float]:
    """Return the share of each setting in the difference between the best quarter of the points and the others, the
    largest first.

    Settings that not all points have are left out. Raise ConfigError without Optuna.
    """
    check_packages("sweep.html", "qmc")  # needs scipy, as that sampler
    import optuna

    keys = [key for key in points[0].settings if all(key in point.settings for point in points)]
    columns = {
        key: build_column([point.settings[key] for point in points], sweep.is_logarithmic(key))
        for key in keys
    }
    spaces = {key: space for key, (_, space) in columns.items() if space is not None}
    study = optuna.create_study()
    for number, point in enumerate(points):
        params = {key: columns[key][0][number] for key in spaces}
        sign = point.jobs[0].result.sign
        value = sign * (point.mean or 0.0)
        trial = optuna.trial.create_trial(params=params, distributions=spaces, value=value)
        study.add_trial(trial)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=BEST_PART)
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(share) for key, share in shares.items()}


def build_column(texts: Sequence[str], is_log: bool) -> tuple[list[Any], BaseDistribution | None]:
    """Return the values of a setting, and their space; None for a setting with one value."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    names = list(dict.fromkeys(texts))
    if len(names) < 2:
        return list(texts), None
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return list(texts), CategoricalDistribution(names)
    return numbers, FloatDistribution(min(numbers), max(numbers), log=is_log)
