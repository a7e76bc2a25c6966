"""The result of ``khat``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore.diagnostics._codes import Doubt, Verdict

__all__ = ["KhatEstimate"]


class KhatEstimate(NamedTuple):
    """A Pareto k̂ and how far it can be trusted.

    Attributes:
        value: the estimate; ``-inf`` where all weights are equal.
        low: lower end of a 90 % interval, which includes the error of the energy.
        high: upper end.
        verdict: ``"good"`` (the interval below 0.7), ``"bad"`` (above) or ``"cannot tell"``.
        reason: why, in words.
        log_weights: log p - log q at the draws, up to a constant, (n,); unless they are exact, n
            is rounded down to a multiple of 4.
        log_q: the guide's log density at the same draws, up to a constant, (n,).
        energy: the family of the energy, the estimate of -log q, that was used; ``"exact"`` if the
            guide has a density.
        energy_error: standard deviation over draws of the error of that estimate, in nats.
        alternatives: k̂ by other families that fit the draws equally well; at most ``value``
            where their weights hardly vary, see :func:`~numpyro_kscore.khat`.
        fisher: lower bound of the Fisher divergence in whitened coordinates, averaged over
            dimensions, and its standard error; see
            :func:`~numpyro_kscore.diagnostics.fisher_divergence`.
        doubt: the reason of a "cannot tell", to match on: ``"interval"`` (it holds 0.7),
            ``"few draws"``, ``"flat draws"`` or ``"large error"``; empty otherwise.

    Example::

        from numpyro_kscore import khat

        estimate = khat(draws)
        print(estimate.verdict, estimate.reason)
        estimate.log_weights  # (4000,): for importance_resample
        estimate.doubt in ("", "interval")  # True
    """

    value: float
    low: float
    high: float
    verdict: Verdict
    reason: str
    log_weights: np.ndarray
    log_q: np.ndarray
    energy: str
    energy_error: float
    alternatives: dict[str, float]
    fisher: tuple[float, float]
    doubt: Doubt = ""

    def __str__(self) -> str:
        equal = " (all weights are equal)" if self.value == -np.inf else ""
        return (
            f"k̂ = {self.value:.2f}{equal}, 90 % interval {self.low:.2f} to {self.high:.2f}: "
            f"{self.verdict} ({self.reason})"
        )
