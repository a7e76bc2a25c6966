"""Rules that take the bandwidth from the samples, and the distances that they need."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from numpyro_kscore._util.checks import check_positive
from numpyro_kscore._util.pytree import pytree, static
from numpyro_kscore._util.sharding import by_rows
from numpyro_kscore.kernels._gram import is_cached
from numpyro_kscore.kernels._median import median_distance
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances

__all__ = ["AutoBandwidth", "Distances", "Median", "bandwidth_candidates", "measure"]


@pytree
class Median:
    """The median heuristic: the bandwidth is the median distance of samples, times a factor.

    Args:
        factor: positive multiplier.

    Raises:
        ValueError: for a factor that is concrete and not positive.

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

    Raises:
        ValueError: for no multiple, or one that is not positive.

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


# Number of samples whose distances are measured where not all pairs are kept.
SOME_POINTS = 1024


class Distances(NamedTuple):
    """Squared distances of all pairs, or of 1024 samples where not all pairs are kept.

    Attributes:
        joint: with the context's added, (k, k).
        within: of the samples alone where there is a context, otherwise None.
        nearest_context: each context's to its nearest other, (n,), or None.
    """

    joint: jax.Array
    within: jax.Array | None
    nearest_context: jax.Array | None


def measure(
    points: jax.Array, context: jax.Array | None, sharding: NamedSharding | None
) -> Distances:
    """Squared distances of samples, (n, d), with those of a context, (n, c), added."""
    n = points.shape[0]
    some = points if is_cached(n) else points[:: -(-n // SOME_POINTS)]
    own = _all_squared_distances(some, sharding)
    if context is None:
        return Distances(own, None, None)
    apart = _all_squared_distances(context, sharding)
    return Distances(own + apart, own, nearest_squared(apart))


def _all_squared_distances(points: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    def own(rows: jax.Array, whole: tuple[jax.Array, jax.Array]) -> jax.Array:
        return squared_distances(rows, *whole)

    return by_rows(own, sharding, points, (points, cancels(points)))


def bandwidth_candidates(bandwidth: Any, squared: jax.Array) -> jax.Array:
    """The candidates for the bandwidth, (b,), from a rule or number and squared distances."""
    dtype = squared.dtype
    if isinstance(bandwidth, Median):
        bandwidth = bandwidth.factor * median_distance(squared)
    elif isinstance(bandwidth, AutoBandwidth):
        bandwidth = jnp.asarray(bandwidth.factors, dtype) * median_distance(squared)
    return jnp.atleast_1d(jnp.asarray(bandwidth, dtype))
