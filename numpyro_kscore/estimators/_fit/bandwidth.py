"""Rules that take the bandwidth from the samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._util.checks import check_positive
from numpyro_kscore._util.pytree import pytree, static


@pytree
class Median:
    """The median heuristic: the bandwidth is the median distance of samples, times a factor.

    Args:
        factor: positive multiplier.

    Example::

        from numpyro_kscore.estimators import Median, nu_method

        score = nu_method(bandwidth=Median(0.8)).fit(samples)
        score.info.bandwidth  # 1.28
    """

    factor: Any = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)


@pytree
class AutoBandwidth:
    """A bandwidth rule: the multiple of a reference with the least held-out loss.

    For a score estimator multiples less than the first have to be better by two standard errors.

    The reference is the median distance for a :class:`~numpyro_kscore.ScoreEstimator`, and the
    normal-reference bandwidth for a :class:`~numpyro_kscore.estimators.KernelDensity`.

    Args:
        factors: positive multiples that are tried; each costs as much as the fit itself.

    Example::

        from numpyro_kscore.estimators import AutoBandwidth, KernelDensity

        score = KernelDensity(AutoBandwidth((0.5, 0.7, 1.0))).fit(samples)
        score.info.losses  # (3,)
    """

    factors: tuple[float, ...] = static(default=(1.0, 2.0, 4.0, 0.5))

    def __post_init__(self) -> None:
        # A static field must be hashable, which lists and arrays are not.
        factors = tuple(float(factor) for factor in np.atleast_1d(self.factors))
        if not factors:
            raise ValueError("factors: expected at least one multiple; got none")
        check_positive("factors", np.array(factors))
        object.__setattr__(self, "factors", factors)
