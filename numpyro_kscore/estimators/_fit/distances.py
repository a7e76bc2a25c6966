"""Distances of samples in standardized coordinates, and the bandwidths that come from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_kscore._util.sharding import by_rows
from numpyro_kscore.estimators._fit.bandwidth import AutoBandwidth, Median
from numpyro_kscore.kernels._gram import is_cached
from numpyro_kscore.kernels._median import median_distance
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances

__all__ = ["Distances", "bandwidth_candidates", "measure"]

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
