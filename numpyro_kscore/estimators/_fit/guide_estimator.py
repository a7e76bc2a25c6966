"""The contract between an estimator and an objective that fits a guide with it."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax
from jax.sharding import NamedSharding

from numpyro_kscore.estimators._base.standardization import Coordinates


class AtSamples(NamedTuple):
    """An estimate at the samples.

    Attributes:
        residual: ``ŝ - s0``, (n, d).
        scores: ŝ, (n, d).
        info: how the fit went, a :class:`~numpyro_kscore.estimators.ScoreInfo`; None for a network.
        coordinates: the coordinates of the fit.
        nearest: squared distance of samples to their nearest other, in standardized units and
            with the context in it; of 1024 samples, evenly spaced, where there are too many for
            all pairs.
        nearest_context: the same of the context alone, or None without one.

    Example::

        from numpyro_kscore.estimators import nu_method

        estimate = nu_method().at_samples(samples, debias="jackknife")
        estimate.scores  # (200, 2)
        estimate.info.converged  # True
    """

    residual: jax.Array
    scores: jax.Array
    info: Any
    coordinates: Coordinates
    nearest: jax.Array
    nearest_context: jax.Array | None = None


class GuideEstimator:
    """An estimator of the guide's score, as :class:`~numpyro_kscore.ImplicitELBO` uses it.

    Kernels and networks answer the same questions, so an objective need not know which it has.
    The defaults are those of an estimator that starts anew at every step and takes any option.
    """

    #: Rule of standardization: ``"local"``, ``"full"``, ``"diagonal"`` or ``"none"``.
    standardize: Any
    #: Base score of the estimator, see :meth:`resolve_base`.
    base: Any
    #: Whether it keeps a state from one step of a fit to the next.
    is_stateful = False

    def resolve_base(self, base: str | None) -> str | None:
        """The base score to use where the objective is asked for ``base``, perhaps ``"auto"``.

        Raises:
            ValueError: for a base that the estimator cannot take.
        """
        return "model" if base == "auto" else base

    def resolve_debias(self, debias: str | None) -> str | None:
        """``"jackknife"`` or None, where the objective is asked for ``debias``, perhaps ``"auto"``.

        Raises:
            ValueError: for ``"jackknife"`` if the estimator has none.
        """
        return "jackknife" if debias == "auto" else debias

    def in_objective(self, base: str | None, sharding: NamedSharding | None) -> Self:
        """The estimator with the base, as :meth:`resolve_base` returns it, and devices of a fit."""
        raise NotImplementedError

    def init(self, key: jax.Array, dim: int) -> Any:
        """The state before the first step, for draws of ``dim`` dimensions."""
        raise NotImplementedError

    def follow(
        self,
        state: Any,
        key: jax.Array,
        samples: Any,
        base_scores: Any = None,
        *,
        debias: str | None = None,
        context: Any = None,
    ) -> tuple[AtSamples, Any]:
        """The estimate at one step's draws, and the state for the next step.

        Args:
            state: as :meth:`init` or this method returned it.
            key: random key.
            samples: draws, (n, d), as for ``ScoreEstimator.at_samples``, and so is the rest.
            base_scores: values of the base score at the draws, or None.
            debias: as :meth:`resolve_debias` returns it.
            context: values drawn jointly with the samples, or None.
        """
        raise NotImplementedError
