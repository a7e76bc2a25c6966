"""The options of an ``ImplicitELBO``, checked against each other and resolved once."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import NamedSharding

from numpyro_kscore._util.checks import check_choice, check_positive
from numpyro_kscore._util.sharding import check_sharding
from numpyro_kscore.estimators._fit.guide_estimator import GuideEstimator

__all__ = ["ObjectiveOptions", "resolve_settings"]


@dataclasses.dataclass(frozen=True)
class ObjectiveOptions:
    """The options of an objective, resolved; :class:`~numpyro_kscore.ImplicitELBO` documents them.

    Attributes:
        estimator: the score estimator, with the base and the sharding below.
        base: ``"model"``, ``"moments"``, ``"gaussian"`` or None.
        debias: ``"jackknife"`` or None.
        clip: longest typical direction, in multiples of a converged fit's noise; None for any.
        local_share: weight of the local log density of a block that has one.
        aggregate: name of the plate whose elements are draws of one distribution, or None.
        sharding: how particles are divided over devices, or None.
    """

    estimator: GuideEstimator
    base: str | None
    debias: str | None
    clip: float | None
    local_share: float
    aggregate: str | None
    sharding: NamedSharding | None


def resolve_settings(
    estimator: Any,
    base: str | None,
    debias: str | None,
    clip: float | None,
    local_share: float,
    aggregate: str | None,
    sharding: NamedSharding | None,
) -> ObjectiveOptions:
    """The settings, with every ``"auto"`` resolved by the estimator.

    Args:
        estimator: a ``ScoreEstimator`` or ``SlicedScoreMatching``.
        base: as for :class:`~numpyro_kscore.ImplicitELBO`.
        debias: as there.
        clip: as there.
        local_share: as there.
        aggregate: as there.
        sharding: as there.

    Raises:
        TypeError: for an estimator or a plate that is none.
        ValueError: for an unknown option, and for one that the estimator cannot take.
    """
    if aggregate is not None and not isinstance(aggregate, str):
        raise TypeError(f"aggregate: expected the name of a plate or None; got {aggregate!r}")
    if not isinstance(estimator, GuideEstimator):
        raise TypeError(
            f"estimator: expected a ScoreEstimator or SlicedScoreMatching; got {estimator!r}"
        )
    check_choice("base", base, ("auto", "model", "moments", "gaussian", None))
    check_choice("debias", debias, ("auto", "jackknife", None))
    if clip is not None:
        check_positive("clip", clip)
    if not 0 <= local_share <= 1:
        raise ValueError(
            f"local_share: expected a number from 0 (scores are estimated from the draws alone) to "
            f"1 (entropies are those of the local densities); got {local_share!r}"
        )
    base = estimator.resolve_base(base)
    if debias == "auto" and aggregate is not None:
        # It doubles the squared error of an estimate from one batch (docs/wae_report).
        debias = None
    sharding = check_sharding(sharding)
    return ObjectiveOptions(
        estimator.in_objective(base, sharding),
        base,
        estimator.resolve_debias(debias),
        clip,
        float(local_share),
        aggregate,
        sharding,
    )
