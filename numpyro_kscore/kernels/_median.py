"""The median heuristic: the median distance between points, as a scale for the bandwidth."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_kscore._util.platforms import on_cpu_or

# Points whose distances to all others are measured.
MEDIAN_POINTS = 64


def median_distance(s: jax.Array) -> jax.Array:
    """Median distance of distinct pairs of points, never zero; not differentiated.

    A point's distance to itself does not count. Where half of the pairs coincide the mean
    distance replaces the median, and 1 replaces that where all do. Beyond 64 points only distances
    from 64 of them, evenly spaced, to all others are used: a bandwidth need not be exact. ``s`` are
    the squared distances of all pairs, (n, n).

    Cost: 31 passes over at most 64 n numbers (63 in float64).
    """
    n = s.shape[0]
    stride = -(-n // MEDIAN_POINTS)
    off_diagonal = s * (1.0 - jnp.eye(n, dtype=s.dtype))
    part = lax.stop_gradient(off_diagonal)[::stride]
    zeros, pairs = part.shape[0], part.shape[0] * (n - 1)
    # Distances of points to themselves sort first. Where all points are used each pair occurs
    # twice, which does not change the median.
    values = part.ravel()
    rank = zeros + (pairs - 1) // 2
    lower = on_cpu_or(
        lambda values: order_statistic(values, rank), lambda values: jnp.sort(values)[rank], values
    )
    next_larger = jnp.min(jnp.where(values > lower, values, jnp.inf))
    is_tied = jnp.sum(values <= lower) > zeros + pairs // 2
    upper = jnp.where(is_tied, lower, next_larger)
    median = 0.5 * (jnp.sqrt(lower) + jnp.sqrt(upper))
    # An inner product, since a long sum is compiled into much more code.
    total = jnp.sqrt(values) @ jnp.ones_like(values)
    distance = jnp.where(median > 0, median, total / pairs)
    return jnp.where(distance > 0, distance, 1.0)


def order_statistic(values: jax.Array, rank: int) -> jax.Array:
    """The ``rank``-th smallest (from 0) of non-negative values, exactly.

    The bits of non-negative floats are ordered as the floats are, so the answer is built bit by
    bit from counts. Sorting costs 10-30 times as much on a CPU, but is one launch on a GPU.
    """
    integer, bits = (jnp.int64, 63) if values.dtype == jnp.float64 else (jnp.int32, 31)
    ordered = lax.bitcast_convert_type(values, integer)

    ones = jnp.ones(values.shape, jnp.float32)

    def add_bit(answer: jax.Array, bit: jax.Array) -> tuple[jax.Array, None]:
        candidate = answer | bit
        # Counted by an inner product, which is vectorized; exact below 2^24 values.
        count = (ordered < candidate).astype(jnp.float32) @ ones
        return jnp.where(count <= rank, candidate, answer), None

    powers = jnp.asarray([2**k for k in reversed(range(bits))], integer)
    answer = lax.scan(add_bit, jnp.zeros((), integer), powers)[0]
    return lax.bitcast_convert_type(answer, values.dtype)
